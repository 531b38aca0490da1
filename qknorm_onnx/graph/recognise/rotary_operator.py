"""RotaryEmbedding as one node: ONNX's own (opset 23 and newer) and com.microsoft's."""

from __future__ import annotations

import onnx_ir as ir

from qknorm_onnx.graph.match import Declined, Layout, Located, Rotary, Table
from qknorm_onnx.graph.recognise.constants import attribute_int, input_of
from qknorm_onnx.graph.recognise.layout import dims_of
from qknorm_onnx.graph.recognise.sinks import before_broadcast


def read_rotary_operator(located: Located) -> tuple[Rotary, Located] | Declined | None:
    """`located` as the output of a RotaryEmbedding node with tables that are already gathered."""
    node = located.value.producer()
    if node is None or (node.domain, node.op_type) != ("", "RotaryEmbedding"):
        return None
    source, cos, sin = (input_of(node, index) for index in range(3))
    if source is None or cos is None or sin is None:
        return None
    if input_of(node, 3) is not None:
        return Declined("its RotaryEmbedding gathers the tables by position_ids", node)
    dims = dims_of(cos)
    if dims is None or not isinstance(dims[-1], int):
        return Declined("the width of its rotary tables is unknown", node, "run shape inference first")
    if located.layout[-3:] != ("H", "S", "D"):
        return Declined("its RotaryEmbedding works on another layout than (batch, heads, positions, values)", node)
    size = attribute_int(node, "rotary_embedding_dim", 0)
    rotary = Rotary(
        cos=whole_table(cos),
        sin=whole_table(sin),
        interleaved=bool(attribute_int(node, "interleaved", 0)),
        size=size,
        offset=0,
        sections=1,
        node=node,
    )
    return rotary, located.at(source, located.layout)


def whole_table(value: ir.Value) -> Table:
    """All columns of a table (B or 1, S, W) or (S, W), from before it was expanded to a batch."""
    dims = dims_of(value) or ()
    names = ("B", "S", "W")[3 - len(dims) :]
    width = dims[-1]
    assert isinstance(width, int), "the caller checks the width"
    layout: Layout = tuple("" if dim == 1 and letter == "B" else letter for dim, letter in zip(dims, names, strict=True))
    inner = before_broadcast(Located(value, layout, dict(zip(names, dims, strict=True))))
    if inner.layout[-1:] != ("W",):
        inner = Located(value, layout, {})
    return Table(((inner.value, tuple(range(width))),), inner.layout)
