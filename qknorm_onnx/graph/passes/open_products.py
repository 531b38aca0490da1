"""Opens products that onnxruntime's optimizer fused with a transpose and a factor, so that recognisers see MatMul."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.match.located import Dim
from qknorm_onnx.graph.rewrite.node_builder import NodeBuilder, replace_value
from qknorm_onnx.graph.walk.constants import MICROSOFT_DOMAIN, attribute_float, attribute_int, constant


class OpenProductsPass(ir.passes.InPlacePass):
    """FusedMatMul, and TransposeMatMul, its older name, of two computed tensors become Transpose, MatMul and Mul.

    One with a weight is a projection, and stays. Shapes must have been derived: a product whose operands have unknown ranks
    stays as it is.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run on `model` in place."""
        graphs = (model.graph, *model.graph.subgraphs())
        opened = [_open(node) for graph in graphs for node in list(graph) if _is_fused_product(node)]
        return ir.passes.PassResult(model, any(opened))


def _is_fused_product(node: ir.Node) -> bool:
    if node.domain != MICROSOFT_DOMAIN or node.op_type not in ("FusedMatMul", "TransposeMatMul"):
        return False
    return all(value is not None and value.const_value is None and constant(value) is None for value in node.inputs)


def _open(node: ir.Node) -> bool:
    left, right = node.inputs
    output = node.outputs[0]
    if left is None or right is None or left.shape is None or right.shape is None or output.shape is None:
        return False
    builder = NodeBuilder(f"{output.name}/opened")
    sides = [_turned(builder, value, node, side) for value, side in ((left, "A"), (right, "B"))]
    dims: list[Dim] = list(output.shape)
    product = builder.apply("MatMul", sides, dims=dims)
    factor = attribute_float(node, "alpha", 1.0)
    if factor != 1.0:
        dtype = left.dtype.numpy() if left.dtype is not None else np.dtype(np.float32)
        product = builder.apply("Mul", [product, builder.constant(np.asarray(factor, dtype=dtype), "factor")], dims=dims)
    made = product.producer()
    assert made is not None and node.graph is not None
    made.name = node.name
    builder.insert_before(node)
    replace_value(output, product)
    node.graph.remove(node, safe=True)
    return True


def _turned(builder: NodeBuilder, value: ir.Value, node: ir.Node, side: str) -> ir.Value:
    """The operand as MatMul takes it."""
    assert value.shape is not None
    order = list(range(len(value.shape)))
    if attribute_int(node, f"transBatch{side}", 0):
        order.insert(len(order) - 2, order.pop(0))
    if attribute_int(node, f"trans{side}", 0):
        order[-2:] = order[:-3:-1]
    return builder.transpose(value, order)
