"""Rotary embeddings written as products with constant 2 x 2 matrices, one for each pair and position."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.match.fragments import Table
from qknorm_onnx.graph.match.located import Array
from qknorm_onnx.graph.recognise.rotaries.channels import Term, Terms
from qknorm_onnx.graph.walk.constants import constant


def read_matrices(channels: Sequence[Terms]) -> dict[int, tuple[Term, Term]] | None:
    """The terms of each output by (own value, other value of its pair), if all come out of one constant of matrices."""
    parts: dict[int, tuple[Term, Term]] = {}
    for index, terms in enumerate(channels):
        own = [term for term in terms if term.source == index]
        other = [term for term in terms if term.source != index]
        if len(own) != 1 or len(other) != 1:
            return None
        parts[index] = own[0], other[0]
    tables = {term.table for pair in parts.values() for term in pair}
    return parts if len(tables) == 1 and constant(next(iter(tables))) is not None else None


def tables_of(parts: dict[int, tuple[Term, Term]], pairs: Sequence[tuple[int, int]]) -> tuple[Table, Table] | None:
    """cos and sin (S, R / 2) of the matrices, if each of them is a rotation."""
    rows = _rows(parts)
    if rows is None:
        return None
    values = {index: tuple(term.sign * rows[:, term.column] for term in terms) for index, terms in parts.items()}
    for first, second in pairs:
        if not np.array_equal(values[first][0], values[second][0]) or not np.array_equal(values[first][1], -values[second][1]):
            return None
    cos = np.stack([values[first][0] for first, _ in pairs], axis=-1)
    sin = np.stack([values[second][1] for _, second in pairs], axis=-1)
    return _table(cos, "cos"), _table(sin, "sin")


def _rows(parts: dict[int, tuple[Term, Term]]) -> Array | None:
    """The constant as (positions, 4 values for each pair)."""
    array = constant(parts[0][0].table)
    if array is None:
        return None
    for trailing in range(1, array.ndim):
        lead = array.shape[: array.ndim - trailing]
        if math.prod(array.shape[array.ndim - trailing :]) == 2 * len(parts):
            return array.reshape(lead[-1], -1) if math.prod(lead[:-1]) == 1 else None
    return None


def _table(array: Array, name: str) -> Table:
    tensor = ir.tensor(np.ascontiguousarray(array), name=name)
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    return Table(((value, tuple(range(array.shape[-1]))),), ("S", "W"))
