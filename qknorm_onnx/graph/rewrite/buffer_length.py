"""How many entries of a buffer are valid before a call, as the input `cache_length` of a canonical node."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.match.located import Dim
from qknorm_onnx.graph.rewrite.node_builder import NodeBuilder
from qknorm_onnx.graph.symbolic.terms import Linear, Read

INT64 = ir.DataType.INT64


def build_buffer_length(builder: NodeBuilder, first: Linear, query: ir.Value) -> ir.Value:
    """`first`, a form in integers that the graph reads, as int64 (B) for queries (B, S, Hq*D)."""
    assert query.shape is not None, "recognition reads the shapes of all operands"
    batch = query.shape[0]
    bounds = [ir.AttrInt64("start", 0), ir.AttrInt64("end", 1)]
    rows = builder.apply("Shape", [query], dims=[1], attributes=bounds, dtype=INT64)
    total = builder.apply("Expand", [builder.integers([first.constant], "first"), rows], dims=[batch])
    for atom, factor in sorted(first.terms, key=lambda term: str(term[0])):
        assert isinstance(atom, Read), "recognition admits nothing else"
        value = _one_or_each(builder, atom, batch)
        if factor != 1:
            value = builder.apply("Mul", [value, builder.integers([factor], "factor")], dims=list(value.shape or [1]))
        total = builder.apply("Add", [total, value], dims=[batch])
    return total


def _one_or_each(builder: NodeBuilder, read: Read, batch: Dim) -> ir.Value:
    """What is read, as int64 (1), or (B) where it is one number for each row."""
    value = read.value
    places = [place.number for place in read.indices]
    if None not in places:
        where = builder.constant(np.asarray([places], dtype=np.int64).reshape(1, -1), "place")
        value = builder.apply("GatherND", [value, where], dims=[1]) if places else builder.reshape(value, [1], [1])
    dims: list[Dim] = [batch if None in places else 1]
    return builder.apply("Cast", [value], dims=dims, attributes=[ir.AttrInt64("to", int(INT64))], dtype=INT64)
