"""A softmax that was opened into its definition, so that recognisers see Softmax.

onnxruntime's optimizer opens each one of a type that its provider has no kernel for, float16 on the CPU above all.
"""

from __future__ import annotations

import onnx_ir as ir

from qknorm_onnx.graph.rewrite.node_builder import NodeBuilder, replace_value
from qknorm_onnx.graph.walk.axis_origins import reduced_axes
from qknorm_onnx.graph.walk.constants import attribute_int, producer, rank_of


class CloseSoftmaxPass(ir.passes.InPlacePass):
    """With e = Exp(x - ReduceMax(x)), e / ReduceSum(e) becomes Softmax(x) where both run over the same one axis.

    Without the maximum it stays: a row whose keys all have finite but low logits is then divided by zero, which Softmax never is.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run on `model` in place."""
        graphs = (model.graph, *model.graph.subgraphs())
        closed = [_close(node) for graph in graphs for node in list(graph) if (node.domain, node.op_type) == ("", "Div")]
        return ir.passes.PassResult(model, any(closed))


def _close(node: ir.Node) -> bool:
    parts = _parts(node)
    if parts is None or not isinstance(node.graph, ir.Graph):
        return False
    logits, axis, inside = parts
    output = node.outputs[0]
    assert logits.shape is not None
    builder = NodeBuilder(f"{output.name}/closed")
    axes = [ir.AttrInt64("axis", axis - len(logits.shape))]
    closed = builder.apply("Softmax", [logits], dims=list(logits.shape), attributes=axes)
    made = closed.producer()
    assert made is not None
    made.name = node.name
    builder.insert_before(node)
    replace_value(output, closed)
    for step in (node, *inside):
        if not any(value.uses() or value.is_graph_output() for value in step.outputs) and step.graph is not None:
            step.graph.remove(step, safe=True)
    return True


def _parts(node: ir.Node) -> tuple[ir.Value, int, tuple[ir.Node, ...]] | None:
    """The logits, the axis from 0, and the nodes between them and `node`, last one first."""
    exponential = producer(node.inputs[0], "Exp")
    total = producer(node.inputs[1], "ReduceSum")
    if exponential is None or total is None or total.inputs[0] is not node.inputs[0]:
        return None
    lowered = producer(exponential.inputs[0], "Sub")
    highest = producer(lowered.inputs[1], "ReduceMax") if lowered is not None else None
    logits = lowered.inputs[0] if lowered is not None else None
    if lowered is None or highest is None or logits is None or highest.inputs[0] is not logits:
        return None
    rank = rank_of(logits)
    if rank is None or not all(attribute_int(step, "keepdims", 1) for step in (total, highest)):
        return None
    axes = reduced_axes(total, rank)
    if len(axes) != 1 or axes != reduced_axes(highest, rank):
        return None
    return logits, next(iter(axes)), (total, exponential, lowered, highest)
