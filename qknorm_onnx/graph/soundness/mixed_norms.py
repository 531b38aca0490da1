"""Norms whose gain is wider than what they normalise, as torch writes them: no runtime loads them so."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

import onnx_ir as ir

_NORMS: Final = frozenset({"RMSNormalization", "LayerNormalization"})


def mend_mixed_norms(model: ir.Model) -> int:
    """How many norms of half precision with a float32 gain now take their input in float32.

    ONNX's text allows the pair and gives the result the gain's type, its inference and runtimes give it the input's: such a
    file loads nowhere. Computed in the gain's type the result is what the exporter meant; where it states half precision
    for the result, it is rounded once.
    """
    graphs = [graph for graph in model.graphs() if isinstance(graph, ir.Graph)]
    mixed = [node for graph in graphs for node in graph if _is_mixed(node)]
    if not mixed:
        return 0
    taken = {value.name for graph in graphs for node in graph for value in node.outputs}
    for node in mixed:
        _compute_wide(node, taken)
    return len(mixed)


def _is_mixed(node: ir.Node) -> bool:
    if node.domain not in ("", "ai.onnx") or node.op_type not in _NORMS or len(node.inputs) < 2 or not node.outputs:
        return False
    x, gain, y = node.inputs[0], node.inputs[1], node.outputs[0]
    if x is None or gain is None or None in (x.dtype, gain.dtype, y.dtype):
        return False
    return x.dtype != gain.dtype == ir.DataType.FLOAT and y.dtype in (x.dtype, gain.dtype)


def _compute_wide(node: ir.Node, taken: set[str | None]) -> None:
    x, gain, y = node.inputs[0], node.inputs[1], node.outputs[0]
    graph = node.graph
    assert x is not None and gain is not None and y.dtype is not None and isinstance(graph, ir.Graph), "as _is_mixed found it"
    wide = _cast(x, ir.DataType.FLOAT, next(_free(f"{y.name}/wide", taken)))
    graph.insert_before(node, wide)
    node.replace_input_with(0, wide.outputs[0])
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None and bias.dtype != ir.DataType.FLOAT:
        wide_bias = _cast(bias, ir.DataType.FLOAT, next(_free(f"{y.name}/wide_bias", taken)))
        graph.insert_before(node, wide_bias)
        node.replace_input_with(2, wide_bias.outputs[0])
    if y.dtype == ir.DataType.FLOAT:
        return
    name = y.name
    narrow = _cast(y, y.dtype, "")
    y.name = next(_free(f"{name}/normed", taken))
    result = narrow.outputs[0]
    ir.convenience.replace_all_uses_with(y, result, replace_graph_outputs=True)
    narrow.replace_input_with(0, y)
    y.dtype = ir.DataType.FLOAT
    result.name = name
    graph.insert_after(node, narrow)


def _cast(value: ir.Value, dtype: ir.DataType, name: str) -> ir.Node:
    output = ir.Value(name=name or None, type=ir.TensorType(dtype), shape=value.shape)
    return ir.Node("", "Cast", [value], [ir.AttrInt64("to", int(dtype))], outputs=[output], name=f"{value.name}/cast")


def _free(name: str, taken: set[str | None]) -> Iterator[str]:
    for candidate in itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2))):
        if candidate not in taken:
            taken.add(candidate)
            yield candidate
