"""A head that shares its weight with an embedding reads an initializer afterwards, so that quantisers see it."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qknorm_onnx.lowering.turned_weights import TurnSharedWeightsPass

VOCABULARY, WIDTH = 37, 32
HEADER = '<ir_version: 10, opset_import: ["" : 20]>\nmain_graph (int64[B, S] ids) => (float[B, S, 37] logits) {\n'
TIED = "  x = Gather(w, ids)\n  t = Transpose<perm = [1, 0]>(w)\n  logits = MatMul(x, t)\n}\n"
LEFT_ALONE = {
    "read as it is": "  x = Gather(w, ids)\n  t = Transpose<perm = [1, 0]>(w)\n  l = MatMul(x, t)\n"
    "  s = ReduceSum(w)\n  logits = Add(l, s)\n}\n",
    "not turned": "  x = Gather(w, ids)\n  t = Transpose<perm = [0, 1]>(w)\n  u = Transpose(t)\n  logits = MatMul(x, u)\n}\n",
    "on the left": "  x = Gather(w, ids)\n  t = Transpose<perm = [1, 0]>(w)\n  n = MatMul(t, w)\n  y = MatMul(x, n)\n"
    "  u = MatMul(x, t)\n  r = ReduceMax<keepdims = 0>(y)\n  logits = Add(u, r)\n}\n",
}


def model_of(body, dtype=np.float32):
    proto = onnx.parser.parse_model(
        HEADER.replace("float", {"float32": "float", "float16": "float16"}[np.dtype(dtype).name]) + body
    )
    weight = np.random.default_rng(0).standard_normal((VOCABULARY, WIDTH)).astype(dtype)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    return ir.from_proto(proto)


def logits(proto):
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    ids = np.random.default_rng(1).integers(0, VOCABULARY, (3, 5))
    return session.run(None, {"ids": ids})[0]


def right_sides(proto):
    stored = {item.name for item in proto.graph.initializer}
    return [node.input[1] in stored for node in proto.graph.node if node.op_type == "MatMul"]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("order", ["<perm = [1, 0]>", ""])
def test_a_tied_head(dtype, order):
    model = model_of(TIED.replace("<perm = [1, 0]>", order), dtype)
    before = ir.to_proto(model)
    assert right_sides(before) == [False]
    assert TurnSharedWeightsPass()(model).modified
    after = ir.to_proto(model)
    onnx.checker.check_model(after, full_check=True)
    assert right_sides(after) == [True]
    assert [tuple(item.dims) for item in after.graph.initializer] == [(WIDTH, VOCABULARY)]  # once
    np.testing.assert_array_equal(logits(after), logits(before))
    assert not TurnSharedWeightsPass()(model).modified


def test_a_head_of_its_own():
    body = "  x = Gather(v, ids)\n  t = Transpose<perm = [1, 0]>(w)\n  logits = MatMul(x, t)\n}\n"
    model = model_of(body)
    other = ir.Value(name="v", const_value=ir.tensor(np.ones((VOCABULARY, WIDTH), np.float32), name="v"))
    lookup = model.graph.node(0)
    model.graph.inputs[:] = [value for value in model.graph.inputs if value.name != "v"]
    model.graph.register_initializer(other)
    lookup.replace_input_with(0, other)
    assert TurnSharedWeightsPass()(model).modified
    assert [node.op_type for node in model.graph] == ["Gather", "MatMul"]
    assert list(model.graph.initializers) == ["v", "w/turned"]


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_left_alone(name):
    model = model_of(LEFT_ALONE[name])
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    assert not TurnSharedWeightsPass()(model).modified
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_quantisers_take_it(tmp_path):
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    for turned in (False, True):
        model = model_of(TIED)
        if turned:
            TurnSharedWeightsPass()(model)
        proto = ir.to_proto(model)
        exact = logits(proto)
        quantizer = MatMulNBitsQuantizer(onnx.ModelProto.FromString(proto.SerializeToString()), block_size=16)
        quantizer.process()
        four = quantizer.model.model
        assert ("MatMulNBits" in [node.op_type for node in four.graph.node]) == turned
        onnx.save(proto, tmp_path / "m.onnx")
        quantize_dynamic(
            tmp_path / "m.onnx", tmp_path / "q.onnx", weight_type=QuantType.QInt8, extra_options={"MatMulConstBOnly": True}
        )
        eight = onnx.load(tmp_path / "q.onnx")
        assert ("MatMulInteger" in [node.op_type for node in eight.graph.node]) == turned
        errors = [np.abs(logits(quantised) - exact).max() / np.abs(exact).max() for quantised in (four, eight)]
        assert errors[0] < 0.2 and errors[1] < 0.05
        assert (errors[0] > 0) == turned
