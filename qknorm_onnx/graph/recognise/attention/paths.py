"""From a softmax back to the product of two activations, and on to the product with the values, whatever lies between."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import onnx_ir as ir

from qknorm_onnx.graph.walk.axis_origins import (
    MULTIPLIERS,
    Axes,
    axes_before,
    is_repeated,
    is_weight,
    reduced_axes,
    tracked,
)
from qknorm_onnx.graph.walk.layout import dims_of
from qknorm_onnx.graph.walk.limits import SCORE_PATH_NODES

# What is no longer probabilities behind these.
ENDS = frozenset({"Shape", "Size", "TopK", "ArgMax", "ArgMin", "NonZero", "IsNaN", "IsInf"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScorePath:
    """`node` multiplies `operands`; `steps` lead from it to the logits. `key_axes` are those of its output, from 0."""

    node: ir.Node
    operands: tuple[ir.Value, ir.Value]
    steps: tuple[ir.Node, ...]
    key_axes: frozenset[int]


def score_paths(logits: ir.Value, key_axis: int) -> Iterator[ScorePath]:
    """All products of two activations behind `logits`, nearest first, with `key_axis` from one and another axis from the other.

    Products with a weight are stepped over where the axis is not the weight's own: routers and classifiers end there.
    """
    dims = dims_of(logits)
    if dims is None:
        return
    waiting: list[tuple[ir.Value, Axes, tuple[ir.Node, ...]]] = [(logits, tracked(len(dims)), ())]
    seen = set[ir.Value]()
    while waiting and len(seen) < SCORE_PATH_NODES:
        value, axes, steps = waiting.pop(0)
        node = value.producer()
        if node is None or value in seen or value is not node.outputs[0]:
            continue
        seen.add(value)
        operands = _multiplied(node)
        if operands is not None:
            if _is_outer(node, operands, axes, key_axis):
                carrying = frozenset(place for place, axis in enumerate(axes) if key_axis in axis)
                yield ScorePath(node=node, operands=operands, steps=steps, key_axes=carrying)
            continue
        for index, operand in enumerate(node.inputs):
            before = axes_before(node, index, axes)
            if operand is None or before is None or not any(key_axis in axis for axis in before):
                continue
            if len(frozenset[int]().union(*before)) > 1:
                waiting.append((operand, before, (node, *steps)))


def _multiplied(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """The two activations that a product, or a sum over products, multiplies."""
    if node.op_type == "ReduceSum" and node.inputs[0] is not None:
        inner = node.inputs[0].producer()
        if inner is None or inner.op_type != "Mul":
            return None
        node = inner
    elif node.op_type not in MULTIPLIERS or len(node.inputs) != 2:
        return None
    first, second = node.inputs
    return None if first is None or second is None or is_weight(first) or is_weight(second) else (first, second)


def _is_outer(node: ir.Node, operands: tuple[ir.Value, ir.Value], axes: Axes, key_axis: int) -> bool:
    """Whether a key axis comes from one operand alone, and another axis that is still there from the other alone."""
    keys = frozenset(place for place, axis in enumerate(axes) if key_axis in axis)
    live = frozenset(place for place, axis in enumerate(axes) if axis)
    first, second = (_places(node, index, value, len(axes)) for index, value in enumerate(operands))
    return bool((keys & first - second and live & second - first) or (keys & second - first and live & first - second))


def _places(node: ir.Node, index: int, value: ir.Value, rank: int) -> frozenset[int]:
    """The axes of the output of `node` along which its operand `value` differs."""
    before = axes_before(node, 0 if node.op_type == "ReduceSum" else index, tracked(rank)) or ()
    differing = [axis for place, axis in enumerate(before) if not is_repeated(value, place - len(before))]
    return frozenset[int]().union(*differing)


def values_path(start: ir.Value, key_axes: frozenset[int], *, through_softmax: bool) -> tuple[ir.Node, ...] | None:
    """The nodes from `start` to the first product with an activation that sums over `key_axes`, that product last."""
    waiting: list[tuple[ir.Value, frozenset[int], tuple[ir.Node, ...]]] = [(start, key_axes, ())]
    seen = set[ir.Value]()
    while waiting and len(seen) < SCORE_PATH_NODES:
        value, keys, steps = waiting.pop(0)
        if value in seen:
            continue
        seen.add(value)
        for usage in value.uses():
            node = usage.node
            if node.op_type in ENDS or (node.op_type in SOFTMAX and not through_softmax):
                continue
            after = _keys_after(node, usage.idx, keys)
            operands = _multiplied(node)
            if operands is not None and not after and _weighs_values(node, operands, keys):
                return (*steps, node)
            if operands is None and after:
                waiting.append((node.outputs[0], after, (*steps, node)))
    return None


SOFTMAX = ("Softmax", "LogSoftmax")


def _keys_after(node: ir.Node, index: int, keys: frozenset[int]) -> frozenset[int]:
    after = dims_of(node.outputs[0])
    before = axes_before(node, index, tracked(len(after))) if after is not None else None
    return frozenset[int]().union(*(axis for place, axis in enumerate(before or ()) if place in keys))


def _weighs_values(node: ir.Node, operands: tuple[ir.Value, ir.Value], keys: frozenset[int]) -> bool:
    """A matrix product does; a sum over products does where one operand has an axis that the other has not (of the values)."""
    if node.op_type != "ReduceSum":
        return True
    dims = dims_of(operands[0]) or ()
    others = [place - len(dims) for place in range(len(dims)) if place not in keys]
    shared = all(not is_repeated(value, place - len(dims)) for value in operands for place in keys)
    return shared and any(is_repeated(operands[0], axis) != is_repeated(operands[1], axis) for axis in others)


def summed_axis(node: ir.Node) -> int | None:
    """The one axis, from 0, over which an Exp written by hand is summed (or a ReduceLogSumExp sums); None for all others."""
    value = node.inputs[0] if node.op_type == "ReduceLogSumExp" else node.outputs[0]
    rank = len(value.shape) if value is not None and value.shape is not None else 0
    if value is None or not rank or node.op_type not in ("Exp", "ReduceLogSumExp"):
        return None
    sums = [node] if node.op_type == "ReduceLogSumExp" else _sums_of(value)
    axes = [reduced_axes(item, rank) for item in sums]
    return next((place for item in axes if len(item) == 1 for place in item), None)


def _sums_of(value: ir.Value) -> list[ir.Node]:
    """Sums over `value`, also masked, dropped out or converted first."""
    waiting, found = [value], list[ir.Node]()
    for _ in range(8):
        nodes = [usage.node for item in waiting for usage in item.uses()]
        found += [node for node in nodes if node.op_type == "ReduceSum"]
        waiting = [node.outputs[0] for node in nodes if node.op_type in ("Cast", "Identity", "Where", "Dropout", "Mul")][:8]
    return found
