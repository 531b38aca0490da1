"""Channels times something: tables, constant signs, matrices that pick or turn values, and RotaryEmbedding."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qknorm_onnx.graph.match.located import Array
from qknorm_onnx.graph.recognise.rotaries.terms import Channels, NotLinearError, Term, Terms, Visit, negated
from qknorm_onnx.graph.walk.constants import attribute_int, constant, input_of, number
from qknorm_onnx.graph.walk.layout import dims_of


def product(visit: Visit) -> Channels:
    """x times a table, or times constant signs."""
    data, table = (
        (visit.operands[0], visit.node.inputs[1]) if visit.operands[1] is None else (visit.operands[1], visit.node.inputs[0])
    )
    if data is None or table is None or all(operand is not None for operand in visit.operands):
        raise NotLinearError("it multiplies two tensors that are both computed from what it would rotate")
    factor = number(table)
    if factor is not None and abs(factor) == 1.0:
        return data if factor > 0.0 else negated(data)
    signs = _signs(table, data.ndim)
    columns = _columns(table, data.ndim) if signs is None else signs
    # An axis of heads that share a table has size 1 in it: the last axis alone tells its columns.
    axes = 1 if columns.size == columns.shape[-1] else data.ndim
    data, columns = np.broadcast_arrays(data, columns, subok=False)
    out = np.empty(data.shape, dtype=object)
    if signs is not None:
        for index in np.ndindex(data.shape):
            out[index] = tuple(dataclasses.replace(term, sign=term.sign * int(columns[index])) for term in data[index])
        return out
    for index in np.ndindex(data.shape):
        out[index] = tuple(_times_entry(term, table, int(columns[index]), axes) for term in data[index])
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


def matrix(visit: Visit) -> Channels:
    """x times a constant matrix that picks values and signs, or pairs times the matrices of a table, from either side."""
    left, right = visit.operands[0], visit.operands[1]
    data = left if right is None else right
    if data is None or (left is not None and right is not None):
        raise NotLinearError("a product of two tensors that are both computed from what it would rotate")
    table = visit.node.inputs[1 if right is None else 0]
    array = constant(table)
    if right is None and array is not None and array.ndim == 2 and (data.ndim == 1 or _picks(array)):
        return _picked(data, array)
    if data.ndim < 2 or table is None:
        raise NotLinearError("a product with something else than a constant matrix of channels")
    return _contracted(data, table, from_left=right is None)


def einsum(visit: Visit) -> Channels:
    """x times a constant matrix: "...d,de->...e" or "...d,ed->...e", or the same with the matrix first."""
    left, arrow, out = visit.node.attributes["equation"].as_string().replace(" ", "").partition("->")
    terms, operands = left.split(","), visit.operands
    first = 0 if operands[0] is not None else 1
    if not arrow or len(terms) != 2 or len(operands) != 2 or all(operand is not None for operand in operands):
        raise NotLinearError("an Einsum that is no product with a constant matrix of channels")
    data, array = operands[first], constant(input_of(visit.node, 1 - first))
    own, other = terms[first], terms[1 - first]
    summed, lead = own[-1], own[:-1]
    made = other.replace(summed, "", 1)
    if data is None or data.ndim != 1 or array is None or len(other) != 2 or len(made) != 1 or made in own or out != lead + made:
        raise NotLinearError("an Einsum that is no product with a constant matrix of channels")
    return _picked(data, array if other[0] == summed else array.T)


def _picks(array: Array) -> bool:
    """Whether each column of a matrix has one 1 or -1, and else zeros."""
    return bool(np.all(np.abs(array).sum(axis=0) == 1) and np.all(np.isin(array, (-1, 0, 1))))


def _picked(data: Channels, array: Array) -> Channels:
    """The last axis of `data` times a matrix of 1, -1 and 0."""
    if array.ndim != 2 or array.shape[0] != data.shape[-1]:
        raise NotLinearError("a product with something else than a constant matrix of channels")
    out = np.empty((*data.shape[:-1], array.shape[1]), dtype=object)
    for index in np.ndindex(out.shape):
        rows = np.flatnonzero(array[:, index[-1]])
        signs = array[rows, index[-1]]
        if not np.all(np.abs(signs) == 1):
            raise NotLinearError("a product with a matrix that mixes values")
        picked = [(data[(*index[:-1], row)], int(sign)) for row, sign in zip(rows, signs, strict=True)]
        out[index] = tuple(dataclasses.replace(term, sign=term.sign * sign) for terms, sign in picked for term in terms)
    return out


def _contracted(data: Channels, table: ir.Value, *, from_left: bool) -> Channels:
    """data (..., i, j) @ table (..., j, k) `from_left`, else table (..., i, j) @ data (..., j, k)."""
    columns = _columns(table, data.ndim)
    if not from_left:
        data, columns = data.swapaxes(-1, -2), columns.swapaxes(-1, -2)
    if data.shape[-1] != columns.shape[-2]:
        raise NotLinearError("a product with matrices of other sizes")
    lead = np.broadcast_shapes(data.shape[:-2], columns.shape[:-2])
    data, columns = (np.broadcast_to(item, (*lead, *item.shape[-2:])) for item in (data, columns))
    out = np.empty((*lead, data.shape[-2], columns.shape[-1]), dtype=object)
    for index in np.ndindex(out.shape):
        row, entries = data[index[:-1]], columns[(*index[:-2], slice(None), index[-1])]
        pairs = [(term, int(entry)) for terms, entry in zip(row, entries, strict=True) for term in terms]
        out[index] = tuple(_times_entry(term, table, entry, data.ndim) for term, entry in pairs)
    return out if from_left else out.swapaxes(-1, -2)


def _times_entry(term: Term, table: ir.Value, column: int, axes: int) -> Term:
    if term.table is not None:
        raise NotLinearError("it multiplies by tables twice")
    return Term(term.sign, term.source, table, column, axes=axes)


def rotary_operator(visit: Visit) -> Channels:
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
