"""Runners: float64 twins, bfloat16 in and out, emulation, and operators that onnxruntime lacks."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx.helper as oh
import onnx_ir as ir
import pytest

from qknorm_onnx.errors import InputError
from qknorm_onnx.runtime.emulation import emulate_bfloat16
from qknorm_onnx.runtime.float64_twin import raise_to_float64
from qknorm_onnx.runtime.runner import CannotRunError, OnnxRuntimeRunner, make_runner, model_float_type
from tests.contract.case_models import error, model_of
from tests.contract.spec_cases import Case, attention_cases, norm_cases, rotary_cases

FLOAT, DOUBLE, HALF, BF16 = (
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.DOUBLE,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
)


def small_model(nodes, inputs, outputs, initializers=(), opset=20):
    graph = oh.make_graph(
        nodes,
        "g",
        [oh.make_tensor_value_info(name, kind, ["n", 4]) for name, kind in inputs],
        [oh.make_tensor_value_info(name, kind, None) for name, kind in outputs],
        list(initializers),
    )
    return oh.make_model(graph, opset_imports=[oh.make_opsetid("", opset)], ir_version=10)


def some_cases() -> list[Case]:
    wanted = {
        "softcap",
        "window-2--1-True",
        "rotary-after_norm-True-(S, R)",
        "norm-l2-clamp-1e-12",
        "norm-layer-inside_sqrt-1e-06",
    }
    found = [case for source in (norm_cases, rotary_cases, attention_cases) for case in source() if case.id in wanted]
    assert {case.id for case in found} == wanted
    return found


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("prefer_reference", [False, True], ids=["onnxruntime", "onnx.reference"])
def test_the_float64_twin_of_a_canonical_node_is_the_reference(dtype: str, prefer_reference: bool):
    for case in some_cases():
        model = model_of([case], dtype)
        # Weights rounded to the narrow type, values held in float64.
        feeds = {value.name: case.inputs[value.name.split("/")[-1]].astype(value.dtype.numpy()) for value in model.graph.inputs}
        runner = make_runner(model, arithmetic="float64", prefer_reference=prefer_reference)
        wide = {name.split("/")[-1]: array.astype(np.float64) for name, array in feeds.items()}
        outputs = runner.run(feeds)
        expected = case.expected(wide)
        assert outputs[runner.output_names[0]].dtype == np.float64
        # The constants of a body made for float32 (its smallest number among them) bound the agreement, not the arithmetic.
        assert error(outputs[runner.output_names[0]], expected[0]) < 2e-8, case.id


def test_the_twin_leaves_the_model_alone():
    model = model_of(some_cases()[:1], "float32")
    before = ir.to_proto(model).SerializeToString()
    raise_to_float64(model)
    emulate_bfloat16(model)
    assert ir.to_proto(model).SerializeToString() == before


def test_a_twin_computes_in_float64_all_the_way():
    """1 + 2^-40 survives Cast, Constant, ConstantOfShape and an explicit cast to float32 only in float64."""
    nodes = [
        oh.make_node("Cast", ["x"], ["wide"], to=FLOAT),
        oh.make_node("Constant", [], ["one"], value_float=1.0),
        oh.make_node("Shape", ["x"], ["shape"]),
        oh.make_node("ConstantOfShape", ["shape"], ["ones"], value=oh.make_tensor("v", FLOAT, [1], [1.0])),
        oh.make_node("Mul", ["wide", "one"], ["a"]),
        oh.make_node("Mul", ["a", "ones"], ["y"]),
    ]
    x = np.full((2, 4), 1 + 2.0**-40)
    for prefer_reference in (False, True):
        model = small_model(nodes, [("x", HALF)], [("y", FLOAT)])
        y = make_runner(model, arithmetic="float64", prefer_reference=prefer_reference).run({"x": x})["y"]
        assert np.array_equal(y, x)


def test_an_operator_without_a_float64_kernel_runs_in_the_reference_evaluator():
    nodes = [
        oh.make_node("Mul", ["x", "x"], ["a"]),
        oh.make_node("Erf", ["a"], ["b"]),
        oh.make_node("Add", ["b", "a"], ["c"]),
        oh.make_node("Softplus", ["c"], ["y"]),
    ]
    runner = make_runner(small_model(nodes, [("x", FLOAT)], [("y", FLOAT)]), arithmetic="float64")
    assert runner.how == "onnxruntime, float64 (Erf, Softplus by onnx.reference)"
    x = np.random.default_rng(0).normal(size=(3, 4))
    import math

    a = x * x
    expected = np.log1p(np.exp(np.vectorize(math.erf)(a) + a))
    assert np.abs(runner.run({"x": x})["y"] - expected).max() < 1e-7  # the reference evaluator's erf is float32's


def test_fixed_float32_ports_get_casts():
    nodes = [oh.make_node("Resize", ["x", "", "scales"], ["y"], mode="nearest")]
    scales = oh.make_tensor("scales", FLOAT, [2], [1.0, 2.0])
    model = small_model(nodes, [("x", FLOAT)], [("y", FLOAT)], [scales])
    x = np.random.default_rng(0).normal(size=(2, 4))
    assert np.array_equal(make_runner(model, arithmetic="float64").run({"x": x})["y"], x.repeat(2, axis=1))


def test_bfloat16_goes_in_and_out_of_onnxruntime():
    model = small_model([oh.make_node("Identity", ["x"], ["y"])], [("x", BF16)], [("y", BF16)])
    x = np.array([[1.0, -0.0, np.inf, 3e38]], dtype=ml_dtypes.bfloat16)
    y = make_runner(model).run({"x": x})["y"]
    assert y.dtype == ml_dtypes.bfloat16
    assert np.array_equal(y.view(np.uint16), x.view(np.uint16))
    assert make_runner(model).run({"x": x[:0]})["y"].shape == (0, 4)


@pytest.mark.parametrize("prefer_reference", [False, True], ids=["onnxruntime", "onnx.reference"])
def test_emulation_rounds_after_every_operator_and_only_there(prefer_reference: bool):
    nodes = [
        oh.make_node("Mul", ["x", "x"], ["a"]),
        oh.make_node("Add", ["a", "x"], ["b"]),
        oh.make_node("Cast", ["b"], ["wide"], to=FLOAT),
        oh.make_node("Mul", ["wide", "wide"], ["c"]),
        oh.make_node("Sqrt", ["c"], ["d"]),
        oh.make_node("Cast", ["d"], ["y"], to=BF16),
    ]
    x = np.random.default_rng(0).normal(size=(50, 4)).astype(ml_dtypes.bfloat16)
    runner = make_runner(
        small_model(nodes, [("x", BF16)], [("y", BF16)]), arithmetic="bfloat16 emulated", prefer_reference=prefer_reference
    )

    def rounded(array):
        return array.astype(ml_dtypes.bfloat16).astype(np.float32)

    wide = x.astype(np.float32)
    b = rounded(rounded(wide * wide) + wide)
    assert np.array_equal(runner.run({"x": x})["y"].astype(np.float32), rounded(np.sqrt(b * b)))
    assert "bfloat16 emulated" in runner.how
    not_rounded = (wide * wide + wide).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert not np.array_equal(b, not_rounded), "the test's numbers must tell both apart"


def test_emulated_canonical_nodes_round_at_their_outputs_only():
    """Inside, the body computes in float32: its error is that of rounding the output once."""
    for case in some_cases():
        model = model_of([case], "bfloat16")
        narrow = {value.name: case.inputs[value.name.split("/")[-1]].astype(value.dtype.numpy()) for value in model.graph.inputs}
        runner = make_runner(model, arithmetic="bfloat16 emulated")
        y = runner.run(narrow)[runner.output_names[0]]
        expected = case.expected({name.split("/")[-1]: array.astype(np.float64) for name, array in narrow.items()})[0]
        assert np.array_equal(y, y.astype(ml_dtypes.bfloat16).astype(np.float32)), "outputs are bfloat16 values"
        assert np.all(np.abs(y - expected) <= 1.02 * 2.0**-8 * np.abs(expected) + 1e-5), case.id


def test_what_cannot_run_says_why():
    unknown = oh.make_node("Frobnicate", ["x"], ["y"], domain="nowhere")
    model = small_model([unknown], [("x", FLOAT)], [("y", FLOAT)])
    model.opset_import.append(oh.make_opsetid("nowhere", 1))
    with pytest.raises(CannotRunError, match="Frobnicate"):
        make_runner(model)
    runner = make_runner(small_model([oh.make_node("Neg", ["x"], ["y"])], [("x", FLOAT)], [("y", FLOAT)]))
    with pytest.raises(CannotRunError, match="input x is missing; given are z"):
        runner.run({"z": np.zeros((1, 4))})
    with pytest.raises(CannotRunError, match="onnxruntime"):
        runner.run({"x": np.zeros((1, 5))})


def test_sources_of_all_kinds(tmp_path):
    model = small_model([oh.make_node("Neg", ["x"], ["y"])], [("x", FLOAT)], [("y", FLOAT)])
    onnx.save(model, tmp_path / "m.onnx")

    class Program:
        pass

    program = Program()
    program.model = ir.from_proto(model)
    for source in (model, ir.from_proto(model), tmp_path / "m.onnx", str(tmp_path / "m.onnx"), program):
        assert make_runner(source).run({"x": np.ones((1, 4))})["y"].tolist() == [[-1.0] * 4]
    with pytest.raises(InputError, match="no such file"):
        make_runner(tmp_path / "none.onnx")


def test_the_float_type_is_that_of_most_weights():
    half = oh.make_tensor("w", HALF, [4], [1.0] * 4)
    nodes = [oh.make_node("Cast", ["x"], ["h"], to=HALF), oh.make_node("Mul", ["h", "w"], ["y"])]
    model = ir.from_proto(small_model(nodes, [("x", FLOAT)], [("y", HALF)], [half]))
    assert model_float_type(model) == ir.DataType.FLOAT16
    empty = ir.from_proto(small_model([oh.make_node("Not", ["x"], ["y"])], [("x", onnx.TensorProto.BOOL)], [("y", 9)]))
    assert model_float_type(empty) == ir.DataType.FLOAT


def test_onnxruntime_runs_what_it_can():
    model = small_model([oh.make_node("Neg", ["x"], ["y"])], [("x", FLOAT)], [("y", FLOAT)])
    assert isinstance(make_runner(model), OnnxRuntimeRunner)
    assert make_runner(model, prefer_reference=True).how == "onnx.reference"
