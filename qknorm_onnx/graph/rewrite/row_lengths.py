"""The cache of an operator that is told the lengths of its rows, as the inputs of a canonical node.

The operator takes a past that either grows or is a buffer, and only sizes tell which. A canonical node with `cache_length`
means the same in both cases: it makes room where there is none. Where the kernels that are meant cannot, a past that may be too
short is extended first.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.match.fragments import CacheAppend, RowLengths
from qknorm_onnx.graph.match.located import Dim
from qknorm_onnx.graph.match.qk_norm_match import QKNormMatch
from qknorm_onnx.graph.rewrite.node_builder import NodeBuilder

INT64 = ir.DataType.INT64


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowCache:
    """cache_length (B) and the positions (B, S) of the new tokens, both int64."""

    cache_length: ir.Value
    positions: ir.Value


def build_row_cache(builder: NodeBuilder, lengths: RowLengths, query: ir.Value) -> RowCache:
    """Where each row's new tokens are, for queries (B, S, Hq*D).

    A row of n keys has max(n - S, 0) past ones: a first prompt that is padded on the right has none.
    """
    assert query.shape is not None and lengths.last.shape is not None, "recognition reads the shapes of all operands"
    batch, length = query.shape[0], query.shape[1]
    new = _size(builder, query, 1)
    last = _cast(builder, lengths.last, [batch])
    before = builder.apply("Sub", [new, builder.integers([1], "one")], dims=[1])
    past = builder.apply("Sub", [last, before], dims=[batch])
    cache_length = builder.apply("Max", [past, builder.integers([0], "zero")], dims=[batch])
    first = builder.apply("Unsqueeze", [cache_length, builder.integers([1], "axes")], dims=[batch, 1])
    start, step = (builder.constant(np.asarray(item, dtype=np.int64), "bound") for item in (0, 1))
    end = builder.apply("Squeeze", [new, builder.integers([0], "axes")], dims=[])
    steps = builder.apply("Range", [start, end, step], dims=[length])
    return RowCache(cache_length=cache_length, positions=builder.apply("Add", [first, steps], dims=[batch, length]))


def with_positions(match: QKNormMatch, positions: ir.Value) -> QKNormMatch:
    """`match` with tables that take their rows at `positions` where they were to take them behind each row's past."""

    def placed(side: str) -> object:
        preparation = getattr(match, side)
        rotary = preparation.rotary
        if rotary is None:
            return preparation
        tables = {
            name: dataclasses.replace(table, positions=positions)
            for name, table in (("cos", rotary.cos), ("sin", rotary.sin))
            if isinstance(table.positions, RowLengths)
        }
        return dataclasses.replace(preparation, rotary=dataclasses.replace(rotary, **tables))

    return dataclasses.replace(match, query=placed("query"), key=placed("key"))  # type: ignore[arg-type]


def pasts_with_room(
    builder: NodeBuilder, caches: tuple[CacheAppend, CacheAppend], lengths: RowLengths
) -> tuple[ir.Value, ir.Value]:
    """Past keys and values (B, H, P, D) with room for all keys: at least `total` of them. What new entries hold is no matter."""
    key, value = (cache.past.value for cache in caches)
    if lengths.is_buffer:
        return key, value
    total = builder.reshape(_cast(builder, lengths.total, []), [1], [1])
    missing = builder.apply("Sub", [total, _size(builder, key, 2)], dims=[1])
    missing = builder.apply("Max", [missing, builder.integers([0], "zero")], dims=[1])
    first, second = (_extended(builder, cache, missing) for cache in caches)
    return first, second


def _extended(builder: NodeBuilder, cache: CacheAppend, count: ir.Value) -> ir.Value:
    """The past of `cache`, and `count` entries behind it."""
    past, present = cache.past.value, cache.present.value
    assert past.shape is not None and past.dtype is not None, "recognition reads the shapes of all operands"
    batch, heads, _, size = past.shape
    edges = [_size(builder, past, 0), _size(builder, past, 1), count, _size(builder, past, 3)]
    shape = builder.apply("Concat", edges, dims=[4], attributes=[ir.AttrInt64("axis", 0)])
    zero = ir.AttrTensor("value", ir.tensor(np.zeros(1, dtype=past.dtype.numpy())))
    unknown = ir.SymbolicDim(None)
    room = builder.apply("ConstantOfShape", [shape], dims=[batch, heads, unknown, size], attributes=[zero], dtype=past.dtype)
    length: Dim = present.shape[2] if present.shape is not None else unknown
    return builder.apply("Concat", [past, room], dims=[batch, heads, length, size], attributes=[ir.AttrInt64("axis", 2)])


def _size(builder: NodeBuilder, value: ir.Value, axis: int) -> ir.Value:
    bounds = [ir.AttrInt64("start", axis), ir.AttrInt64("end", axis + 1)]
    return builder.apply("Shape", [value], dims=[1], attributes=bounds, dtype=INT64)


def _cast(builder: NodeBuilder, value: ir.Value, dims: list[Dim]) -> ir.Value:
    return builder.apply("Cast", [value], dims=dims, attributes=[ir.AttrInt64("to", int(INT64))], dtype=INT64)
