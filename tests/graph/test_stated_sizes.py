"""What a file says of sizes in between gives way to what follows from its inputs, behind every operator."""

from __future__ import annotations

import onnx_ir as ir

from qknorm_onnx.graph.passes.derive_shapes import DeriveShapesPass

# As onnxruntime's symbolic inference leaves them: a name of its own for four windows of each image.
HALVES = ", ".join(["0.5"] * 64)
STATED = f"""<ir_version: 10, opset_import: ["" : 20]>
windows (float[batch,16,8] x) => (float[?,?,8] y)
<float[8,8] w = {{{HALVES}}}, float[windows,4,8] product, float[windows,4,8] sum>
{{
  four = Constant<value = int64[3] {{-1, 4, 8}}>()
  split = Reshape(x, four)
  product = MatMul(split, w)
  sum = Add(product, split)
  y = Relu(sum)
}}
"""


def test_sizes_of_products_follow_from_the_inputs():
    model = ir.from_onnx_text(STATED)
    DeriveShapesPass()(model)
    for node in model.graph:
        if node.op_type in ("Reshape", "MatMul", "Add", "Relu"):
            assert str(node.outputs[0].shape) == "[4*batch,4,8]", node
