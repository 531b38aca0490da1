"""Rotary embeddings that skip the first tokens (class and register tokens of vision models)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import onnx_ir as ir

from qknorm_onnx.graph.match.fragments import Rotary
from qknorm_onnx.graph.match.located import Located, Unreadable
from qknorm_onnx.graph.walk.constants import attribute_int, attribute_or_input, input_of, integers, producer
from qknorm_onnx.graph.walk.layout import dims_of

Found = tuple[Rotary, Located] | Unreadable | None


def read_skipped_prefix(located: Located, read_rotated: Callable[[Located], Found]) -> Found:
    """Concat(first tokens as they are, rotary of the others) along the positions."""
    node = producer(located.value, "Concat")
    if node is None or len(node.inputs) != 2 or "S" not in located.layout:
        return None
    axis = located.layout.index("S")
    first, others = node.inputs
    if first is None or others is None or attribute_int(node, "axis", 0) % len(located.layout) != axis:
        return None
    found = read_rotated(Located(others, located.layout, {**located.sizes, "S": ir.SymbolicDim(None)}))
    if found is None or isinstance(found, Unreadable):
        return found
    rotary, rest = found
    cut = _cut_in_two(first, rest.value, axis)
    if cut is None:
        return None
    if any(letters in ("B", "H") for letters in rotary.cos.layout):
        reason = "its rotary embedding skips the first tokens and has tables of its own for each batch or head"
        return Unreadable(reason, node, "use one table for all, or put rows of ones and zeros in front of the tables")
    whole, count = cut
    cos, sin = (dataclasses.replace(table, prefix=count) for table in (rotary.cos, rotary.sin))
    return dataclasses.replace(rotary, cos=cos, sin=sin), located.at(whole, located.layout)


def _cut_in_two(first: ir.Value, rest: ir.Value, axis: int) -> tuple[ir.Value, int] | None:
    """The tensor of which `first` are the first tokens and `rest` all others, by one Split or two Slices, and their number."""
    split = producer(first, "Split")
    if split is not None and list(split.outputs) == [first, rest] and split.inputs[0] is not None:
        sizes = attribute_or_input(split, "split", 1)
        dims = dims_of(first)
        count = sizes[0] if sizes is not None else dims[axis] if dims is not None else None
        along = attribute_int(split, "axis", 0) % len(dims or ()) if dims else None
        return (split.inputs[0], count) if isinstance(count, int) and along == axis else None
    head, tail = producer(first, "Slice"), producer(rest, "Slice")
    if head is None or tail is None or head.inputs[0] is None or head.inputs[0] is not tail.inputs[0]:
        return None
    ranges = _range(head, axis), _range(tail, axis)
    if ranges[0] is None or ranges[1] is None or ranges[0] != (0, ranges[1][0]) or ranges[1][1] < 1 << 31:
        return None
    return head.inputs[0], ranges[1][0]


def _range(node: ir.Node, axis: int) -> tuple[int, int] | None:
    """Start and end of a Slice with step 1 along `axis` alone."""
    starts, ends, axes = (integers(input_of(node, index)) for index in (1, 2, 3))
    steps = integers(input_of(node, 4)) if input_of(node, 4) is not None else (1,)
    rank = len(dims_of(node.outputs[0]) or ())
    if starts is None or ends is None or axes is None or steps != (1,) or len(axes) != 1 or axes[0] % rank != axis:
        return None
    return starts[0], ends[0]
