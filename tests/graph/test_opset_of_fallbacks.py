"""Where a target hands an attention on to one that needs a newer opset, the report says how to get it."""

from __future__ import annotations

import onnx_ir as ir
import pytest

import qknorm_onnx as qk

# Heads of 6 values, shared: none of ONNX Runtime's own operators serves them.
TEXT = """<ir_version: 10, opset_import: ["" : {opset}]>
attention (float[batch,seq,24] q_in, float[batch,seq,12] k_in, float[batch,seq,12] v_in, float[6] w) => (float[batch,seq,24] y)
{{
  k_shape = Constant<value = int64[5] {{0, 0, 2, 1, 6}}>()
  flat = Constant<value = int64[3] {{0, 0, 24}}>()
  groups = Constant<value = int64[5] {{0, 0, 2, 2, 6}}>()
  q = Reshape(q_in, groups)
  k = Reshape(k_in, k_shape)
  v = Reshape(v_in, k_shape)
  qn = LayerNormalization<axis=-1>(q, w)
  kn = LayerNormalization<axis=-1>(k, w)
  qt = Transpose<perm=[0, 2, 3, 1, 4]>(qn)
  kt = Transpose<perm=[0, 2, 3, 4, 1]>(kn)
  vt = Transpose<perm=[0, 2, 3, 1, 4]>(v)
  scores = MatMul(qt, kt)
  p = Softmax<axis=-1>(scores)
  o = MatMul(p, vt)
  ot = Transpose<perm=[0, 3, 1, 2, 4]>(o)
  y = Reshape(ot, flat)
}}
"""


@pytest.mark.parametrize(("opset", "served"), [(20, "primitive"), (23, "onnx")])
def test_target_ort(opset, served):
    (fused,) = qk.fuse(ir.from_onnx_text(TEXT.format(opset=opset)), target="ort").report.fused
    assert fused.target == served
    assert fused.note.startswith("not ort: ")
    says = "it needs opset 23, the model has 20 (export with opset=23, or choose the target onnx, which converts the model)"
    assert (says in fused.note) == (served == "primitive")


def test_target_onnx_converts():
    program = qk.fuse(ir.from_onnx_text(TEXT.format(opset=20)), target="onnx")
    assert program.report.fused[0].target == "onnx" and program.model.opset_imports[""] >= 23
