"""What is returned and written is sound: mended where exporters are wrong, refused where it would not load."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import qknorm_onnx as qk
from qknorm_onnx.errors import InputError
from tests.hostile import seeds


def mixed_norm(op_type: str, *, with_bias: bool, wide_result: bool = False) -> onnx.ModelProto:
    """A norm of half precision with a float32 gain, as torch writes it at opset 23: no runtime loads it."""
    generator = np.random.default_rng(5)
    gain = numpy_helper.from_array((1 + generator.standard_normal(8)).astype(np.float32), "gain")
    bias = numpy_helper.from_array(generator.standard_normal(8).astype(np.float16), "bias")
    inputs = ["x", "gain", "bias"] if with_bias else ["x", "gain"]
    nodes = [
        helper.make_node(op_type, inputs, ["n"], axis=-1, epsilon=1e-6),
        *([helper.make_node("Cast", ["n"], ["m"], to=TensorProto.FLOAT16)] if wide_result else []),
        helper.make_node("Mul", ["m" if wide_result else "n", "x"], ["y"]),
    ]
    half = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["b", 8]) for name in ("x", "n", "y")]
    if wide_result:
        half[1].type.tensor_type.elem_type = TensorProto.FLOAT
    graph = helper.make_graph(nodes, "g", [half[0]], [half[2]], initializer=[gain, bias][: len(inputs) - 1], value_info=[half[1]])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


@pytest.mark.parametrize(("op_type", "with_bias"), [("RMSNormalization", False), ("LayerNormalization", True)])
@pytest.mark.parametrize("wide_result", [False, True])
def test_norms_of_mixed_types_are_mended_to_what_torch_computes(op_type, with_bias, wide_result):
    model = mixed_norm(op_type, with_bias=with_bias, wide_result=wide_result)
    with pytest.raises(Exception, match=r"[Tt]ype"):
        ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    program = qk.fuse(model)
    onnx.checker.check_model(program.to_proto(), full_check=True)
    session = qk.create_session(program)
    x = np.random.default_rng(6).standard_normal((3, 8)).astype(np.float16)
    weights = {item.name: numpy_helper.to_array(item).astype(np.float64) for item in model.graph.initializer}
    rows = x.astype(np.float64)
    rows = rows - rows.mean(-1, keepdims=True) if op_type == "LayerNormalization" else rows
    normed = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6) * weights["gain"] + weights.get("bias", 0.0)
    expected = normed * x
    np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, rtol=2e-3, atol=2e-3)


def test_a_mended_model_is_not_mended_again():
    once = qk.fuse(mixed_norm("RMSNormalization", with_bias=False)).to_proto()
    assert [node.op_type for node in once.graph.node].count("Cast") == 2
    assert qk.fuse(once).to_proto() == once


def test_a_program_that_was_broken_is_not_written(tmp_path):
    program = qk.fuse(seeds.spelled(), verify=False)
    attention = next(node for node in program.model.graph if node.domain == "ai.qknorm")
    attention.attributes.add(ir.AttrInt64("strange", 1))
    out = tmp_path / "out.onnx"
    out.write_bytes(b"what was there")
    with pytest.raises(InputError, match="strange"):
        program.save(out)
    assert out.read_bytes() == b"what was there"
    assert list(tmp_path.iterdir()) == [out]


def test_a_program_with_types_that_do_not_fit_is_not_written(tmp_path):
    program = qk.fuse(seeds.plain())
    node = next(node for node in program.model.graph if node.op_type == "Relu")
    node.op_type = "Not"
    with pytest.raises(InputError, match="Not"):
        program.save(tmp_path / "out.onnx")
    assert list(tmp_path.iterdir()) == []


def test_large_weights_are_not_looked_at(monkeypatch):
    """The check works on the structure: it would be of no use for a model of many gigabytes otherwise."""
    from qknorm_onnx.graph.soundness.guard import make_sound

    model = ir.from_proto(seeds.plain())
    shape = ir.Shape([1 << 20, 1 << 12])

    class Untouchable(ir.LazyTensor):
        def __init__(self):
            super().__init__(self.fail, dtype=ir.DataType.FLOAT, shape=shape, name="huge")

        def fail(self):
            raise AssertionError("the weights were read")

    huge = ir.Value(name="huge", shape=shape, type=ir.TensorType(ir.DataType.FLOAT), const_value=Untouchable())
    model.graph.register_initializer(huge)
    before = list(model.graph.initializers)
    make_sound(model, "the model")
    assert list(model.graph.initializers) == before
    assert [value.name for value in model.graph.inputs] == ["x"]
