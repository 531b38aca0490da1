"""float32 models converted to float16 and bfloat16: what stays float32, what is rounded, what is clamped."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx.helper as oh
import onnx_ir as ir
import pytest

from qknorm_onnx.errors import InputError
from qknorm_onnx.runtime.float64_twin import raise_to_float64
from qknorm_onnx.runtime.half_precision import convert_dtype
from qknorm_onnx.runtime.runner import make_runner
from tests.contract.case_models import model_of
from tests.contract.spec_cases import attention_cases

FLOAT, INT64, BOOL = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64, onnx.TensorProto.BOOL
TYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def model(nodes, inputs, outputs, **initializers):
    graph = oh.make_graph(
        nodes,
        "g",
        [oh.make_tensor_value_info(name, kind, shape) for name, kind, shape in inputs],
        [oh.make_tensor_value_info(name, FLOAT, None) for name in outputs],
        [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in initializers.items()],
    )
    checked = oh.make_model(graph, opset_imports=[oh.make_opsetid("", 20)], ir_version=10)
    return ir.from_proto(onnx.shape_inference.infer_shapes(checked))


def rms_norm(epsilon: float) -> ir.Model:
    nodes = [
        oh.make_node("Pow", ["x", "two"], ["squares"]),
        oh.make_node("ReduceMean", ["squares", "last"], ["mean"]),
        oh.make_node("Add", ["mean", "eps"], ["shifted"]),
        oh.make_node("Sqrt", ["shifted"], ["root"]),
        oh.make_node("Reciprocal", ["root"], ["inverse"]),
        oh.make_node("Mul", ["x", "inverse"], ["hat"]),
        oh.make_node("Mul", ["w", "hat"], ["y"]),
    ]
    weight = np.linspace(0.5, 1.5, 16, dtype=np.float32)
    constants = {"two": np.float32(2), "last": np.array([-1]), "eps": np.float32(epsilon), "w": weight}
    return model(nodes, [("x", FLOAT, ["n", 16])], ["y"], **constants)


def run(converted: ir.Model, dtype: str, **inputs):
    arithmetic = "bfloat16 emulated" if dtype == "bfloat16" else "native"
    return make_runner(converted, arithmetic=arithmetic).run(inputs)


@pytest.mark.parametrize("dtype", TYPES)
def test_zeros_of_a_default_type_are_converted(dtype: str):
    """ConstantOfShape without a value means float32 zeros, which no attribute says."""
    nodes = [
        oh.make_node("Shape", ["x"], ["shape"]),
        oh.make_node("ConstantOfShape", ["shape"], ["zeros"]),
        oh.make_node("Add", ["zeros", "x"], ["y"]),
    ]
    plain = model(nodes, [("x", FLOAT, ["n", 3])], ["y"])
    x = np.array([[1.0, -2.0, 0.5]])
    assert np.array_equal(run(convert_dtype(plain, dtype), dtype, x=x)["y"].astype(np.float64), x)
    raised = make_runner(raise_to_float64(plain))
    assert raised.how == "onnxruntime"
    assert np.array_equal(raised.run({"x": x})["y"], x)


@pytest.mark.parametrize("dtype", TYPES)
def test_statistics_of_norms_stay_float32(dtype: str):
    """Squares of 300 overflow float16, an epsilon of 1e-8 vanishes in it (B03); the norm must see neither."""
    converted = convert_dtype(rms_norm(1e-8), dtype)
    assert [value.dtype for value in (*converted.graph.inputs, *converted.graph.outputs)] == [ir.DataType[dtype.upper()]] * 2
    random = np.random.default_rng(0)
    x = random.normal(size=(6, 16)) * np.array([[300.0], [3000.0], [1.0], [1e-3], [0.0], [60000 / 4]])
    x = x.astype(TYPES[dtype]).astype(np.float64)
    y = run(converted, dtype, x=x)["y"].astype(np.float64)
    weight = np.linspace(0.5, 1.5, 16, dtype=np.float32).astype(TYPES[dtype]).astype(np.float64)
    expected = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-8) * weight
    unit = float(ml_dtypes.finfo(TYPES[dtype]).eps)
    assert np.isfinite(y).all()
    assert np.abs(y - expected).max() <= 2 * unit * np.abs(expected).max()
    types = {node.op_type: node.outputs[0].dtype for node in converted.graph if node.op_type != "Cast"}
    assert {types[op] for op in ("Pow", "ReduceMean", "Add", "Sqrt", "Reciprocal")} == {ir.DataType.FLOAT}


@pytest.mark.parametrize("dtype", TYPES)
def test_positions_stay_float32_and_their_tables_do_not(dtype: str):
    nodes = [
        oh.make_node("Cast", ["position"], ["p"], to=FLOAT),
        oh.make_node("Mul", ["p", "frequency"], ["angle"]),
        oh.make_node("Cos", ["angle"], ["cos"]),
        oh.make_node("Mul", ["x", "cos"], ["y"]),
    ]
    frequency = np.array([1.0, 0.3, 0.1, 0.07], dtype=np.float32)
    source = model(nodes, [("position", INT64, ["n", 1]), ("x", FLOAT, ["n", 4])], ["y"], frequency=frequency)
    position = np.array([[0], [7], [4097], [30001]])  # odd numbers beyond 2048 are no float16
    x = np.ones((4, 4))
    y = run(convert_dtype(source, dtype), dtype, position=position, x=x)["y"].astype(np.float64)
    rounded_frequency = frequency.astype(TYPES[dtype]).astype(np.float64)  # as module.to(dtype) rounds the buffer
    unit = float(ml_dtypes.finfo(TYPES[dtype]).eps)
    assert np.abs(y - np.cos(position * rounded_frequency)).max() <= unit + 30001 * 2.0**-23


@pytest.mark.parametrize("dtype", TYPES)
def test_a_mask_of_the_lowest_float32_stays_finite(dtype: str):
    """Minus infinity would make a fully masked row NaN; the lowest number of the type gives the mean, as PyTorch does (B13)."""
    nodes = [
        oh.make_node("Where", ["seen", "zero", "lowest"], ["bias"]),
        oh.make_node("Add", ["x", "bias"], ["logits"]),
        oh.make_node("Softmax", ["logits"], ["y"], axis=-1),
    ]
    source = model(
        nodes,
        [("seen", BOOL, ["n", 4]), ("x", FLOAT, ["n", 4])],
        ["y"],
        zero=np.float32(0),
        lowest=np.finfo(np.float32).min,
    )
    y = run(convert_dtype(source, dtype), dtype, seen=np.zeros((1, 4), dtype=bool), x=np.zeros((1, 4)))["y"]
    assert y.astype(np.float64).tolist() == [[0.25] * 4]


def test_an_infinite_mask_stays_infinite():
    source = model(
        [oh.make_node("Add", ["x", "mask"], ["y"])], [("x", FLOAT, ["n", 1])], ["y"], mask=np.array([-np.inf, 1e6], "f4")
    )
    assert run(convert_dtype(source, "float16"), "float16", x=np.zeros((1, 1)))["y"].tolist() == [[-np.inf, 65504.0]]


def test_explicit_float32_stays_and_integers_are_untouched():
    nodes = [
        oh.make_node("Mul", ["x", "x"], ["a"]),
        oh.make_node("Cast", ["a"], ["wide"], to=FLOAT),
        oh.make_node("ReduceMax", ["wide", "last"], ["largest"]),
        oh.make_node("Cast", ["largest"], ["as_int"], to=INT64),
        oh.make_node("Cast", ["as_int"], ["back"], to=FLOAT),
        oh.make_node("Add", ["x", "back"], ["y"]),
    ]
    converted = convert_dtype(model(nodes, [("x", FLOAT, ["n", 4])], ["y"], last=np.array([-1])), "float16")
    y = run(converted, "float16", x=np.array([[1.0, 2.0, 3.0, 4.0]]))["y"]
    assert y.dtype == np.float16
    assert y.tolist() == [[17.0, 18.0, 19.0, 20.0]]


@pytest.mark.parametrize("dtype", TYPES)
def test_canonical_nodes_get_the_body_of_the_new_type(dtype: str):
    case = next(case for case in attention_cases() if case.id == "softcap")
    source = model_of([case], "float32", constants=lambda name: name.endswith("weight"))
    before = ir.to_proto(source).SerializeToString()
    converted = convert_dtype(source, dtype)
    assert ir.to_proto(source).SerializeToString() == before
    node = next(node for node in converted.graph if node.domain == "ai.qknorm")
    assert {value.dtype for value in (*node.inputs[:3], *node.outputs)} == {ir.DataType[dtype.upper()]}
    assert node.op_identifier() in converted.functions
    bodies = [ir.to_proto(model.functions[node.op_identifier()]).SerializeToString() for model in (source, converted)]
    assert bodies[0] != bodies[1]
    rounded = {name: array.astype(TYPES[dtype]).astype(np.float64) for name, array in case.inputs.items()}
    feeds = {value.name: rounded[value.name.split("/")[-1]] for value in converted.graph.inputs}
    (y,) = run(converted, dtype, **feeds).values()
    (expected,) = case.expected(rounded)
    unit = float(ml_dtypes.finfo(TYPES[dtype]).eps)
    assert np.abs(y.astype(np.float64) - expected).max() <= unit * np.abs(expected).max()


def test_control_flow_is_refused_by_name():
    branch = oh.make_graph([oh.make_node("Neg", ["x"], ["b"])], "then", [], [oh.make_tensor_value_info("b", FLOAT, None)])
    node = oh.make_node("If", ["c"], ["y"], name="choice", then_branch=branch, else_branch=branch)
    source = model([node], [("c", BOOL, []), ("x", FLOAT, ["n", 4])], ["y"])
    with pytest.raises(InputError, match=r"choice \(If\) is control flow; export the model in float16"):
        convert_dtype(source, "float16")
