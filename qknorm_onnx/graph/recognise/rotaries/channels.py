"""What a stretch of a graph does to the last axis of a tensor, value by value.

A rotary embedding has many spellings (halves or neighbours, cat, stack, chunk, slices, sums of products of complex
parts, fused operators), but one meaning: each output is x_i * cos + x_j * sin. So the graph between x and a candidate
output is evaluated on names instead of numbers: each channel is a list of terms sign * x[source] * table[column].
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qknorm_onnx.graph.walk.constants import attribute_int, attribute_or_input, constant, input_of, integers, number
from qknorm_onnx.graph.walk.layout import dims_of, same_size
from qknorm_onnx.graph.walk.limits import CHANNEL_STEPS


@dataclasses.dataclass(frozen=True)
class Term:
    """sign * x[source], times column `column` of `table` if there is one.

    A table is broadcast against x, or where `of_operator` it is (B or 1, S, W) as RotaryEmbedding takes it.
    """

    sign: int
    source: int
    table: ir.Value | None = None
    column: int = 0
    of_operator: bool = False


Terms = tuple[Term, ...]
Channels = npt.NDArray[Any]  # of Terms; its axes are the trailing axes of the tensor that x's last axis was cut into


class NotLinearError(Exception):
    """The stretch does something else than to select, negate, add and multiply by tables; the message says what, `node` where."""

    node: ir.Node | None = None


class ChannelReader:
    """Evaluates values behind `x`, a tensor whose last axis is the one that is followed."""

    def __init__(self, x: ir.Value) -> None:
        dims = dims_of(x)
        if dims is None or not dims or not isinstance(dims[-1], int):
            raise NotLinearError("what it would rotate has no last axis of fixed size")
        self.lead = len(dims) - 1
        self.lead_dims = dims[:-1]
        first = np.empty(dims[-1], dtype=object)
        first[:] = [(Term(1, index),) for index in range(dims[-1])]
        self._known: dict[ir.Value, Channels | None] = {x: first}

    def read(self, value: ir.Value | None, depth: int = CHANNEL_STEPS) -> Channels | None:
        """The channels of `value`; None if it does not depend on x. Raises NotLinearError."""
        if value is None:
            return None
        if value not in self._known:
            self._known[value] = self._evaluate(value, depth)
        return self._known[value]

    def _evaluate(self, value: ir.Value, depth: int) -> Channels | None:
        node = value.producer()
        if node is None or depth == 0:
            return None
        data = node.inputs if (node.domain, node.op_type) in OF_ALL_OPERANDS else node.inputs[:1]
        operands = [self.read(operand, depth - 1) for operand in data]
        if all(operand is None for operand in operands):
            return None
        rule = CHANNEL_RULES.get((node.domain, node.op_type))
        try:
            if rule is None:
                raise NotLinearError("an operator that no rotary embedding has")
            return rule(Visit(self, node, value, operands))
        except NotLinearError as error:
            error.node = error.node or node
            raise

    def axis(self, node: ir.Node, rank: int, default: int = 0) -> int:
        """The `axis` attribute, counted from the first followed axis."""
        axis = attribute_int(node, "axis", default) % rank - self.lead
        if axis < 0:
            raise NotLinearError("it works on axes before the last one")
        return axis


@dataclasses.dataclass(frozen=True)
class Visit:
    """A node on the way: which of its outputs is wanted, and the channels of its inputs (None where they are no data)."""

    reader: ChannelReader
    node: ir.Node
    value: ir.Value
    operands: list[Channels | None]

    @property
    def only(self) -> Channels:
        """The first operand, which alone depends on x."""
        if self.operands[0] is None or any(operand is not None for operand in self.operands[1:]):
            raise NotLinearError("several of its operands are computed from what it would rotate")
        return self.operands[0]

    @property
    def lead(self) -> int:
        """The number of axes that are not followed."""
        return self.reader.lead


Rule = Callable[[Visit], Channels]


def _map(channels: Channels, change: Callable[[Term], Term]) -> Channels:
    out = np.empty(channels.shape, dtype=object)
    for index in np.ndindex(channels.shape):
        out[index] = tuple(change(term) for term in channels[index])
    return out


def _same(visit: Visit) -> Channels:
    return visit.only


def _neg(visit: Visit) -> Channels:
    return _map(visit.only, lambda term: dataclasses.replace(term, sign=-term.sign))


def _sum(visit: Visit) -> Channels:
    first, second = visit.operands
    if first is None or second is None or first.shape != second.shape:
        raise NotLinearError("it adds what is not computed from what it would rotate")
    if visit.node.op_type == "Sub":
        second = _map(second, lambda term: dataclasses.replace(term, sign=-term.sign))
    out = np.empty(first.shape, dtype=object)
    for index in np.ndindex(first.shape):
        out[index] = first[index] + second[index]
    return out


def _product(visit: Visit) -> Channels:
    data, table = (
        (visit.operands[0], visit.node.inputs[1]) if visit.operands[1] is None else (visit.operands[1], visit.node.inputs[0])
    )
    if data is None or table is None or all(operand is not None for operand in visit.operands):
        raise NotLinearError("it multiplies two tensors that are both computed from what it would rotate")
    if number(table) == -1.0:
        return _map(data, lambda term: dataclasses.replace(term, sign=-term.sign))
    signs = _signs(table, data.ndim)
    columns = _columns(table, data.ndim) if signs is None else signs
    data, columns = np.broadcast_arrays(data, columns, subok=False)
    out = np.empty(data.shape, dtype=object)
    if signs is not None:
        for index in np.ndindex(data.shape):
            out[index] = tuple(dataclasses.replace(term, sign=term.sign * int(columns[index])) for term in data[index])
        return out
    for index in np.ndindex(data.shape):
        if any(term.table is not None for term in data[index]):
            raise NotLinearError("it multiplies by tables twice")
        out[index] = tuple(Term(term.sign, term.source, table, int(columns[index])) for term in data[index])
    return out


def _signs(table: ir.Value, trailing: int) -> npt.NDArray[np.int64] | None:
    """A constant of 1 and -1 for the last `trailing` axes, which turns signs and is no table; None for all else."""
    array = constant(table)
    if array is None or not np.any(array == -1) or not np.all(np.abs(array) == 1):
        return None
    lead = max(array.ndim - trailing, 0)
    return array.reshape(array.shape[lead:]).astype(np.int64) if math.prod(array.shape[:lead]) == 1 else None


def _columns(table: ir.Value, trailing: int) -> npt.NDArray[np.int64]:
    """The number of each entry of the table's last `trailing` axes, counted in row-major order."""
    dims = dims_of(table)
    if dims is None or len(dims) < trailing:
        raise NotLinearError("the shape of a table is unknown")
    own = dims[len(dims) - trailing :]
    if any(not isinstance(dim, int) for dim in own):
        raise NotLinearError("a table has columns of no fixed number")
    sizes = [int(dim) for dim in own]  # type: ignore[arg-type]
    return np.arange(int(np.prod(sizes))).reshape(sizes)


def _concat(visit: Visit) -> Channels:
    parts = [operand for operand in visit.operands if operand is not None]
    if len(parts) != len(visit.operands):
        raise NotLinearError("it joins what is not computed from what it would rotate")
    return np.concatenate(parts, axis=visit.reader.axis(visit.node, visit.lead + parts[0].ndim))


def _slice(visit: Visit) -> Channels:
    data = visit.only
    starts, ends = integers(input_of(visit.node, 1)), integers(input_of(visit.node, 2))
    if starts is None or ends is None:
        raise NotLinearError("it cuts at places that are no constants")
    axes = integers(input_of(visit.node, 3)) or tuple(range(len(starts)))
    steps = integers(input_of(visit.node, 4)) or (1,) * len(starts)
    cut = [slice(None)] * data.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        place = axis % (visit.lead + data.ndim) - visit.lead
        if place < 0:
            if start == 0 and step == 1 and end >= 1 << 31:
                continue
            raise NotLinearError("it cuts along other axes than the last one")
        cut[place] = slice(start, end if abs(end) < 1 << 31 else None, step)
    return data[tuple(cut)]


def _split(visit: Visit) -> Channels:
    data = visit.only
    axis = visit.reader.axis(visit.node, visit.lead + data.ndim)
    sizes = attribute_or_input(visit.node, "split", 1)
    if sizes is None:
        share = -(-data.shape[axis] // len(visit.node.outputs))
        sizes = tuple(min(share, data.shape[axis] - share * index) for index in range(len(visit.node.outputs)))
    first = sum(sizes[: visit.value.index() or 0])
    return np.take(data, range(first, first + sizes[visit.value.index() or 0]), axis=axis)


def _gather(visit: Visit) -> Channels:
    data = visit.only
    indices = constant(input_of(visit.node, 1))
    if indices is None or not np.issubdtype(indices.dtype, np.integer):
        raise NotLinearError("it picks values by indices that are no constants")
    return np.take(data, indices.astype(np.int64), axis=visit.reader.axis(visit.node, visit.lead + data.ndim))


def _reshape(visit: Visit) -> Channels:
    data = visit.only
    dims = dims_of(visit.value)
    if dims is None or len(dims) < visit.lead + 1:
        raise NotLinearError("the shape that it is given is unknown")
    kept, cut = dims[: visit.lead], dims[visit.lead :]
    sizes = [dim for dim in cut if isinstance(dim, int)]
    if not all(map(same_size, kept, visit.reader.lead_dims)) or len(sizes) < len(cut):
        raise NotLinearError("it merges the last axis with others")
    if np.prod(sizes) != data.size:
        raise NotLinearError("it changes the number of values")
    return data.reshape(sizes)


def _unsqueeze(visit: Visit) -> Channels:
    data = visit.only
    axes = attribute_or_input(visit.node, "axes", 1)
    if axes is None:
        raise NotLinearError("the axes that it adds are no constants")
    places = [axis % (visit.lead + data.ndim + len(axes)) - visit.lead for axis in axes]
    if min(places) < 0:
        raise NotLinearError("it adds axes before the last one")
    return np.expand_dims(data, places)


def _squeeze(visit: Visit) -> Channels:
    data = visit.only
    axes = attribute_or_input(visit.node, "axes", 1)
    places = [axis % (visit.lead + data.ndim) - visit.lead for axis in axes or ()]
    if not places or min(places) < 0:
        raise NotLinearError("it drops axes before the last one")
    return np.squeeze(data, tuple(places))


def _transpose(visit: Visit) -> Channels:
    data = visit.only
    perm = tuple(visit.node.attributes["perm"].as_ints()) if "perm" in visit.node.attributes else ()
    if perm[: visit.lead] != tuple(range(visit.lead)):
        raise NotLinearError("it moves other axes than the last one")
    return data.transpose([axis - visit.lead for axis in perm[visit.lead :]])


def _reduce_sum(visit: Visit) -> Channels:
    data = visit.only
    axes = attribute_or_input(visit.node, "axes", 1)
    places = [axis % (visit.lead + data.ndim) - visit.lead for axis in axes or ()]
    if len(places) != 1 or places[0] < 0:
        raise NotLinearError("it sums over more than one axis, or another than the last one")
    parts = np.moveaxis(data, places[0], 0)
    out = np.empty(parts.shape[1:], dtype=object)
    for index in np.ndindex(out.shape):
        column = (slice(None), *index)
        out[index] = tuple(term for terms in parts[column] for term in terms)
    return np.expand_dims(out, places[0]) if attribute_int(visit.node, "keepdims", 1) else out


def _matrix(visit: Visit) -> Channels:
    """x times a constant matrix that picks values and signs, such as one that turns both halves."""
    data, matrix = visit.only, constant(input_of(visit.node, 1))
    if matrix is None or matrix.ndim != 2 or data.ndim != 1 or matrix.shape[0] != data.size:
        raise NotLinearError("a product with something else than a constant matrix of channels")
    out = np.empty(matrix.shape[1], dtype=object)
    for column in range(matrix.shape[1]):
        rows = np.flatnonzero(matrix[:, column])
        signs = matrix[rows, column]
        if not np.all(np.abs(signs) == 1):
            raise NotLinearError("a product with a matrix that mixes values")
        picked = [(data[row], int(sign)) for row, sign in zip(rows, signs, strict=True)]
        out[column] = tuple(dataclasses.replace(term, sign=term.sign * sign) for terms, sign in picked for term in terms)
    return out


def _rotary_operator(visit: Visit) -> Channels:
    """RotaryEmbedding of heads (B, H, S, D) with tables that are already gathered."""
    data, node = visit.only, visit.node
    size = attribute_int(node, "rotary_embedding_dim", 0) or data.size
    cos, sin = (input_of(node, index) for index in (1, 2))
    if cos is None or sin is None or input_of(node, 3) is not None or data.ndim != 1 or visit.lead != 3 or len(_dims(cos)) != 3:
        raise NotLinearError("its tables are not gathered, or its input has not the axes (batch, heads, positions, values)")
    half = size // 2
    out = data.copy()
    for pair in range(half):
        first, second = (2 * pair, 2 * pair + 1) if attribute_int(node, "interleaved", 0) else (pair, pair + half)
        a, b = data[first], data[second]
        out[first] = _times(a, cos, pair, 1) + _times(b, sin, pair, -1)
        out[second] = _times(b, cos, pair, 1) + _times(a, sin, pair, 1)
    return out


def _times(terms: Terms, table: ir.Value, column: int, sign: int) -> Terms:
    if any(term.table is not None for term in terms):
        raise NotLinearError("it multiplies by tables twice")
    return tuple(Term(sign * term.sign, term.source, table, column, of_operator=True) for term in terms)


def _dims(value: ir.Value) -> tuple[object, ...]:
    return dims_of(value) or ()


# Any operand of these may be computed from x. A rule in the wrong table would not see the others, and leave them out.
OF_ALL_OPERANDS: dict[tuple[str, str], Rule] = {
    ("", "Add"): _sum,
    ("", "Sub"): _sum,
    ("", "Mul"): _product,
    ("", "Concat"): _concat,
}
# Only the first is data; the others are shapes, indices and tables, which may well depend on x's shape.
OF_FIRST_OPERAND: dict[tuple[str, str], Rule] = {
    ("", "Identity"): _same,
    ("", "Cast"): _same,
    ("", "Neg"): _neg,
    ("", "Slice"): _slice,
    ("", "Split"): _split,
    ("", "Gather"): _gather,
    ("", "Reshape"): _reshape,
    ("", "Unsqueeze"): _unsqueeze,
    ("", "Squeeze"): _squeeze,
    ("", "Transpose"): _transpose,
    ("", "MatMul"): _matrix,
    ("", "ReduceSum"): _reduce_sum,
    ("", "RotaryEmbedding"): _rotary_operator,
}
CHANNEL_RULES = OF_ALL_OPERANDS | OF_FIRST_OPERAND
