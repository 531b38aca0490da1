"""The kernels inside ONNX Runtime: types, omitted inputs, shapes, errors, the cache in place; contract 7."""

from __future__ import annotations

import ctypes
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from kernel_call import NUMPY_TYPES
from onnx import TensorProto, helper
from random_cases import random_case, random_rotary_case, rounded

from qknorm_onnx import custom_ops
from qknorm_onnx.spec import signature
from qknorm_onnx.spec.attributes import to_attributes
from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormRotarySpec, QKNormSpec
from qknorm_onnx.spec.reference import qk_norm_attention, qk_norm_rotary
from qknorm_onnx.spec.shape_inference import infer_attention_outputs, infer_rotary_outputs

Tensor = Any
ONNX_TYPES = {
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
}
LIMITS = {"float32": 2e-5, "float64": 1e-12, "float16": 8 * 2.0**-11, "bfloat16": 8 * 2.0**-8}
ATTENTION_OUTPUTS = tuple(tensor.name for tensor in signature.ATTENTION_OUTPUTS)


def make_session(model: onnx.ModelProto, library_file: pathlib.Path, **options: Any) -> onnxruntime.InferenceSession:
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    for name, value in options.items():
        setattr(settings, name, value)
    settings.register_custom_ops_library(str(library_file))
    return onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])


def make_model(nodes: Sequence[onnx.NodeProto], inputs: Mapping[str, Tensor], outputs: Mapping[str, int]) -> onnx.ModelProto:
    declared = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in inputs.items()
    ]
    graph = helper.make_graph(
        list(nodes), "graph", declared, [helper.make_tensor_value_info(name, dtype, None) for name, dtype in outputs.items()]
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(signature.DOMAIN, signature.VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def attention_node(
    spec: QKNormSpec, present: Sequence[str], outputs: Sequence[str] = ATTENTION_OUTPUTS, **renamed: str
) -> onnx.NodeProto:
    names = [renamed.get(name, name) if name in present else "" for name in signature.ATTENTION_INPUT_NAMES]
    while not names[-1]:
        names.pop()
    return helper.make_node(
        signature.ATTENTION_OP, names, list(outputs), domain=signature.DOMAIN, name="attention", **to_attributes(spec)
    )


def run(session: onnxruntime.InferenceSession, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Runs with OrtValues, which also carry bfloat16."""
    binding = session.io_binding()
    for name, value in inputs.items():
        array = np.asarray(value, order="C")
        if array.dtype == ml_dtypes.bfloat16:
            ort_value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), TensorProto.BFLOAT16)
        else:
            ort_value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        binding.bind_ortvalue_input(name, ort_value)
    for output in session.get_outputs():
        binding.bind_output(output.name)
    session.run_with_iobinding(binding)
    values = binding.get_outputs()
    return {output.name: _to_numpy(value) for output, value in zip(session.get_outputs(), values, strict=True)}


def _to_numpy(value: onnxruntime.OrtValue) -> Tensor:
    if value.data_type() != "tensor(bfloat16)":
        return value.numpy()
    shape = tuple(value.shape())
    count = int(np.prod(shape))
    raw = (ctypes.c_uint16 * count).from_address(value.data_ptr()) if count else b""
    return np.frombuffer(bytes(raw), np.uint16).view(ml_dtypes.bfloat16).reshape(shape).copy()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    wide = actual.astype(np.float64)
    assert np.isfinite(wide).all()
    return float(np.abs(wide - expected).max(initial=0) / max(np.abs(expected).max(initial=0), 1e-30))


def test_registered_kernels_are_those_of_the_signature() -> None:
    """Contract 7."""
    registered = {(kernel["op"], kernel["provider"], kernel["dtype"]) for kernel in custom_ops.build_info()["kernels"]}
    promised = {(op, provider, dtype) for (op, provider), dtypes in signature.KERNEL_DTYPES.items() for dtype in dtypes}
    assert registered == promised


@pytest.mark.parametrize("dtype", ONNX_TYPES)
@pytest.mark.parametrize("seed", range(12))
def test_attention_node(library_file: pathlib.Path, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(rng)
    inputs = rounded(case.inputs, NUMPY_TYPES[dtype], rng, mixed=dtype != "float64")
    model = make_model([attention_node(case.spec, list(inputs))], inputs, dict.fromkeys(ATTENTION_OUTPUTS, ONNX_TYPES[dtype]))
    actual = run(make_session(model, library_file), inputs)
    expected = qk_norm_attention(case.spec, inputs)
    for name in ATTENTION_OUTPUTS:
        assert relative_error(actual[name], expected[name]) <= LIMITS[dtype], name


@pytest.mark.parametrize("dtype", ONNX_TYPES)
@pytest.mark.parametrize("seed", range(4))
def test_rotary_node(library_file: pathlib.Path, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = random_rotary_case(rng)
    inputs = rounded(case.inputs, NUMPY_TYPES[dtype], rng, mixed=dtype != "float64")
    names = [name if name in inputs else "" for name in signature.ROTARY_INPUT_NAMES]
    node = helper.make_node(signature.ROTARY_OP, names, ["Y"], domain=signature.DOMAIN, **to_attributes(case.spec))
    actual = run(make_session(make_model([node], inputs, {"Y": ONNX_TYPES[dtype]}), library_file), inputs)
    assert relative_error(actual["Y"], qk_norm_rotary(case.spec, inputs)["Y"]) <= LIMITS[dtype]


SPEC = QKNormSpec(
    attention=AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=0.35, is_causal=True),
    norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6),
)


def small_inputs(rng: np.random.Generator, dtype: Any = np.float32, length: int = 5) -> dict[str, Tensor]:
    shapes = {"query": 32, "key": 16, "value": 16}
    return {name: rng.normal(size=(2, length, width)).astype(dtype) for name, width in shapes.items()}


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"])
def test_two_types_in_one_model(library_file: pathlib.Path, level: str) -> None:
    """B60: a float32 and a float16 node, the mask in one of them only, at every optimisation level."""
    rng = np.random.default_rng(0)
    wide, half = small_inputs(rng), small_inputs(rng, np.float16)
    mask = rng.random((1, 1, 5, 5)) < 0.8
    mask[..., 0] = True
    inputs = {**wide, "attention_bias": mask, **{f"half_{name}": value for name, value in half.items()}}
    renamed = {name: f"half_{name}" for name in half}
    model = make_model(
        [attention_node(SPEC, [*wide, "attention_bias"], ["Y"]), attention_node(SPEC, list(half), ["half_Y"], **renamed)],
        inputs,
        {"Y": TensorProto.FLOAT, "half_Y": TensorProto.FLOAT16},
    )
    model.graph.node[1].name = "half"
    session = make_session(model, library_file, graph_optimization_level=getattr(onnxruntime.GraphOptimizationLevel, level))
    actual = run(session, inputs)
    assert relative_error(actual["Y"], qk_norm_attention(SPEC, wide | {"attention_bias": mask})["Y"]) <= 1e-5
    assert relative_error(actual["half_Y"], qk_norm_attention(SPEC, half)["Y"]) <= 4e-3


def test_symbolic_shapes_pass_through_two_nodes(library_file: pathlib.Path) -> None:
    """B61."""
    value_info = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["batch", "tokens", width])
        for name, width in (("query", 32), ("key", 16), ("value", 16))
    ]
    value_info += [
        helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["batch", 2, "past", 8]) for name in ("past_key", "past_value")
    ]
    rotary = QKNormRotarySpec(num_heads=4, kind="rms")
    nodes = [
        attention_node(SPEC, [info.name for info in value_info]),
        helper.make_node(signature.ROTARY_OP, ["Y"], ["again"], domain=signature.DOMAIN, **to_attributes(rotary)),
        attention_node(SPEC, ["query", "key", "value"], ["last"], query="again"),
    ]
    nodes[2].name = "second"
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, None) for name in ("again", "last")]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(signature.DOMAIN, signature.VERSION)]
    model = helper.make_model(helper.make_graph(nodes, "graph", value_info, outputs), opset_imports=opsets, ir_version=10)
    shapes = {output.name: output.shape for output in make_session(model, library_file).get_outputs()}
    assert shapes["again"] == ["batch", "tokens", 32]
    assert shapes["last"] == ["batch", "tokens", 32]


def test_wrong_shapes_are_an_invalid_argument(library_file: pathlib.Path) -> None:
    rng = np.random.default_rng(1)
    inputs = small_inputs(rng)
    model = make_model([attention_node(SPEC, list(inputs), ["Y"])], inputs, {"Y": TensorProto.FLOAT})
    for info in model.graph.input:
        info.type.tensor_type.shape.dim[1].ClearField("dim_value")
    session = make_session(model, library_file)
    inputs["value"] = inputs["value"][:, :4]
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument) as caught:
        session.run(None, inputs)
    assert "value has shape (2, 4, 16); it needs as many positions as key (2, 5, 16)" in str(caught.value)
    assert "Name:'attention'" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("q_num_heads", None, "attribute q_num_heads is missing and has no default"),
        ("q_num_heads", 2.0, "attribute q_num_heads is a float; it must be an int"),
        ("q_num_heads", 3, "q_num_heads 3 is not a multiple of kv_num_heads 2"),
        ("scale", 1, "attribute scale is an int; it must be a float"),
        ("scale", float("nan"), "attribute scale must be finite"),
        ("q_norm", "batch", "attribute q_norm is 'batch'; it must be one of 'none', 'rms', 'layer', 'l2'"),
        ("q_norm", "l2", "a norm 'l2' with epsilon_mode 'inside_sqrt'"),
        ("is_causal", 2, "attribute is_causal is 2; it must be 0 or 1"),
        ("left_window_size", [3], "attribute left_window_size is a list of ints; it must be an int"),
        ("softcap", -1.0, "attribute softcap is -1.0; it must not be negative (0 is off)"),
    ],
)
def test_wrong_attributes_stop_the_session(library_file: pathlib.Path, name: str, value: Any, message: str) -> None:
    inputs = small_inputs(np.random.default_rng(2))
    node = attention_node(SPEC, list(inputs), ["Y"])
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)
    if value is not None:
        node.attribute.append(helper.make_attribute(name, value))
    with pytest.raises(Exception, match="QKNormAttention node 'attention'") as caught:
        make_session(make_model([node], inputs, {"Y": TensorProto.FLOAT}), library_file)
    assert message in str(caught.value)


@pytest.mark.parametrize("threads", [1, 2])
def test_cache_in_place(library_file: pathlib.Path, threads: int) -> None:
    """One buffer bound to past and present: tokens are appended without a copy of the cache."""
    rng = np.random.default_rng(3)
    capacity = 64
    buffers = {name: rng.normal(size=(2, 2, capacity, 8)).astype(np.float32) for name in ("past_key", "past_value")}
    inputs = small_inputs(rng, length=1) | buffers | {"cache_length": np.array([7, 30])}
    model = make_model([attention_node(SPEC, list(inputs))], inputs, dict.fromkeys(ATTENTION_OUTPUTS, TensorProto.FLOAT))
    session = make_session(model, library_file, intra_op_num_threads=threads)
    cache = {name: onnxruntime.OrtValue.ortvalue_from_numpy(value) for name, value in buffers.items()}
    for step in range(3):
        feeds = small_inputs(rng, length=1) | {"cache_length": inputs["cache_length"] + step}
        expected = qk_norm_attention(SPEC, feeds | {name: value.numpy().copy() for name, value in cache.items()})
        binding = session.io_binding()
        for name, value in feeds.items():
            binding.bind_cpu_input(name, value)
        for past, present in (("past_key", "present_key"), ("past_value", "present_value")):
            binding.bind_ortvalue_input(past, cache[past])
            binding.bind_ortvalue_output(present, cache[past])
        binding.bind_output("Y")
        session.run_with_iobinding(binding)
        y = next(value.numpy() for value in binding.get_outputs() if value.shape() == [2, 1, 32])
        assert relative_error(y, expected["Y"]) <= 1e-5
        for past, present in (("past_key", "present_key"), ("past_value", "present_value")):
            assert relative_error(cache[past].numpy(), expected[present]) <= 1e-5


def test_library_serves_many_sessions(library_file: pathlib.Path) -> None:
    """Each session registers the library for itself, and they run side by side."""
    rng = np.random.default_rng(4)
    inputs = small_inputs(rng)
    model = make_model([attention_node(SPEC, list(inputs), ["Y"])], inputs, {"Y": TensorProto.FLOAT})
    sessions = [make_session(model, library_file) for _ in range(5)]
    expected = qk_norm_attention(SPEC, inputs)["Y"]
    for session in (*sessions, *reversed(sessions)):
        assert relative_error(run(session, inputs)["Y"], expected) <= 1e-5


def test_an_older_onnxruntime_is_told_so(library_file: pathlib.Path) -> None:
    """B59: an ONNX Runtime whose table ends before our version gets a status with both versions."""
    messages: list[str] = []
    create_status = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)(
        lambda _code, text: messages.append(text.decode()) or 1
    )
    table = (ctypes.c_void_p * 1)(ctypes.cast(create_status, ctypes.c_void_p).value)
    get_api = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(
        lambda version: ctypes.addressof(table) if version == 1 else None
    )
    get_version = ctypes.CFUNCTYPE(ctypes.c_void_p)(lambda: ctypes.cast(version_text, ctypes.c_void_p).value)
    version_text = ctypes.c_char_p(b"1.19.2")
    base = (ctypes.c_void_p * 2)(ctypes.cast(get_api, ctypes.c_void_p).value, ctypes.cast(get_version, ctypes.c_void_p).value)
    library = ctypes.CDLL(str(library_file))
    library.RegisterCustomOps.restype = ctypes.c_void_p
    assert library.RegisterCustomOps(None, ctypes.byref(base)) == 1
    assert len(messages) == 1
    assert "need ONNX Runtime 1.24 or newer; this is ONNX Runtime 1.19.2" in messages[0]


DIMS = {"batch": (2, "batch"), "tokens": (5, "tokens"), "keys": (5, "tokens", "keys"), "query": (32,), "value": (12, "width")}


@pytest.mark.parametrize("sizes", itertools.product(*DIMS.values()), ids=str)
def test_inferred_shapes_are_those_of_the_spec(library_file: pathlib.Path, sizes: tuple[Any, ...]) -> None:
    """`custom_ops/ort/shape_inference.cc` beside `spec/shape_inference.py`, with numbers and symbols."""
    batch, tokens, keys, width, value_width = sizes
    spec = QKNormSpec(attention=AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=0.5))
    rotary = QKNormRotarySpec(num_heads=4)
    shapes = {"query": [batch, tokens, width], "key": [batch, keys, 16], "value": [batch, keys, value_width]}
    declared = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    rotated = helper.make_node(
        signature.ROTARY_OP, ["query"], ["rotated"], domain=signature.DOMAIN, name="rotary", **to_attributes(rotary)
    )
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("Y", "rotated")]
    graph = helper.make_graph([attention_node(spec, list(shapes), ["Y"]), rotated], "graph", declared, outputs)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(signature.DOMAIN, signature.VERSION)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    found = {output.name: output.shape for output in make_session(model, library_file).get_outputs()}
    assert found["rotated"] == infer_rotary_outputs(rotary, {"x": shapes["query"]})["Y"]
    expected = infer_attention_outputs(spec, shapes)["Y"]
    assert found["Y"] == ([] if None in expected else expected)  # ONNX Runtime has no size without a name: then it has no shape
