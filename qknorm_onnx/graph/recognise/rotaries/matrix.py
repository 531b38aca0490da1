"""Rotary embeddings written as products with constant 2 x 2 matrices, or with their two columns, for each pair and position."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.match.fragments import Table
from qknorm_onnx.graph.match.located import Array
from qknorm_onnx.graph.recognise.rotaries.terms import Term, Terms
from qknorm_onnx.graph.walk.constants import constant


def read_matrices(channels: Sequence[Terms]) -> dict[int, tuple[Term, Term]] | None:
    """The terms of each output by (own value, other value of its pair), if all come out of constants of matrices."""
    parts: dict[int, tuple[Term, Term]] = {}
    for index, terms in enumerate(channels):
        own = [term for term in terms if term.source == index]
        other = [term for term in terms if term.source != index]
        if len(own) != 1 or len(other) != 1:
            return None
        parts[index] = own[0], other[0]
    tables = {term.table for pair in parts.values() for term in pair}
    return parts if all(constant(table) is not None for table in tables) else None


def tables_of(parts: dict[int, tuple[Term, Term]], pairs: Sequence[tuple[int, int]]) -> tuple[Table, Table] | None:
    """cos and sin (S, R / 2) of the matrices, if each of them is a rotation."""
    rows = {table: _rows(table, len(parts)) for table in {term.table for terms in parts.values() for term in terms}}
    known = {table: array for table, array in rows.items() if array is not None}
    if len(known) != len(rows) or len({len(array) for array in known.values()}) != 1:
        return None
    values = {index: tuple(term.sign * known[term.table][:, term.column] for term in terms) for index, terms in parts.items()}
    for first, second in pairs:
        if not np.array_equal(values[first][0], values[second][0]) or not np.array_equal(values[first][1], -values[second][1]):
            return None
    cos = np.stack([values[first][0] for first, _ in pairs], axis=-1)
    sin = np.stack([values[second][1] for _, second in pairs], axis=-1)
    return _table(cos, "cos"), _table(sin, "sin")


def _rows(table: ir.Value | None, size: int) -> Array | None:
    """The constant as (positions, values of `size` / 2 matrices or of one column of each); it is the same for all of a batch."""
    array = constant(table)
    if array is None:
        return None
    for trailing in range(1, array.ndim):
        lead = array.shape[: array.ndim - trailing]
        width = math.prod(array.shape[array.ndim - trailing :])
        if width in (size, 2 * size):
            sizes = [dim for dim in lead if dim != 1] or [1]
            rows = array.reshape(math.prod(sizes[:-1]), sizes[-1], width)
            return np.asarray(rows[0]) if len(rows) and (rows == rows[:1]).all() else None
    return None


def _table(array: Array, name: str) -> Table:
    tensor = ir.tensor(np.ascontiguousarray(array), name=name)
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    return Table(((value, tuple(range(array.shape[-1]))),), ("S", "W"))
