"""Shapes of what is carried through loops: sizes that change from turn to turn are not stated, nor what follows from them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import qknorm_onnx as qk
from qknorm_onnx.graph.passes.derive_shapes import DeriveShapesPass

TEXT = """<ir_version: 10, opset_import: ["" : 20]>
g (float[{size}, 4] x) => (float y)
<int64 times = {{3}}, int64[1] zero = {{0}}>
{{
  y = Loop (times, , x) <body = b (int64 i, bool go, s) => (bool goes, float o) {{
    goes = Identity(go)
    v = Relu(s)
    o = {step}
  }}>
}}
"""
STEPS = {
    "kept": ("Neg(v)", "[{size},4]"),
    "longer": ("Concat <axis = 0> (v, v)", "[None,4]"),
    "of more axes": ("Unsqueeze(v, zero)", "None"),
}


def typed(text: str) -> onnx.ModelProto:
    """The model; its output and the state of its loop have a type and no shape, which the text cannot say."""
    model = onnx.parser.parse_model(text)
    body = model.graph.node[0].attribute[0].g
    for value in (*model.graph.output, *body.output, body.input[2]):
        kind = onnx.TensorProto.BOOL if value.name == "goes" else onnx.TensorProto.FLOAT
        value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, kind, [] if value.name == "goes" else None))
    return model


def shapes(model: onnx.ModelProto) -> dict[str, str]:
    derived = ir.from_proto(model)
    DeriveShapesPass()(derived)
    return {str(value.name): str(value.shape) for graph in derived.graphs() for node in graph for value in node.outputs}


@pytest.mark.parametrize("size", [3, "n"])
@pytest.mark.parametrize("step", STEPS)
def test_only_sizes_that_stay_are_stated(step, size):
    code, shape = STEPS[step]
    found = shapes(typed(TEXT.format(size=size, step=code)))
    assert {found["v"], found["y"]} == {shape.format(size=size)}


@pytest.mark.parametrize("step", STEPS)
def test_the_file_runs_without_a_warning_of_shapes(step, capfd):
    model = typed(TEXT.format(size=3, step=STEPS[step][0]))
    x = np.random.default_rng(3).standard_normal((3, 4)).astype(np.float32)
    results = [
        ort.InferenceSession(item.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for item in (model, qk.fuse(model).to_proto())
    ]
    np.testing.assert_array_equal(*results)
    assert "Expected shape" not in capfd.readouterr().err


@pytest.mark.parametrize("count", [2, 9])
def test_states_that_hand_a_change_on_are_all_loosened(count):
    """The first of them grows, and each other one takes what the one before it was: one more is seen to change in each turn."""
    states = [f"s{place}" for place in range(count)]
    results = [f"o{place}" for place in range(count)]
    steps = ["o0 = Concat <axis = 0> (s0, s0)"] + [f"o{place} = Relu(s{place - 1})" for place in range(1, count)]
    text = f"""<ir_version: 10, opset_import: ["" : 20]>
        g (float[2, 4] x) => ({", ".join(f"float[a{place}, 4] y{place}" for place in range(count))})
        <int64 times = {{{3}}}>
        {{ {", ".join(f"y{place}" for place in range(count))} = Loop (times, , {", ".join(["x"] * count)})
            <body = b (int64 i, bool go, {", ".join(f"float[?, 4] {name}" for name in states)})
            => (bool goes, {", ".join(f"float[?, 4] {name}" for name in results)})
            {{ goes = Identity(go)
               {chr(10).join(steps)}
            }}>
        }}"""
    model = onnx.parser.parse_model(text)
    body = model.graph.node[0].attribute[0].g
    for value in (*body.input[2:], *body.output[1:]):
        value.type.tensor_type.ClearField("shape")
    found = shapes(model)
    assert not any(found[name].startswith("[2") for name in results[: count - 1])
    assert found[results[-1]] != "[2,4]"
