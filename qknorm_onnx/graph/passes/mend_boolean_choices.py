"""Where of truth values: valid, and without a kernel in onnxruntime's CPU provider."""

from __future__ import annotations

import onnx_ir as ir

from qknorm_onnx.graph.rewrite.node_builder import NodeBuilder, replace_value


class MendBooleanChoicesPass(ir.passes.InPlacePass):
    """Where(c, a, b) of booleans becomes (c and a) or (not c and b), which masks that are filled by a mask export as."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run on `model` in place."""
        mended = [_mend(node) for graph in (model.graph, *model.graph.subgraphs()) for node in list(graph)]
        return ir.passes.PassResult(model, any(mended))


def _mend(node: ir.Node) -> bool:
    if (node.domain, node.op_type) != ("", "Where") or len(node.inputs) != 3 or node.graph is None:
        return False
    condition, first, second = node.inputs
    shape = node.outputs[0].shape
    if condition is None or first is None or second is None or condition.shape is None or shape is None:
        return False
    if any(value.dtype != ir.DataType.BOOL for value in (first, second, node.outputs[0])):
        return False
    builder = NodeBuilder(f"{node.outputs[0].name}/boolean")
    dims = list(shape)
    otherwise = builder.apply("Not", [condition], dims=list(condition.shape))
    chosen = builder.apply("And", [condition, first], dims=dims)
    replaced = builder.apply("And", [otherwise, second], dims=dims)
    result = builder.apply("Or", [chosen, replaced], dims=dims)
    builder.insert_before(node)
    replace_value(node.outputs[0], result)
    node.graph.remove(node, safe=True)
    return True
