"""Rotary embeddings that leave out the first or the last tokens (class and register tokens, text beside an image)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import onnx_ir as ir

from qknorm_onnx.graph.match.fragments import Rotary
from qknorm_onnx.graph.match.located import Dim, Located, Unreadable
from qknorm_onnx.graph.walk.constants import attribute_int, attribute_or_input, input_of, integers, producer
from qknorm_onnx.graph.walk.layout import dims_of

Found = tuple[Rotary, Located] | Unreadable | None
END = 1 << 31


def read_unrotated_ends(located: Located, read_rotated: Callable[[Located], Found]) -> Found:
    """Concat(first tokens as they are, rotary of the others, last tokens as they are) along the positions; one end may lack."""
    node = producer(located.value, "Concat")
    if node is None or len(node.inputs) not in (2, 3) or "S" not in located.layout:
        return None
    axis = located.layout.index("S")
    parts = [part for part in node.inputs if part is not None]
    if len(parts) != len(node.inputs) or attribute_int(node, "axis", 0) % len(located.layout) != axis:
        return None
    for place in (1, 0) if len(parts) == 2 else (1,):
        found = read_rotated(Located(parts[place], located.layout, {**located.sizes, "S": ir.SymbolicDim(None)}))
        if isinstance(found, Unreadable):
            return found
        joined = _joined(parts, place, found, axis) if found is not None else None
        if found is None or joined is None:
            continue
        whole, before, behind = joined
        rotary = found[0]
        if any(letters in ("B", "H") for letters in rotary.cos.layout) or rotary.cos.heads:
            reason = "its rotary embedding leaves out some tokens and has tables of its own for each batch or head"
            return Unreadable(reason, node, "use one table for all, or put rows of ones and zeros in front of the tables")
        cos, sin = (dataclasses.replace(table, prefix=before, suffix=behind) for table in (rotary.cos, rotary.sin))
        return dataclasses.replace(rotary, cos=cos, sin=sin), located.at(whole, located.layout)
    return None


def _joined(parts: list[ir.Value], place: int, found: tuple[Rotary, Located], axis: int) -> tuple[ir.Value, int, int] | None:
    """The tensor that is cut into `parts`, `found` in the place of one of them, and how many tokens lie before and behind it."""
    pieces = [_piece(found[1].value if index == place else part, axis) for index, part in enumerate(parts)]
    known = [piece for piece in pieces if piece is not None]
    if len(known) != len(pieces) or len({piece.whole for piece in known}) != 1 or known[0].start != 0:
        return None
    if any(first.end is None or first.end != second.start for first, second in itertools.pairwise(known)):
        return None
    if known[-1].end is not None:
        return None
    before = sum(piece.length or 0 for piece in known[:place])
    lengths = [piece.length for index, piece in enumerate(known) if index != place]
    if any(length is None for length in lengths):
        return None
    return known[0].whole, before, sum(piece.length or 0 for piece in known[place + 1 :])


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tokens `start` to `end` of `whole`; None is its last one, and negative numbers count from there."""

    whole: ir.Value
    start: int
    end: int | None
    length: int | None


def _piece(value: ir.Value, axis: int) -> Piece | None:
    """`value` as tokens side by side of another tensor, by Split or Slice."""
    node, dims = producer(value, "Split", "Slice"), dims_of(value)
    if node is None or node.inputs[0] is None or dims is None:
        return None
    if node.op_type == "Slice":
        return _sliced(node, node.inputs[0], dims[axis], axis)
    sizes = attribute_or_input(node, "split", 1)
    if attribute_int(node, "axis", 0) % len(dims) != axis:
        return None
    shapes = [dims_of(output) for output in node.outputs]
    lengths = list(sizes) if sizes is not None else [shape[axis] if shape is not None else None for shape in shapes]
    index = value.index() or 0
    before = [item for item in lengths[:index] if isinstance(item, int)]
    if len(before) < index:
        return None
    start = sum(before)
    size = lengths[index]
    if index == len(node.outputs) - 1:
        return Piece(node.inputs[0], start, None, size if isinstance(size, int) else None)
    return Piece(node.inputs[0], start, start + size, size) if isinstance(size, int) else None


def _sliced(node: ir.Node, whole: ir.Value, own: Dim, axis: int) -> Piece | None:
    bounds, dims = _range(node, axis), dims_of(whole)
    if bounds is None or dims is None:
        return None
    start, end = (_counted(bound, dims[axis]) for bound in bounds)
    last = None if end >= END or end == dims[axis] else end
    length = own if isinstance(own, int) else None
    if length is None and last is not None and (start < 0) == (last < 0):
        length = last - start
    if length is None and last is None and start < 0:
        length = -start
    return Piece(whole, start, last, length)


def _counted(bound: int, total: Dim) -> int:
    """A bound of a Slice counted from the front where the number of tokens is known."""
    return bound + total if bound < 0 and isinstance(total, int) else bound


def _range(node: ir.Node, axis: int) -> tuple[int, int] | None:
    """Start and end of a Slice with step 1 along `axis` alone."""
    starts, ends, axes = (integers(input_of(node, index)) for index in (1, 2, 3))
    steps = integers(input_of(node, 4)) if input_of(node, 4) is not None else (1,)
    rank = len(dims_of(node.outputs[0]) or ())
    if starts is None or ends is None or axes is None or steps != (1,) or len(axes) != 1 or axes[0] % rank != axis:
        return None
    return starts[0], ends[0]
