"""Makes constants of integers that follow from fixed sizes: halves of a head, numbers of heads, bounds of slices."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.symbolic.expression import IndexReader
from qknorm_onnx.graph.symbolic.tensor import integers

_FOLDED: dict[ir.DataType, type[np.int64] | type[np.int32]] = {ir.DataType.INT64: np.int64, ir.DataType.INT32: np.int32}


def fold_sizes(graph: ir.Graph, reader: IndexReader) -> bool:
    """Replace what `graph` and its bodies compute from sizes, where the result is the same numbers for all inputs.

    `reader` has read the graph, whose shapes are derived. Returns whether anything was replaced.
    """
    values = [(node, value) for node in graph.all_nodes() for value in node.outputs]
    found = [(node, value, numbers) for node, value in values if (numbers := _numbers(node, value, reader)) is not None]
    for node, value, numbers in found:
        _replace(node, value, numbers)
    return bool(found)


def _numbers(node: ir.Node, value: ir.Value, reader: IndexReader) -> np.ndarray | None:
    dtype = _FOLDED.get(value.dtype) if value.dtype is not None else None
    if dtype is None or node.op_type == "Constant" or value.shape is None or len(value.shape) > 1:
        return None
    if value.is_graph_output() or not value.uses():
        return None
    known = reader.known(value)
    entries = integers(known) if known is not None else None
    limits = np.iinfo(dtype)
    fits = entries is not None and all(limits.min <= entry <= limits.max for entry in entries)  # a Cast lets larger ones wrap
    return None if entries is None or not fits else np.asarray(entries, dtype=dtype).reshape([len(entries)] * len(value.shape))


def _replace(node: ir.Node, value: ir.Value, numbers: np.ndarray) -> None:
    graph = node.graph
    assert isinstance(graph, ir.Graph), "functions are inlined before"
    name, value.name = value.name, f"{value.name}/folded"
    made = ir.Value(name=name, shape=value.shape, type=value.type, const_value=ir.tensor(numbers, name=name))
    graph.register_initializer(made)
    ir.convenience.replace_all_uses_with(value, made)
    if not any(output.uses() or output.is_graph_output() for output in node.outputs):
        graph.remove(node, safe=True)
