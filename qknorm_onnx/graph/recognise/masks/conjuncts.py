"""Takes a mask apart along the graph: the values that must all hold for a key to be seen, and the floats added beside them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.symbolic.expression import IndexReader
from qknorm_onnx.graph.symbolic.tensor import integers
from qknorm_onnx.graph.symbolic.terms import Known, Linear, Real

_BFLOAT16_MIN = -(2.0**127) * (2 - 2.0**-7)
Axes = tuple[int | None, ...]
SMALLEST_FINITE = frozenset([*(float(np.finfo(kind).min) for kind in (np.float16, np.float32, np.float64)), _BFLOAT16_MIN])
_LAYOUT = ("Identity", "Expand", "Unsqueeze", "Transpose")


@dataclass(frozen=True)
class Part:
    """One operand of a mask.

    `axes[d]` is the axis of `value` that lies along axis d of the mask, None where `value` has none.  `boolean`: True hides a key
    where `negated`, else False does; where not `boolean` the value is a float that is added to the scores.
    `fill` is what the operand writes over hidden scores, None where the mask is boolean.
    """

    value: ir.Value
    axes: Axes
    boolean: bool
    negated: bool = False
    fill: float | None = None


@dataclass(frozen=True)
class TwoValued:
    """A tensor that is `when_true` where the boolean `condition` holds and `when_false` elsewhere."""

    condition: ir.Value
    axes: Axes
    when_true: float
    when_false: float


def hides(number: float, dtype: ir.DataType | None) -> bool:
    """Whether a score plus `number` has weight 0 after the softmax: -inf, -1e9 and below, or fp16's smallest number."""
    return number <= -1e9 or (dtype == ir.DataType.FLOAT16 and number <= -65504.0)


def boolean_parts(reader: IndexReader, value: ir.Value, axes: Axes, *, negated: bool, fill: float | None) -> Iterator[Part]:
    """The operands whose conjunction `value` (its opposite when `negated`) is."""
    node = value.producer()
    kind = node.op_type if node is not None and node.domain == "" else None
    if node is not None and kind == ("Or" if negated else "And"):
        for operand in node.inputs:
            assert operand is not None
            yield from boolean_parts(reader, operand, _aligned(reader, value, operand, axes), negated=negated, fill=fill)
        return
    if node is not None and kind == "Where" and (pair := _conjunction_of_where(reader, node, negated)):
        for operand, opposite in pair:
            yield from boolean_parts(reader, operand, _aligned(reader, value, operand, axes), negated=opposite, fill=fill)
        return
    if node is not None and kind in ("Not", "Cast", *_LAYOUT) and node.inputs[0] is not None:
        inner = _inner_axes(reader, node, axes)
        if inner is not None and (kind != "Cast" or type_of(reader, node.inputs[0]) == ir.DataType.BOOL):
            parts = list(boolean_parts(reader, node.inputs[0], inner, negated=negated != (kind == "Not"), fill=fill))
            if len(parts) > 1 or kind not in ("Unsqueeze", "Transpose"):  # a single part keeps the layout that it was given
                yield from parts
                return
    yield Part(value, axes, True, negated, fill)


def additive_parts(reader: IndexReader, value: ir.Value, axes: Axes) -> Iterator[Part]:
    """The operands whose sum `value` is; those that only hide keys as booleans."""
    if constant_number(reader, value) == 0.0:
        return
    two = two_valued(reader, value)
    if two is not None and 0.0 in (two.when_true, two.when_false):
        fill = min(two.when_true, two.when_false)
        if hides(fill, type_of(reader, value)):
            inner = tuple(two.axes[axis] if axis is not None else None for axis in axes)
            yield from boolean_parts(reader, two.condition, inner, negated=two.when_true != 0.0, fill=fill)
            return
    node = value.producer()
    kind = node.op_type if node is not None and node.domain == "" else None
    if node is not None and kind == "Add":
        for operand in node.inputs:
            assert operand is not None
            yield from additive_parts(reader, operand, _aligned(reader, value, operand, axes))
        return
    if node is not None and kind == "Where" and (found := _filled_where(reader, node)):
        condition, opposite, fill, beside = found
        yield from boolean_parts(reader, condition, _aligned(reader, value, condition, axes), negated=opposite, fill=fill)
        yield from additive_parts(reader, beside, _aligned(reader, value, beside, axes))
        return
    if node is not None and kind in _LAYOUT and node.inputs[0] is not None:
        inner_axes = _inner_axes(reader, node, axes)
        if inner_axes is not None:
            yield from additive_parts(reader, node.inputs[0], inner_axes)
            return
    yield Part(value, axes, False)


def constant_number(reader: IndexReader, value: ir.Value | None) -> float | None:
    """The number (1.0 or 0.0 for a truth value) that every element of `value` is, None where they differ or are not known."""
    known = reader.read(value) if value is not None else None
    if known is None:
        return None
    if isinstance(known.element, Known):
        return float(known.element.value)
    if isinstance(known.element, Real):
        return known.element.value
    return float(known.element.constant) if isinstance(known.element, Linear) and not known.element.terms else None


def type_of(reader: IndexReader, value: ir.Value) -> ir.DataType | None:
    """The element type that the graph declares, or else the one that the ops in front of `value` give it."""
    known = reader.read(value) if value.dtype is None else None
    return known.dtype if known is not None else value.dtype


def _rank(reader: IndexReader, value: ir.Value) -> int | None:
    known = reader.read(value)
    return known.rank if known is not None else None


def _aligned(reader: IndexReader, value: ir.Value, operand: ir.Value, axes: Axes) -> Axes:
    """`axes` of `value` as axes of an operand that is broadcast to it."""
    outer, inner = _rank(reader, value), _rank(reader, operand)
    if outer is None or inner is None:
        return tuple(None for _ in axes)
    return tuple(axis - outer + inner if axis is not None and axis >= outer - inner else None for axis in axes)


def _inner_axes(reader: IndexReader, node: ir.Node, axes: Axes) -> Axes | None:
    """`axes` of a layout op's result as axes of its input."""
    source = node.inputs[0]
    rank = _rank(reader, source) if source is not None else None
    if source is None or rank is None:
        return None
    if node.op_type == "Transpose":
        order = node.attributes.get_ints("perm", list(reversed(range(rank))))
        return tuple(order[axis] if axis is not None else None for axis in axes)
    if node.op_type == "Unsqueeze":
        given = integers(reader.read(node.inputs[1])) if len(node.inputs) > 1 and node.inputs[1] is not None else None
        if given is None:
            return None
        inserted = {axis % (rank + len(given)) for axis in given}
        kept = [axis for axis in range(rank + len(given)) if axis not in inserted]
        return tuple(kept.index(axis) if axis in kept else None for axis in axes)
    return _aligned(reader, node.outputs[0], source, axes)


def _conjunction_of_where(reader: IndexReader, node: ir.Node, negated: bool) -> list[tuple[ir.Value, bool]] | None:
    """The two operands (value, negated) whose conjunction a boolean Where is, or whose conjunction is its opposite."""
    condition, when_true, when_false = node.inputs
    if condition is None or when_true is None or when_false is None:
        return None
    blocked = float(negated)
    if constant_number(reader, when_false) == blocked:
        return [(condition, False), (when_true, negated)]
    if constant_number(reader, when_true) == blocked:
        return [(condition, True), (when_false, negated)]
    return None


def _filled_where(reader: IndexReader, node: ir.Node) -> tuple[ir.Value, bool, float, ir.Value] | None:
    """`Where(c, x, fill)` or `Where(c, fill, x)`: condition, whether it hides, the fill, and x."""
    condition, when_true, when_false = node.inputs
    if condition is None or when_true is None or when_false is None:
        return None
    for fill, beside, opposite in ((when_false, when_true, False), (when_true, when_false, True)):
        number = constant_number(reader, fill)
        if number is not None and constant_number(reader, beside) is None and hides(number, type_of(reader, fill)):
            return condition, opposite, number, beside
    return None


_BINARY: dict[str, Callable[[float, float], float]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Equal": operator.eq,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
}


def two_valued(reader: IndexReader, value: ir.Value) -> TwoValued | None:
    """`value` as one of two constants chosen by one boolean value of the graph, if it is that."""
    node = value.producer()
    rank = _rank(reader, value)
    if node is None or node.domain != "" or rank is None:
        return None
    if node.op_type == "Where":
        return _two_valued_where(reader, node, rank)
    if node.op_type in _BINARY:
        return _two_valued_binary(reader, node, rank)
    source = node.inputs[0] if node.inputs else None
    if source is None or node.op_type not in ("Cast", "Not", "Neg", *_LAYOUT):
        return None
    inner = two_valued(reader, source) if node.op_type in _LAYOUT else _truth_or_two(reader, source)
    axes = _inner_axes(reader, node, tuple(range(rank)))
    if inner is None or axes is None:
        return None
    through = tuple(inner.axes[axis] if axis is not None else None for axis in axes)
    pair = tuple(_applied(node, value, number) for number in (inner.when_true, inner.when_false))
    return TwoValued(inner.condition, through, pair[0], pair[1]) if not any(map(math.isnan, pair)) else None


def _applied(node: ir.Node, value: ir.Value, number: float) -> float:
    """What a one-input op makes of a constant; NaN where that is not known."""
    if node.op_type == "Not":
        return 1.0 - number
    if node.op_type == "Neg":
        return -number
    if node.op_type == "Cast":
        return _cast_number(number, ir.DataType(node.attributes.get_int("to", 0)))
    return number if value is not None else math.nan


def _cast_number(number: float, target: ir.DataType) -> float:
    if target == ir.DataType.BOOL:
        return float(number != 0)
    if target in (ir.DataType.FLOAT, ir.DataType.DOUBLE) or number in (0.0, 1.0, -math.inf):
        return number
    if target == ir.DataType.FLOAT16 and number < -65520.0:
        return -math.inf
    return number if target in (ir.DataType.INT32, ir.DataType.INT64) and number.is_integer() else math.nan


def _truth_or_two(reader: IndexReader, value: ir.Value) -> TwoValued | None:
    found = two_valued(reader, value)
    rank = _rank(reader, value)
    if found is not None or type_of(reader, value) != ir.DataType.BOOL or rank is None:
        return found
    return TwoValued(value, tuple(range(rank)), 1.0, 0.0)


def _two_valued_binary(reader: IndexReader, node: ir.Node, rank: int) -> TwoValued | None:
    left, right = node.inputs
    if left is None or right is None:
        return None
    apply = _BINARY[node.op_type]
    for source, other, swapped in ((left, right, False), (right, left, True)):
        number = constant_number(reader, other)
        inner = two_valued(reader, source) if number is not None else None
        if inner is None or number is None:
            continue
        pair = [float(apply(number, one) if swapped else apply(one, number)) for one in (inner.when_true, inner.when_false)]
        if any(map(math.isnan, pair)):
            return None
        outer = _aligned(reader, node.outputs[0], source, tuple(range(rank)))
        through = tuple(inner.axes[axis] if axis is not None else None for axis in outer)
        return TwoValued(inner.condition, through, pair[0], pair[1])
    return None


def _two_valued_where(reader: IndexReader, node: ir.Node, rank: int) -> TwoValued | None:
    """`Where` between constants, or between constants and tensors that the same condition chooses."""
    condition, when_true, when_false = node.inputs
    chooser = _truth_or_two(reader, condition) if condition is not None else None
    if chooser is None or condition is None or when_true is None or when_false is None:
        return None
    outer = tuple(range(rank))
    through = _through(chooser, _aligned(reader, node.outputs[0], condition, outer))
    branches = []
    for branch in (when_true, when_false):
        number = constant_number(reader, branch)
        if number is not None:
            branches.append((number, number))
            continue
        inner = two_valued(reader, branch)
        if inner is None or inner.condition is not chooser.condition:
            return None
        if _through(inner, _aligned(reader, node.outputs[0], branch, outer)) != through:
            return None
        branches.append((inner.when_true, inner.when_false))
    chosen = [branches[0 if flag else 1][side] for side, flag in enumerate((chooser.when_true, chooser.when_false))]
    return TwoValued(chooser.condition, through, chosen[0], chosen[1])


def _through(inner: TwoValued, axes: Axes) -> Axes:
    return tuple(inner.axes[axis] if axis is not None else None for axis in axes)
