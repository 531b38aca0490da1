"""Removes Identity nodes that no graph output needs."""

from __future__ import annotations

import onnx_ir as ir


class RemoveIdentitiesPass(ir.passes.InPlacePass):
    """Like onnx_ir's own pass, but the outputs of a graph keep their names.

    y = Identity(x) goes: (1) where y is no graph output, its readers read x; (2) where y is one and x is made by a node of
    the same graph and is no output itself, x takes y's place and name. Otherwise, where two outputs hold one value or an
    output repeats an input, it stays (onnx_ir 1.1 gives two such outputs one name).
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run on `model` in place."""
        graphs = [*model.graphs(), *(function.graph for function in model.functions.values())]
        removed = [_remove(node) for graph in graphs for node in list(graph) if _is_identity(node)]
        return ir.passes.PassResult(model, any(removed))


def _is_identity(node: ir.Node) -> bool:
    return node.op_type == "Identity" and node.domain in ("", "ai.onnx")


def _remove(node: ir.Node) -> bool:
    x, y = node.inputs[0], node.outputs[0]
    graph = node.graph
    if x is None or graph is None:
        return False
    if y.is_graph_output():
        maker = x.producer()
        if maker is None or maker.graph is not graph or x.is_graph_output():
            return False
        name, metadata = y.name, dict(y.metadata_props)
        ir.convenience.replace_all_uses_with(y, x, replace_graph_outputs=True)
        y.name = None
        x.name = name
        x.metadata_props.update(metadata)
    else:
        ir.convenience.replace_all_uses_with(y, x)
    _keep_what_is_known(x, y)
    graph.remove(node, safe=True)
    return True


def _keep_what_is_known(x: ir.Value, y: ir.Value) -> None:
    if x.shape is None:
        x.shape = y.shape
    if x.type is None:
        x.type = y.type
