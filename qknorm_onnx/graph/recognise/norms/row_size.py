"""What a row is divided by in a hand-written norm: sqrt(mean(x^2) + eps), max(norm(x), eps) and their other spellings."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import onnx_ir as ir

from qknorm_onnx.graph.match.located import Dim
from qknorm_onnx.graph.walk.constants import (
    attribute_int,
    attribute_or_input,
    input_of,
    number,
    producer,
    rank_of,
    unconverted,
)
from qknorm_onnx.graph.walk.layout import dims_of
from qknorm_onnx.graph.walk.limits import ROW_SIZE_STEPS

Statistic = Literal["mean", "sum"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSize:
    """sqrt(ratio * statistic + inside), at least `least`, plus `added`; the quotient is multiplied by `factor`.

    `statistic` is the mean or the sum of the squares of `row` over `axes` (counted from 0); `centred`: of its differences from
    its mean. `ratio` is D / (D - 1) in an unbiased variance. `flat`: the axes are gone and must be put back; `reshaped`: they
    were, by a Reshape.
    """

    statistic: Statistic
    row: ir.Value
    axes: tuple[int, ...]
    centred: bool = False
    ratio: float = 1.0
    inside: float = 0.0
    least: float = 0.0
    added: float = 0.0
    factor: float = 1.0
    flat: bool = False
    reshaped: bool = False

    @property
    def plain(self) -> bool:
        """Whether no epsilon has been read yet."""
        return self.inside == self.least == self.added == 0.0


def read_size(value: ir.Value | None, depth: int = ROW_SIZE_STEPS) -> RowSize | None:
    """`value` as the size of a row."""
    node = producer(value)
    if value is None or node is None or depth == 0:
        return None
    first = input_of(node, 0)
    if node.op_type in PASSED:
        return _passed(node, read_size(first, depth - 1))
    if node.op_type == "Sqrt" or (node.op_type == "Pow" and number(input_of(node, 1)) == 0.5):
        return read_square(first, depth - 1)
    if node.op_type == "ReduceL2":
        return _reduced(node, "sum", first)
    if node.op_type in ("Clip", "Max"):
        return _at_least(node, depth)
    if node.op_type == "Add":
        constant, size = _constant_and_other(node, depth, read_size)
        return dataclasses.replace(size, added=constant) if size is not None and size.plain else None
    if node.op_type in ("Mul", "Div"):
        return _scaled(node, depth)
    return None


def read_square(value: ir.Value | None, depth: int = ROW_SIZE_STEPS) -> RowSize | None:
    """`value` as the square of the size of a row."""
    node = producer(value)
    if value is None or node is None or depth == 0:
        return None
    first = input_of(node, 0)
    if node.op_type in PASSED:
        return _passed(node, read_square(first, depth - 1))
    if node.op_type == "ReduceSumSquare":
        return _reduced(node, "sum", first)
    if node.op_type in ("ReduceMean", "ReduceSum"):
        return _reduced(node, "mean" if node.op_type == "ReduceMean" else "sum", squared(first))
    if node.op_type == "Add":
        constant, size = _constant_and_other(node, depth, read_square)
        return dataclasses.replace(size, inside=constant) if size is not None and size.plain else None
    if node.op_type in ("Clip", "Max"):
        size = _at_least(node, depth, squares=True)
        return dataclasses.replace(size, least=math.sqrt(size.least)) if size is not None else None
    if node.op_type == "Sub":
        return _variance(node)
    if node.op_type in ("Mul", "Div") and (found := _multiple(node, depth)) is not None:
        return found
    base = squared(value)
    return read_size(base, depth - 1) if base is not None else None


def read_inverse_size(value: ir.Value | None, depth: int = ROW_SIZE_STEPS) -> RowSize | None:
    """`value` as one over the size of a row, possibly times a number."""
    node = producer(value)
    if value is None or node is None or depth == 0:
        return None
    first, second = input_of(node, 0), input_of(node, 1)
    if node.op_type in PASSED:
        return _passed(node, read_inverse_size(first, depth - 1))
    if node.op_type == "Reciprocal":
        return read_size(first, depth - 1)
    if node.op_type == "Pow" and number(second) == -0.5:
        return read_square(first, depth - 1)
    if node.op_type == "Div" and (dividend := number(first)) is not None:
        size = read_size(second, depth - 1)
        return dataclasses.replace(size, factor=size.factor * dividend) if size is not None else None
    if node.op_type == "Mul":
        constant, size = _constant_and_other(node, depth, read_inverse_size)
        return dataclasses.replace(size, factor=size.factor * constant) if size is not None else None
    return None


def squared(value: ir.Value | None) -> ir.Value | None:
    """x, where `value` is x^2; converters to narrow types put casts behind any operator."""
    node = producer(unconverted(value), "Pow", "Mul") if value is not None else None
    if node is None:
        return None
    first, second = input_of(node, 0), input_of(node, 1)
    if node.op_type == "Pow":
        return first if number(second) == 2.0 else None
    return first if first is second else None


def _reduced(node: ir.Node, statistic: Statistic, row: ir.Value | None) -> RowSize | None:
    axes = attribute_or_input(node, "axes", 1)
    source = input_of(node, 0)
    rank = rank_of(source) if source is not None else None
    if axes is None or rank is None or row is None:
        return None
    flat = attribute_int(node, "keepdims", 1) != 1
    places = tuple(sorted(axis % rank for axis in axes))
    if flat and places != tuple(range(rank - len(places), rank)):
        return None
    return RowSize(statistic=statistic, row=row, axes=places, flat=flat)


PASSED = ("Cast", "Identity", "Expand", "Reshape", "Unsqueeze")


def _passed(node: ir.Node, size: RowSize | None) -> RowSize | None:
    """Behind a conversion or broadcast; a Reshape or Unsqueeze puts axes of size 1 back, which the quotient then shows."""
    if size is None or node.op_type not in ("Reshape", "Unsqueeze"):
        return size
    return dataclasses.replace(size, flat=False, reshaped=True) if size.flat else None


def mean_of(value: ir.Value | None) -> tuple[ir.Value, tuple[int, ...]] | None:
    """The row, and its axes counted from 0, of which `value` is the mean, in whatever shape; None if it is none."""
    divided = False
    for _ in range(ROW_SIZE_STEPS):
        node = producer(value, *PASSED, "ReduceMean", "ReduceSum", "Div")
        row = input_of(node, 0) if node is not None else None
        if node is None or row is None:
            return None
        if node.op_type in ("ReduceMean", "ReduceSum"):
            size = _reduced(node, "mean", row)
            return (row, size.axes) if size is not None and divided == (node.op_type == "ReduceSum") else None
        if node.op_type == "Div":
            count, summed = number(input_of(node, 1)), _summed_values(row)
            if divided or summed is None or count != summed:
                return None
            divided = True
        value = row
    return None


def _summed_values(value: ir.Value) -> int | None:
    """How many values each element of a sum was made of."""
    for _ in range(ROW_SIZE_STEPS):
        node = producer(value, *PASSED, "ReduceSum")
        source = input_of(node, 0) if node is not None else None
        if node is None or source is None:
            return None
        if node.op_type == "ReduceSum":
            size, dims = _reduced(node, "sum", source), dims_of(source)
            return _values(dims, size.axes) if size is not None and dims is not None else None
        value = source
    return None


def _values(dims: tuple[Dim, ...], axes: tuple[int, ...]) -> int | None:
    """The number of values in a row, if it is fixed."""
    lengths = [dims[axis] for axis in axes]
    fixed = [length for length in lengths if isinstance(length, int)]
    return math.prod(fixed) if len(fixed) == len(lengths) else None


def _variance(node: ir.Node) -> RowSize | None:
    """mean(x^2) - mean(x)^2."""
    squares, mean = _mean(input_of(node, 0)), _mean(squared(input_of(node, 1)))
    size = _reduced(squares, "mean", squared(input_of(squares, 0))) if squares is not None else None
    own = _reduced(mean, "mean", input_of(mean, 0)) if mean is not None else None
    if size is None or own is None or not same_row(size.row, own.row) or (size.axes, size.flat) != (own.axes, own.flat):
        return None
    return dataclasses.replace(size, centred=True)


def _mean(value: ir.Value | None) -> ir.Node | None:
    return producer(unconverted(value), "ReduceMean") if value is not None else None


def _at_least(node: ir.Node, depth: int, *, squares: bool = False) -> RowSize | None:
    read = read_square if squares else read_size
    if node.op_type == "Max":
        least, size = _constant_and_other(node, depth, read) if len(node.inputs) == 2 else (0.0, None)
    else:
        if input_of(node, 2) is not None:
            return None
        found = number(input_of(node, 1))
        least, size = (found, read(input_of(node, 0), depth - 1)) if found is not None else (0.0, None)
    return dataclasses.replace(size, least=least) if size is not None and size.plain else None


def _multiple(node: ir.Node, depth: int) -> RowSize | None:
    """The statistic times or over a number: sum / D is the mean; sum / (D - 1) and mean * D / (D - 1) are multiples of it."""
    if node.op_type == "Div":
        divisor, size = number(input_of(node, 1)), read_square(input_of(node, 0), depth - 1)
        constant = 1.0 / divisor if divisor else 0.0
    else:
        constant, size = _constant_and_other(node, depth, read_square)
    if size is None or constant <= 0.0 or not size.plain:
        return None
    dims = dims_of(size.row)
    values = _values(dims, size.axes) if dims is not None else None
    if not values:
        return None
    ratio = size.ratio * constant * (values if size.statistic == "sum" else 1)
    return dataclasses.replace(size, statistic="mean", ratio=1.0 if math.isclose(ratio, 1.0, rel_tol=1e-6) else ratio)


def _scaled(node: ir.Node, depth: int) -> RowSize | None:
    """A size times or over a positive number, such as the L2 norm over sqrt(D), which is the root of the mean of squares."""
    constant, size = _constant_and_other(node, depth, read_size) if node.op_type == "Mul" else _dividend_and_divisor(node, depth)
    if size is None or not 0.0 < constant < math.inf:
        return None
    dims = dims_of(size.row)
    values = _values(dims, size.axes) if dims is not None else None
    ratio = size.ratio * constant * constant
    if size.statistic == "sum" and values and math.isclose(ratio * values, 1.0, rel_tol=1e-6):
        size, ratio = dataclasses.replace(size, statistic="mean"), 1.0
    inside, least, added = size.inside * constant * constant, size.least * constant, size.added * constant
    return dataclasses.replace(size, ratio=ratio, inside=inside, least=least, added=added)


def _dividend_and_divisor(node: ir.Node, depth: int) -> tuple[float, RowSize | None]:
    """One over the divisor of a Div, and its dividend as a row size."""
    divisor = number(input_of(node, 1))
    return (1.0 / divisor, read_size(input_of(node, 0), depth - 1)) if divisor else (0.0, None)


def _constant_and_other(node: ir.Node, depth: int, read: object) -> tuple[float, RowSize | None]:
    """Of two operands, the number and the other one as a row size."""
    assert callable(read)
    for this, other in ((0, 1), (1, 0)):
        constant = number(input_of(node, this))
        if constant is not None:
            return constant, read(input_of(node, other), depth - 1)
    return 0.0, None


def same_row(first: ir.Value | None, second: ir.Value | None) -> bool:
    """Whether two values are the same tensor, conversions of type aside."""
    return first is not None and second is not None and unconverted(first) is unconverted(second)
