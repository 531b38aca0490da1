"""RotaryEmbedding as one node: ONNX's own (opset 23 and newer) and com.microsoft's."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from qknorm_onnx.graph.match.fragments import Rotary, Table
from qknorm_onnx.graph.match.located import Layout, Located, Unreadable
from qknorm_onnx.graph.walk.broadcasts import before_broadcast
from qknorm_onnx.graph.walk.constants import MICROSOFT_DOMAIN, attribute_float, attribute_int, input_of
from qknorm_onnx.graph.walk.layout import dims_of


@dataclasses.dataclass(frozen=True)
class RotaryInputs:
    """The inputs of either operator by their meaning."""

    x: ir.Value | None
    positions: ir.Value | None
    cos: ir.Value | None
    sin: ir.Value | None


def rotary_inputs(node: ir.Node) -> RotaryInputs | None:
    """The inputs, if `node` is a RotaryEmbedding."""
    if node.op_type != "RotaryEmbedding":
        return None
    if node.domain == "":
        return RotaryInputs(input_of(node, 0), input_of(node, 3), input_of(node, 1), input_of(node, 2))
    if node.domain == MICROSOFT_DOMAIN:
        return RotaryInputs(*(input_of(node, index) for index in range(4)))
    return None


def read_rotary_operator(located: Located) -> tuple[Rotary, Located] | Unreadable | None:
    """`located` as the output of a RotaryEmbedding node."""
    node = located.value.producer()
    inputs = rotary_inputs(node) if node is not None else None
    if node is None or inputs is None or inputs.x is None or inputs.cos is None or inputs.sin is None:
        return None
    problem = _unread(node, inputs, located)
    if problem is not None:
        return problem
    rotary = Rotary(
        cos=whole_table(inputs.cos, inputs.positions),
        sin=whole_table(inputs.sin, inputs.positions),
        interleaved=bool(attribute_int(node, "interleaved", 0)),
        size=attribute_int(node, "rotary_embedding_dim", 0),
        offset=0,
        sections=1,
        node=node,
    )
    return rotary, located.at(inputs.x, located.layout)


def _unread(node: ir.Node, inputs: RotaryInputs, located: Located) -> Unreadable | None:
    dims = dims_of(inputs.cos) if inputs.cos is not None else None
    if dims is None or not isinstance(dims[-1], int):
        return Unreadable(
            "the width of its rotary tables is unknown", node, "run shape inference, or make the tables initializers"
        )
    positions = dims_of(inputs.positions) if inputs.positions is not None else None
    if inputs.positions is not None and (positions is None or len(positions) != 2):
        return Unreadable(
            "its RotaryEmbedding counts positions from an offset", node, "give it positions of two axes (batch, positions)"
        )
    if attribute_float(node, "scale", 1.0) != 1.0 or attribute_int(node, "is_packed_batching", 0):
        return Unreadable("its RotaryEmbedding scales or packs", node, "leave out scale and is_packed_batching")
    if located.layout[-3:] != ("H", "S", "D") and located.layout != ("B", "S", "HD"):
        reason = "its RotaryEmbedding works on another layout than (batch, heads, positions, values)"
        return Unreadable(reason, node, "transpose its input to (batch, heads, positions, values) in front of it")
    return None


def whole_table(value: ir.Value, positions: ir.Value | None) -> Table:
    """All columns of a table (B or 1, S, W), from before it was expanded to a batch, or of rows (N, W) at positions."""
    dims = dims_of(value) or ()
    width = dims[-1]
    assert isinstance(width, int), "the caller checks the width"
    parts = ((value, tuple(range(width))),)
    if positions is not None:
        batch, _ = dims_of(positions) or ("", "")
        return Table(parts, ("" if batch == 1 else "B", "S", "W"), positions=positions)
    names = ("B", "S", "W")[3 - len(dims) :]
    layout: Layout = tuple("" if dim == 1 and letter == "B" else letter for dim, letter in zip(dims, names, strict=True))
    inner = before_broadcast(Located(value, layout, dict(zip(names, dims, strict=True))))
    if inner.layout[-1:] != ("W",):
        inner = Located(value, layout, {})
    return Table(((inner.value, tuple(range(width))),), inner.layout)
