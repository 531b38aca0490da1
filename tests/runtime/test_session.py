"""Sessions: what they run, and what they refuse in one sentence."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import qknorm_onnx as qk
from qknorm_onnx.graph.canonical.qk_norm_node import AttentionInputs, make_attention_node
from qknorm_onnx.graph.passes.attach_bodies import AttachBodiesPass
from qknorm_onnx.runtime.native_kernels import native_kernels_for
from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormSpec
from qknorm_onnx.spec.reference import qk_norm_attention

ort = pytest.importorskip("onnxruntime")

SPEC = QKNormSpec(
    attention=AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=0.5, is_causal=True),
    norm=NormSpec(q_kind="l2", k_kind="l2", q_epsilon=1e-12, k_epsilon=1e-12, epsilon_mode="clamp"),
)
WIDTHS = {"query": 64, "key": 32, "value": 32}


def one_node(dtype=ir.DataType.FLOAT):
    inputs = {n: ir.Value(name=n, type=ir.TensorType(dtype), shape=ir.Shape(["b", "s", w])) for n, w in WIDTHS.items()}
    node = make_attention_node(SPEC, AttentionInputs(**inputs), name="attention")
    node.outputs[0].name = "y"
    graph = ir.Graph(list(inputs.values()), [node.outputs[0]], nodes=[node], opset_imports={"": 20, "ai.qknorm": 1}, name="g")
    model = ir.Model(graph, ir_version=10)
    AttachBodiesPass()(model)
    return model


@pytest.fixture
def feeds():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(3, 5, width)).astype(np.float32) for name, width in WIDTHS.items()}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("form", ["ir", "proto", "path"])
def test_every_form_of_a_model(tmp_path, feeds, form, native):
    model = one_node()
    source = {"ir": model, "proto": ir.to_proto(model), "path": tmp_path / "m.onnx"}[form]
    if form == "path":
        ir.save(model, source)
    (y,) = qk.create_session(source, native_kernels=native).run(None, feeds)
    assert np.abs(y - qk_norm_attention(SPEC, feeds)["Y"]).max() < 1e-6


def test_own_options_may_be_used_twice(feeds):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    outputs = [qk.create_session(one_node(), session_options=options).run(None, feeds)[0] for _ in range(2)]
    assert np.array_equal(*outputs)


def test_a_provider_that_is_not_there_is_an_error_not_a_fallback():
    with pytest.raises(qk.InputError, match=r"has no NoSuchExecutionProvider; it has .*CPUExecutionProvider"):
        qk.create_session(one_node(), providers=["NoSuchExecutionProvider", "CPUExecutionProvider"])


def test_not_a_model(tmp_path):
    path = tmp_path / "bad.onnx"
    path.write_text("nonsense")
    with pytest.raises(qk.InputError, match=r"bad\.onnx is not a readable ONNX model"):
        qk.create_session(path)


def test_models_without_our_nodes_take_no_library():
    proto = onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 20]> g (float[N] x) => (float[N] y) { y = Abs(x) }')
    model = ir.from_proto(proto)
    assert native_kernels_for(model, provider="cpu").library is None
    assert "no node" in native_kernels_for(model, provider="cpu").reason
    (y,) = qk.create_session(model).run(None, {"x": np.array([-1.0], dtype=np.float32)})
    assert y[0] == 1.0


def test_a_missing_kernel_is_said_in_one_sentence(monkeypatch):
    monkeypatch.setattr("qknorm_onnx.runtime.native_kernels.KERNEL_DTYPES", {})
    found = native_kernels_for(one_node(), provider="cuda")
    assert found.library is None
    assert "cuda kernel of QKNormAttention for float32" in found.reason
