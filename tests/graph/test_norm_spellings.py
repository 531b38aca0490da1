"""Each spelling of a norm on q and k is read as what it is, and the rewrite is proven."""

from __future__ import annotations

import math

import pytest

from qknorm_onnx.graph.canonical.qk_norm_node import is_rotary_node
from qknorm_onnx.spec.qk_norm_spec import NormSpec, round_to_float32
from tests.graph.attention_text import HEAD_SIZE, RMS, Spelling, attention_model, fused

MEAN = "  {n}_sq = Pow({x}, two)\n  {n}_mean = ReduceMean<keepdims=1>({n}_sq, last)\n"
SUM = "  {n}_sq = Mul({x}, {x})\n  {n}_sum = ReduceSum<keepdims=1>({n}_sq, last)\n"
CENTRED = "  {n}_mu = ReduceMean<keepdims=1>({x}, last)\n  {n}_c = Sub({x}, {n}_mu)\n"
L2 = "  {n}_l = ReduceL2<keepdims=1>({x}, last)\n"
SHAPE = "  {n}_shape = Shape({x})\n"
EPS = 1e-3

SPELLINGS = {
    "reciprocal of root": (RMS, NormSpec(q_kind="rms", k_kind="rms")),
    "weight on the left": (RMS.replace("Mul({n}_hat, {w})", "Mul({w}, {n}_hat)"), NormSpec(q_kind="rms", k_kind="rms")),
    "no weight": (RMS.replace("Mul({n}_hat, {w})", "Identity({n}_hat)"), NormSpec(q_kind="rms", k_kind="rms")),
    "power of minus a half": (
        MEAN
        + "  {n}_e = Add(eps, {n}_mean)\n  {n}_i = Pow({n}_e, minus_half)\n  {n}_h = Mul({n}_i, {x})\n  {y} = Mul({n}_h, {w})\n",
        NormSpec(q_kind="rms", k_kind="rms"),
    ),
    "divided by root": (
        MEAN + "  {n}_e = Add({n}_mean, eps)\n  {n}_r = Sqrt({n}_e)\n  {n}_h = Div({x}, {n}_r)\n  {y} = Mul({n}_h, {w})\n",
        NormSpec(q_kind="rms", k_kind="rms"),
    ),
    "one over root": (
        MEAN + "  {n}_e = Add({n}_mean, eps)\n  {n}_r = Sqrt({n}_e)\n  {n}_i = Div(one, {n}_r)\n  {y} = Mul({x}, {n}_i)\n",
        NormSpec(q_kind="rms", k_kind="rms"),
    ),
    "sum over count": (
        SUM + "  {n}_m = Div({n}_sum, count)\n  {n}_e = Add({n}_m, eps)\n  {n}_r = Sqrt({n}_e)\n  {y} = Div({x}, {n}_r)\n",
        NormSpec(q_kind="rms", k_kind="rms"),
    ),
    "epsilon outside of the root": (
        MEAN + "  {n}_r = Sqrt({n}_mean)\n  {n}_e = Add({n}_r, eps)\n  {n}_h = Div({x}, {n}_e)\n  {y} = Mul({n}_h, {w})\n",
        NormSpec(q_kind="rms", k_kind="rms", epsilon_mode="outside_sqrt"),
    ),
    "root clamped from below": (
        MEAN + "  {n}_r = Sqrt({n}_mean)\n  {n}_e = Max({n}_r, eps)\n  {y} = Div({x}, {n}_e)\n",
        NormSpec(q_kind="rms", k_kind="rms", epsilon_mode="clamp"),
    ),
    "L2 as torch writes it": (
        SHAPE
        + "  {n}_l = ReduceL2<keepdims=1>({x}, last)\n  {n}_c = Clip({n}_l, eps)\n"
        + "  {n}_b = Expand({n}_c, {n}_shape)\n  {y} = Div({x}, {n}_b)\n",
        NormSpec(q_kind="l2", k_kind="l2", epsilon_mode="clamp"),
    ),
    "L2 of a clamped square": (
        SUM + "  {n}_c = Clip({n}_sum, square)\n  {n}_i = Pow({n}_c, minus_half)\n  {y} = Mul({x}, {n}_i)\n",
        NormSpec(q_kind="l2", k_kind="l2", epsilon_mode="clamp"),
    ),
    "L2 plus epsilon": (
        L2 + "  {n}_e = Add({n}_l, eps)\n  {n}_h = Div({x}, {n}_e)\n  {y} = Mul({n}_h, {w})\n",
        NormSpec(q_kind="l2", k_kind="l2", epsilon_mode="outside_sqrt"),
    ),
    "L2 over the root of the count, plus epsilon": (
        L2 + "  {n}_r = Mul({n}_l, root)\n  {n}_e = Add({n}_r, eps)\n  {n}_h = Div({x}, {n}_e)\n  {y} = Mul({n}_h, {w})\n",
        NormSpec(q_kind="rms", k_kind="rms", epsilon_mode="outside_sqrt"),
    ),
    "L2 over the root of the count, clamped": (
        L2 + "  {n}_r = Div({n}_l, root_of_count)\n  {n}_e = Max({n}_r, eps)\n  {y} = Div({x}, {n}_e)\n",
        NormSpec(q_kind="rms", k_kind="rms", epsilon_mode="clamp"),
    ),
    "L2 plus epsilon, times a number": (
        L2 + "  {n}_e = Add({n}_l, eps)\n  {n}_d = Mul({n}_e, two)\n  {n}_h = Div({x}, {n}_d)\n  {y} = Mul({n}_h, {w})\n",
        NormSpec(q_kind="l2", k_kind="l2", epsilon_mode="outside_sqrt"),
    ),
    "LayerNormalization with bias": (
        "  {y} = LayerNormalization<axis=-1, epsilon=0.001>({x}, {w}, q_bias)\n",
        NormSpec(q_kind="layer", k_kind="layer"),
    ),
    "LayerNormalization without bias, axis from the front": (
        "  {y} = LayerNormalization<axis=3, epsilon=0.001>({x}, {w})\n",
        NormSpec(q_kind="layer", k_kind="layer"),
    ),
    "LayerNormalization with an invented weight": (
        "  {y} = LayerNormalization<axis=-1, epsilon=0.001>({x}, ones, zeros)\n",
        NormSpec(q_kind="layer", k_kind="layer"),
    ),
    "LayerNorm by hand": (
        CENTRED + RMS.replace("{x}", "{n}_c"),
        NormSpec(q_kind="layer", k_kind="layer"),
    ),
    "two weights and a number": (
        RMS.replace(
            "{y} = Mul({n}_hat, {w})", "{n}_w = Mul({n}_hat, {w})\n  {n}_v = Mul({n}_w, k_bias)\n  {y} = Mul({n}_v, two)"
        ),
        NormSpec(q_kind="rms", k_kind="rms"),
    ),
}
EXTRA = """
  minus_half = Constant<value = float {-0.5}>()
  one = Constant<value = float {1.0}>()
  count = Constant<value = float {8.0}>()
  root = Constant<value = float {0.35355339}>()
  root_of_count = Constant<value = float {2.82842712}>()
  seven = Constant<value = float {7.0}>()
  square = Constant<value = float {0.000001}>()
"""


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling_is_read_and_proven(name):
    text, expected = SPELLINGS[name]
    _, report = fused(attention_model(Spelling(q_norm=text, k_norm=text, constants=EXTRA)))
    assert not report.declined and not report.refused
    (attention,) = report.fused
    assert attention.note == ""
    norm = attention.spec.norm
    assert (norm.q_kind, norm.k_kind, norm.epsilon_mode) == (expected.q_kind, expected.k_kind, expected.epsilon_mode)
    assert math.isclose(norm.q_epsilon, EPS, rel_tol=1e-6) and math.isclose(norm.k_epsilon, EPS, rel_tol=1e-6)


@pytest.mark.parametrize("rotary_first", [False, True])
def test_root_of_sum_and_epsilon_is_rms(rotary_first):
    text = SUM + "  {n}_e = Add({n}_sum, eps)\n  {n}_r = Sqrt({n}_e)\n  {n}_i = Reciprocal({n}_r)\n  {y} = Mul({x}, {n}_i)\n"
    model, report = fused(attention_model(Spelling(q_norm=text, k_norm=text, rotary_first=rotary_first)))
    (attention,) = report.fused
    assert attention.note == ""
    assert attention.spec.norm.q_kind == "rms"
    assert attention.spec.norm.q_epsilon == round_to_float32(round_to_float32(EPS) / HEAD_SIZE)
    node = next(node for node in model.graph if node.op_type == "QKNormAttention")
    weight = node.inputs[3].const_value.numpy()
    assert weight.shape == (HEAD_SIZE,) and weight == pytest.approx(HEAD_SIZE**-0.5)


CENTRED_SQUARES = CENTRED + "  {n}_sq = Mul({n}_c, {n}_c)\n"
VARIANCE = CENTRED_SQUARES + "  {n}_flat = ReduceMean<keepdims=0>({n}_sq, last)\n  {n}_v = Unsqueeze({n}_flat, last)\n"
SAMPLE = CENTRED_SQUARES + "  {n}_sum = ReduceSum<keepdims=1>({n}_sq, last)\n  {n}_v = Div({n}_sum, seven)\n"
INSIDE = "  {n}_e = Add({n}_v, eps)\n  {n}_r = Sqrt({n}_e)\n  {n}_h = Div({n}_c, {n}_r)\n  {y} = Mul({n}_h, {w})\n"
OUTSIDE = "  {n}_s = Sqrt({n}_v)\n  {n}_r = Add({n}_s, eps)\n  {n}_g = Mul({w}, {n}_c)\n  {y} = Div({n}_g, {n}_r)\n"
RATIO = (HEAD_SIZE - 1) / HEAD_SIZE
VARIANCES = {
    "variance without its axis": (VARIANCE + INSIDE, 1.0),
    "mean of squares minus square of mean": (
        CENTRED + MEAN + "  {n}_m2 = Mul({n}_mu, {n}_mu)\n  {n}_v = Sub({n}_mean, {n}_m2)\n" + INSIDE,
        1.0,
    ),
    "unbiased variance": (SAMPLE + INSIDE, RATIO),
    "unbiased variance, from the mean": (
        CENTRED_SQUARES
        + "  {n}_mean = ReduceMean<keepdims=1>({n}_sq, last)\n  {n}_x = Mul({n}_mean, count)\n  {n}_v = Div({n}_x, seven)\n"
        + INSIDE,
        RATIO,
    ),
    "standard deviation of a sample, weight first": (SAMPLE + OUTSIDE, math.sqrt(RATIO)),
    "mean from a sum": (
        VARIANCE.replace(
            "{n}_mu = ReduceMean<keepdims=1>({x}, last)", "{n}_tot = ReduceSum({x}, last)\n  {n}_mu = Div({n}_tot, count)"
        )
        + INSIDE,
        1.0,
    ),
}


@pytest.mark.parametrize("name", VARIANCES)
def test_layer_norm_from_a_variance(name):
    """An unbiased variance is D / (D - 1) of the other: another epsilon and a factor of the weight, exactly."""
    text, ratio = VARIANCES[name]
    _, report = fused(attention_model(Spelling(q_norm=text, k_norm=text, constants=EXTRA)))
    assert not report.declined and not report.refused
    (attention,) = report.fused
    norm = attention.spec.norm
    assert attention.note == "" and (norm.q_kind, norm.k_kind) == ("layer", "layer")
    assert norm.epsilon_mode == ("outside_sqrt" if "weight first" in name else "inside_sqrt")
    assert math.isclose(norm.q_epsilon, EPS * ratio, rel_tol=1e-6)


@pytest.mark.parametrize(
    "text",
    [
        CENTRED_SQUARES + "  {n}_v = ReduceMean<keepdims=1>({n}_sq, last)\n" + INSIDE.replace("Div({n}_c,", "Div({x},"),
        MEAN.replace("_mean", "_v") + CENTRED + INSIDE,
    ],
)
def test_centred_on_one_side_only_is_no_norm(text):
    model, report = fused(attention_model(Spelling(q_norm=text, k_norm=text, constants=EXTRA)))
    assert not report.fused and not any(node.op_type == "QKNormAttention" for node in model.graph)
    assert report.declined and report.declined[0].hint


def test_weights_of_one_and_biases_of_zero_are_dropped():
    text = "  {y} = LayerNormalization<axis=-1, epsilon=0.001>({x}, ones, zeros)\n"
    model, _ = fused(attention_model(Spelling(q_norm=text, k_norm=text)))
    node = next(node for node in model.graph if node.op_type == "QKNormAttention")
    assert all(node.inputs[index] is None for index in (3, 4, 5, 6))


def test_number_in_front_of_a_bias_belongs_to_the_weight():
    text = RMS.replace("{y} = Mul({n}_hat, {w})", "{n}_w = Mul({n}_hat, two)\n  {y} = Add({n}_w, {n}_bias)")
    _, report = fused(attention_model(Spelling(q_norm=text, k_norm=text)))
    assert report.fused[0].note == "" and math.isclose(report.fused[0].spec.attention.scale, 8**-0.5, rel_tol=1e-6)


def test_number_behind_a_bias_belongs_to_the_scale():
    steps = "{n}_w = Mul({n}_hat, {w})\n  {n}_b = Add({n}_w, {n}_bias)\n  {y} = Mul({n}_b, two)"
    text = RMS.replace("{y} = Mul({n}_hat, {w})", steps)
    _, report = fused(attention_model(Spelling(q_norm=text, k_norm=text)))
    assert report.fused[0].note == "" and math.isclose(report.fused[0].spec.attention.scale, 4 * 8**-0.5, rel_tol=1e-6)


def test_weight_per_head_keeps_its_heads():
    norms = [RMS.replace("{w}", f"{side}_head_weight") for side in "qk"]
    model, report = fused(attention_model(Spelling(q_norm=norms[0], k_norm=norms[1])))
    assert report.fused[0].note == ""
    node = next(node for node in model.graph if node.op_type == "QKNormAttention")
    assert [list(node.inputs[index].shape) for index in (3, 4)] == [[6, 8], [2, 8]]


def test_norm_over_all_heads_before_the_split():
    text = RMS.replace("{n}", "{n}h")
    model, report = fused(attention_model(Spelling(q_norm=NONE, k_norm=NONE, before_split=text)))
    (attention,) = report.fused
    assert attention.note == "" and attention.spec.norm.axis == "hidden"
    # the values are normalised by the model itself: that norm stays where it is
    assert [node.op_type for node in model.graph].count("ReduceMean") == 1


NONE = "{y} = Identity({x})\n"


@pytest.mark.parametrize(("q_norm", "k_norm", "kinds"), [(RMS, NONE, ("rms", "none")), (NONE, RMS, ("none", "rms"))])
def test_one_side_only(q_norm, k_norm, kinds):
    _, report = fused(attention_model(Spelling(q_norm=q_norm, k_norm=k_norm)))
    (attention,) = report.fused
    assert attention.note == ""
    assert (attention.spec.norm.q_kind, attention.spec.norm.k_kind) == kinds


def test_different_norms_are_prepared_apart():
    layer = "  {y} = LayerNormalization<axis=-1, epsilon=0.001>({x}, {w}, {n}_bias)\n"
    l2 = "  {n}_l = ReduceL2<keepdims=1>({x}, last)\n  {n}_c = Clip({n}_l, eps)\n  {y} = Div({x}, {n}_c)\n"
    model, report = fused(attention_model(Spelling(q_norm=layer, k_norm=l2)))
    (attention,) = report.fused
    assert attention.note == "" and not attention.spec.has_norm
    assert sum(is_rotary_node(node) for node in model.graph) == 2


def test_rms_normalization_operator():
    text = "  {y} = RMSNormalization<axis=-1, epsilon=0.001>({x}, {w})\n"
    _, report = fused(attention_model(Spelling(q_norm=text, k_norm=text, opset=23)))
    assert report.fused[0].note == "" and report.fused[0].spec.norm.q_kind == "rms"


def test_rms_normalization_of_centred_values_is_layer_norm():
    text = CENTRED + "  {y} = RMSNormalization<axis=-1, epsilon=0.001>({n}_c, {w})\n"
    _, report = fused(attention_model(Spelling(q_norm=text, k_norm=text, opset=23)))
    assert report.fused[0].note == "" and report.fused[0].spec.norm.q_kind == "layer"


@pytest.mark.parametrize("order", ["before_cast", "after_cast"])
def test_half_precision_shows_where_the_weight_multiplies(order):
    up = "  {n}_up = Cast<to=1>({x})\n"
    core = RMS.replace("{x}", "{n}_up").replace("_mean, eps)", "_mean, eps32)").replace(", two)", ", two32)")
    tail = "  {n}_w32 = Cast<to=1>({w})\n  {n}_g = Mul({n}_hat, {n}_w32)\n  {y} = Cast<to=10>({n}_g)\n"
    if order == "after_cast":
        tail = "  {n}_down = Cast<to=10>({n}_hat)\n  {y} = Mul({n}_down, {w})\n"
    text = up + core.replace("  {y} = Mul({n}_hat, {w})\n", tail)
    constants = "  eps32 = Constant<value = float {0.001}>()\n  two32 = Constant<value = float {2.0}>()\n"
    _, report = fused(attention_model(Spelling(q_norm=text, k_norm=text, dtype="float16", constants=constants)))
    (attention,) = report.fused
    assert attention.note == ""
    assert attention.spec.norm.weight_order == order
