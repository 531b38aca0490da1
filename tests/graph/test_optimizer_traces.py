"""What optimizers and converters leave: a softmax opened into its definition, casts between the operators of a norm or a guard,
a Transpose behind the reduction of a norm, convolutions in blocks, nodes called as values of others.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from qknorm_onnx.graph.shapes.nchwc import NCHWC, nchwc_results
from tests.graph.attention_text import Spelling, attention_model, fused
from tests.graph.form_text import RMS, Form, form_model

OPENED = """
  highest = ReduceMax<keepdims=1>({of}, last)
  lowered = Sub(logits, highest)
  e = Exp(lowered)
  total = ReduceSum<keepdims=1>({summed}, {over})
  p = Div(e, total)
"""
ROWS = "  rows = Constant<value = int64[1] {-2}>()\n"
GUARD = """
  zero = Constant<value = float {{0.0}}>()
  raw = Softmax<axis=-1>(logits)
  narrow = Cast<to=10>({tested})
  missing = IsNaN(narrow)
  p = Where(missing, zero, raw)
"""
# As float16 converters leave a norm of which some operators stay in float32: casts behind each operator.
CAST_NORM = """
  {n}_32 = Cast<to=1>({x})
  {n}_sq = Pow({n}_32, two32)
  {n}_sq16 = Cast<to=10>({n}_sq)
  {n}_sq32 = Cast<to=1>({n}_sq16)
  {n}_mean = ReduceMean<keepdims=1>({n}_sq32, last)
  {n}_mean16 = Cast<to=10>({n}_mean)
  {n}_e = Add({n}_mean16, eps)
  {n}_e32 = Cast<to=1>({n}_e)
  {n}_root = Sqrt({n}_e32)
  {n}_root16 = Cast<to=10>({n}_root)
  {n}_hat = Div({x}, {n}_root16)
  {y} = Mul({n}_hat, {w})
"""
TWO = "  two32 = Constant<value = float {2.0}>()\n"


def opened(**changed: str) -> Form:
    parts = {"of": "logits", "summed": "e", "over": "last"} | changed
    return Form(softmax=ROWS + OPENED.format(**parts))


def test_a_softmax_written_as_its_definition_is_one():
    model, report = fused(form_model(opened()))
    (attention,) = report.fused
    assert attention.note == "" and not report.declined
    assert not any(node.op_type in ("Exp", "ReduceMax", "Softmax") for node in model.graph)


@pytest.mark.parametrize(
    "changed",
    [{"over": "rows"}, {"summed": "lowered"}, {"of": "scores"}],
    ids=["the sum of columns", "the sum of something else", "the maximum of something else"],
)
def test_what_only_looks_like_its_definition_stays(changed):
    model, report = fused(form_model(opened(**changed)))
    assert not report.fused
    assert sum(node.op_type == "Exp" for node in model.graph) == 1


def test_without_the_maximum_it_stays():
    """A row of which all logits are finite and low is divided by zero there."""
    plain = "  e = Exp(logits)\n  total = ReduceSum<keepdims=1>(e, last)\n  p = Div(e, total)\n"
    _, report = fused(form_model(Form(softmax=plain)))
    (miss,) = report.declined
    assert "by hand, with Exp and a sum" in miss.reason


def test_a_guard_may_test_the_probabilities_in_a_narrow_type():
    _, report = fused(form_model(Form(softmax=GUARD.format(tested="raw"))))
    assert len(report.fused) == 1 and report.fused[0].note == ""


def test_a_guard_that_tests_something_else_is_none():
    """Where(IsNaN(logits), 0, p) hides weights of logits that are NaN, and nothing else in their rows."""
    _, report = fused(form_model(Form(softmax=GUARD.format(tested="logits"))))
    assert not report.fused


def test_casts_between_the_operators_of_a_norm():
    spelling = Spelling(q_norm=CAST_NORM, k_norm=CAST_NORM, dtype="float16", constants=TWO)
    _, report = fused(attention_model(spelling))
    (attention,) = report.fused
    assert attention.note == "" and attention.spec.norm.q_kind == "rms"


def test_a_node_is_called_as_no_other():
    """onnxruntime loads no file with two nodes of one name; casts that it inserts are called as values of others."""
    model = form_model(Form())
    product = next(node for node in model.graph if node.outputs[0].name == "o")
    product.name = "weighed"
    projection = next(node for node in model.graph if node.outputs[0].name == "v_split")
    projection.name = "o"
    fused_model, report = fused(model)
    (attention,) = report.fused
    names = [node.name for node in fused_model.graph if node.name]
    assert len(names) == len(set(names))
    assert attention.name in names and attention.name != "o"


@pytest.mark.parametrize("named", ["o", "weighed"])
def test_the_name_of_what_is_replaced_is_free(named):
    model = form_model(Form(prepare=RMS))
    next(node for node in model.graph if node.outputs[0].name == "o").name = named
    _, report = fused(model)
    assert [attention.name for attention in report.fused] == ["o"]


MOVED = """
  {n}_length = ReduceL2<keepdims=1>({of}_split, last)
  {n}_turned = Transpose<perm=[0, 2, 1, 3]>({n}_length)
  {n}_least = Clip({n}_turned, eps)
  {y} = Div({x}, {n}_least)
"""
NARROW_NORM = """
  {n}_16 = Cast<to=10>({x})
  {n}_w16 = Cast<to=10>({n}_gain)
  {n}_normed = LayerNormalization<axis=-1>({n}_16, {n}_w16)
  {y} = Cast<to=1>({n}_normed)
"""


def test_a_transpose_behind_the_reduction_of_a_norm():
    """Only one of the two readers of x has it in the order of the heads."""
    model, report = fused(form_model(Form(prepare=MOVED.replace("{of}", "{n}"))))
    (attention,) = report.fused
    assert attention.note == "" and attention.spec.norm.q_kind == "l2"
    assert not any(node.op_type == "ReduceL2" for node in model.graph)


def test_the_length_of_another_tensor_is_no_norm():
    _, report = fused(form_model(Form(prepare=MOVED.replace("{of}", "v"))))
    assert not report.fused


# A float16 model on a provider without products in float16: widened in front of each, rounded behind it.
HALF_PROJECTION = """
  {n}_half = Cast<to=10>({x})
  {n}_wide = Cast<to=1>({n}_half)
  {y} = MatMul({n}_wide, {n}_projection)
"""
PROJECTIONS = tuple((f"{side}_projection", np.linspace(-1, 1, 64 * 64).reshape(64, 64) % 0.37) for side in "qk")


def test_a_half_model_may_round_in_front_of_its_norm():
    _, report = fused(form_model(Form(prepare=NARROW_NORM, project=HALF_PROJECTION, weights=PROJECTIONS)))
    (attention,) = report.fused
    assert attention.note == "" and attention.spec.norm.q_kind == "layer"


def test_a_wide_model_that_rounds_there_is_declined():
    wide = HALF_PROJECTION.replace("Cast<to=10>", "Identity").replace("Cast<to=1>", "Identity")
    _, report = fused(form_model(Form(prepare=NARROW_NORM, project=wide, weights=PROJECTIONS)))
    (miss,) = report.declined
    assert "rounded to a narrower type" in miss.reason


WINDOWS = {
    "plain": {},
    "patches": {"strides": [4, 4]},
    "padded": {"strides": [2, 2], "pads": [1, 0, 2, 1]},
    "dilated": {"dilations": [2, 3]},
    "same": {"strides": [3, 2], "auto_pad": "SAME_UPPER"},
    "valid": {"strides": [3, 2], "auto_pad": "VALID"},
}


@pytest.mark.parametrize("operator", ["Conv", "MaxPool"])
@pytest.mark.parametrize("name", WINDOWS)
def test_convolutions_in_blocks_have_the_shapes_of_plain_ones(name, operator):
    weights = ["w"] if operator == "Conv" else []
    attributes = WINDOWS[name] | {"kernel_shape": [4, 3]}
    node = onnx.helper.make_node(operator, ["x", *weights], ["y"], **attributes)
    shapes = {"x": ["batch", 3, 17, 23], "w": [8, 3, 4, 3]}
    given = [onnx.helper.make_tensor_value_info(key, onnx.TensorProto.FLOAT, shapes[key]) for key in ("x", *weights)]
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "g", given, [result]), opset_imports=[onnx.helper.make_opsetid("", 20)]
    )
    inferred = onnx.shape_inference.infer_shapes(model).graph.output[0].type.tensor_type.shape
    (blocked,) = ir.from_proto(model).graph
    blocked.domain = NCHWC
    assert nchwc_results(blocked) is not None
    ((dtype, dims),) = nchwc_results(blocked)
    assert dtype == ir.DataType.FLOAT
    assert [str(dim) for dim in dims] == [dim.dim_param or str(dim.dim_value) for dim in inferred.dim]


def test_channels_leave_their_blocks():
    x = ir.Value(name="x", shape=ir.Shape(["batch", 16, 5, 7]), type=ir.TensorType(ir.DataType.FLOAT))
    for last, wanted in ((0, ["batch", "11", "5", "7"]), (1, ["batch", "5", "7", "11"])):
        attributes = [ir.AttrInt64("channels", 11), ir.AttrInt64("channels_last", last)]
        ((_, dims),) = nchwc_results(ir.Node(NCHWC, "ReorderOutput", [x], attributes))
        assert [str(dim) for dim in dims] == wanted
