"""What a row is divided by in a hand-written norm: sqrt(mean(x^2) + eps), max(norm(x), eps) and their other spellings."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import onnx_ir as ir

from qknorm_onnx.graph.recognise.constants import (
    attribute_int,
    attribute_or_input,
    input_of,
    number,
    producer,
    rank_of,
    unconverted,
)
from qknorm_onnx.graph.recognise.layout import dims_of

MAX_DEPTH = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSize:
    """sqrt(statistic + inside), at least `least`, plus `added`; the quotient is multiplied by `factor`.

    `statistic` is the mean or the sum of the squares of `row` over `axes` (counted from 0).
    """

    statistic: Literal["mean", "sum"]
    row: ir.Value
    axes: tuple[int, ...]
    inside: float = 0.0
    least: float = 0.0
    added: float = 0.0
    factor: float = 1.0

    @property
    def plain(self) -> bool:
        """Whether no epsilon has been read yet."""
        return self.inside == self.least == self.added == 0.0


def read_size(value: ir.Value | None, depth: int = MAX_DEPTH) -> RowSize | None:
    """`value` as the size of a row."""
    node = producer(value)
    if value is None or node is None or depth == 0:
        return None
    first = input_of(node, 0)
    if node.op_type in ("Cast", "Identity", "Expand"):
        return read_size(first, depth - 1)
    if node.op_type == "Sqrt" or (node.op_type == "Pow" and number(input_of(node, 1)) == 0.5):
        return read_square(first, depth - 1)
    if node.op_type == "ReduceL2":
        return _reduced(node, "sum", first)
    if node.op_type in ("Clip", "Max"):
        return _at_least(node, depth)
    if node.op_type == "Add":
        constant, size = _constant_and_other(node, depth, read_size)
        return dataclasses.replace(size, added=constant) if size is not None and size.plain else None
    return None


def read_square(value: ir.Value | None, depth: int = MAX_DEPTH) -> RowSize | None:
    """`value` as the square of the size of a row."""
    node = producer(value)
    if value is None or node is None or depth == 0:
        return None
    first = input_of(node, 0)
    if node.op_type in ("Cast", "Identity", "Expand"):
        return read_square(first, depth - 1)
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
    if node.op_type in ("Mul", "Div"):
        return _mean_of_sum(node, depth)
    base = squared(value)
    return read_size(base, depth - 1) if base is not None else None


def read_inverse_size(value: ir.Value | None, depth: int = MAX_DEPTH) -> RowSize | None:
    """`value` as one over the size of a row, possibly times a number."""
    node = producer(value)
    if value is None or node is None or depth == 0:
        return None
    first, second = input_of(node, 0), input_of(node, 1)
    if node.op_type in ("Cast", "Identity", "Expand"):
        return read_inverse_size(first, depth - 1)
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
    """x, where `value` is x^2."""
    node = producer(value, "Pow", "Mul")
    if node is None:
        return None
    first, second = input_of(node, 0), input_of(node, 1)
    if node.op_type == "Pow":
        return first if number(second) == 2.0 else None
    return first if first is second else None


def _reduced(node: ir.Node, statistic: Literal["mean", "sum"], row: ir.Value | None) -> RowSize | None:
    axes = attribute_or_input(node, "axes", 1)
    source = input_of(node, 0)
    rank = rank_of(source) if source is not None else None
    if axes is None or rank is None or row is None or attribute_int(node, "keepdims", 1) != 1:
        return None
    return RowSize(statistic=statistic, row=row, axes=tuple(sorted(axis % rank for axis in axes)))


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


def _mean_of_sum(node: ir.Node, depth: int) -> RowSize | None:
    """sum / n or sum * (1 / n), where n is the number of values in the row."""
    if node.op_type == "Div":
        divisor, size = number(input_of(node, 1)), read_square(input_of(node, 0), depth - 1)
        count = divisor
    else:
        constant, size = _constant_and_other(node, depth, read_square)
        count = 1.0 / constant if constant else None
    if size is None or count is None or size.statistic != "sum" or not size.plain:
        return None
    dims = dims_of(size.row)
    lengths = [dims[axis] for axis in size.axes] if dims is not None else []
    values = math.prod(length for length in lengths if isinstance(length, int))
    return dataclasses.replace(size, statistic="mean") if math.isclose(count, values, rel_tol=1e-6) else None


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
