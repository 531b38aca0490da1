"""Scale, masks, soft cap, sinks, repeated heads and layouts around the norms."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from qknorm_onnx.graph.passes.attach_bodies import AttachBodiesPass
from tests.graph.attention_text import NO_MASK, REPEAT, RMS, SCORES, Spelling, attention_model, fused, run

IDENTITY = "{y} = Identity({x})\n"
CAUSAL = """
  rows = Range(zero0, seq0, one0)
  rows1 = Unsqueeze(rows, one1)
  columns1 = Unsqueeze(rows, zero1)
  seen = LessOrEqual(columns1, rows1)
  hidden = Not(seen)
"""
POSITIONS = """
  zero0 = Constant<value = int64 {0}>()
  one0 = Constant<value = int64 {1}>()
  seq0 = Squeeze(seq1)
  minus_inf_f = Constant<value = float {-1.0}>()
  nothing_f = Constant<value = float {0.0}>()
  minus_inf = Div(minus_inf_f, nothing_f)
  lowest = Constant<value = float {-3.4028234663852886e38}>()
"""


def only(model):
    attentions = [node for node in model.graph if node.op_type == "QKNormAttention"]
    assert len(attentions) == 1
    return attentions[0]


def check(spelling):
    model, report = fused(attention_model(spelling))
    assert not report.declined and not report.refused
    (attention,) = report.fused
    assert attention.note == ""
    assert not any(node.op_type in ("Softmax", "MatMul") for node in model.graph)
    return model, attention.spec


def test_two_square_roots_make_one_scale():
    root = "  {y} = Mul({x}, quarter_root)\n"
    constant = "  quarter_root = Constant<value = float {0.5946035575}>()\n"
    scores = "  logits = MatMul({q}, {k})\n"
    _, spec = check(Spelling(q_factor=root, k_factor=root, constants=constant, scores=scores))
    assert math.isclose(spec.attention.scale, 8**-0.5, rel_tol=1e-7)


def test_divided_logits():
    _, spec = check(Spelling(scores=SCORES.replace("Mul(scores, scale)", "Div(scores, root_size)")))
    assert math.isclose(spec.attention.scale, 8**-0.5, rel_tol=1e-6)


def test_no_scale_is_one():
    _, spec = check(Spelling(scores="  logits = MatMul({q}, {k})\n"))
    assert spec.attention.scale == 1.0


def test_temperature_of_each_head_on_the_logits():
    model, spec = check(Spelling(scores=SCORES.replace("Mul(scores, scale)", "Mul(q_factor, scores)")))
    assert spec.attention.scale == 1.0
    assert only(model).inputs[7].name == "q_factor"


@pytest.mark.parametrize("operator", ["Mul", "Div"])
def test_temperature_of_each_head_on_q(operator):
    model, _ = check(Spelling(q_factor="  {y} = " + operator + "({x}, q_factor)\n"))
    assert list(only(model).inputs[7].shape)[-3:] == [6, 1, 1]


def test_temperature_that_is_fed():
    factor = "  {y} = Mul({x}, tau)\n"
    model, _ = check(Spelling(q_factor=factor, extra_inputs=", float[6,1,1] tau"))
    assert only(model).inputs[7].name == "tau"


def test_temperature_of_each_key_head():
    model, _ = check(Spelling(k_factor="  {y} = Mul({x}, k_factor)\n"))
    assert list(only(model).inputs[4].shape) == [2, 8]  # the weight of the key norm, times the factor of its head


def test_factor_of_each_position():
    factor = "  {y} = Mul({x}, by_position)\n"
    model, _ = check(Spelling(q_factor=factor, extra_inputs=", float[batch,1,seq,1] by_position"))
    assert only(model).inputs[7].name == "by_position"


def test_factor_of_each_value_behind_the_rotary_embedding():
    model, _ = check(Spelling(q_factor="  {y} = Mul({x}, q_bias)\n"))
    assert only(model).inputs[7].name == "q_bias"


def test_soft_cap():
    scores = SCORES + "  d = Div(logits, tiny_cap)\n  t = Tanh(d)\n  capped = Mul(t, tiny_cap)\n"
    constants = "  tiny_cap = Constant<value = float {5.0}>()\n"
    _, spec = check(Spelling(scores=scores, mask=NO_MASK.replace("logits", "capped"), constants=constants))
    assert spec.attention.softcap == 5.0


def test_clamp():
    constants = "  high = Constant<value = float {0.5}>()\n  low = Constant<value = float {-0.5}>()\n"
    mask = "  masked = Clip(logits, low, high)\n"
    _, spec = check(Spelling(mask=mask, constants=constants))
    assert spec.attention.logit_clamp == 0.5


@pytest.mark.parametrize("fill", ["lowest", "minus_inf"])
@pytest.mark.parametrize("spelling", ["where hidden", "where seen", "added"])
def test_causal_mask(fill, spelling):
    mask = {
        "where hidden": f"  masked = Where(hidden, {fill}, logits)\n",
        "where seen": f"  masked = Where(seen, logits, {fill})\n",
        "added": f"  bias = Where(seen, nothing_f, {fill})\n  masked = Add(bias, logits)\n",
    }[spelling]
    model, spec = check(Spelling(mask=CAUSAL + mask, constants=POSITIONS))
    assert spec.attention.is_causal
    assert len(only(model).inputs) <= 10 or only(model).inputs[10] is None
    assert not any(node.op_type in ("Range", "LessOrEqual") for node in model.graph)


def test_mask_that_is_fed():
    mask = "  masked = Add(logits, bias_in)\n"
    model, _ = check(Spelling(mask=mask, extra_inputs=", float[batch,1,seq,seq] bias_in"))
    assert only(model).inputs[10].name == "bias_in"


def test_padding_that_is_fed_keeps_its_finite_fill():
    # a row of nothing but padding is the mean of all values there, not zeros: the fill value must survive
    mask = "  seen4 = Unsqueeze(seen_in, one_two)\n  masked = Where(seen4, logits, lowest)\n"
    constants = POSITIONS + "  one_two = Constant<value = int64[2] {1, 2}>()\n"
    model, _ = check(Spelling(mask=mask, constants=constants, extra_inputs=", bool[batch,seq] seen_in"))
    assert only(model).inputs[10].dtype.name == "FLOAT"


def test_causal_mask_and_bias():
    mask = CAUSAL + "  biased = Add(logits, bias_in)\n  masked = Where(hidden, lowest, biased)\n"
    model, spec = check(Spelling(mask=mask, constants=POSITIONS, extra_inputs=", float[1,6,seq,seq] bias_in"))
    assert spec.attention.is_causal and only(model).inputs[10].name == "bias_in"


def test_sinks():
    mask = """
  sink_dims = Concat<axis=0>(batch1, heads1, seq1, one1)
  column = Expand(sinks, sink_dims)
  masked = Concat<axis=-1>(logits, column)
"""
    softmax = "  p1 = Softmax<axis=-1>(masked)\n  p = Slice(p1, zero1, minus1, minus1)\n"
    model, _ = check(Spelling(mask=mask, softmax=softmax))
    assert list(only(model).inputs[11].shape) == [6]


def test_guard_against_rows_without_keys():
    softmax = "  p1 = Softmax<axis=-1>(masked)\n  bad = IsNaN(p1)\n  p = Where(bad, nothing_f, p1)\n"
    check(Spelling(softmax=softmax, constants=POSITIONS))


def test_softmax_in_a_wider_type():
    softmax = "  m1 = Cast<to=1>(masked)\n  p1 = Softmax<axis=-1>(m1)\n  p = Cast<to=10>(p1)\n"
    _, report = fused(attention_model(Spelling(softmax=softmax, dtype="float16")))
    assert report.fused[0].note == ""


def test_optimizer_of_torch_transposes_keys_in_three_axes():
    scores = """
  k_shape = Shape(k_all)
  three = Concat<axis=0>(minus1, seq1, size1)
  k3 = Reshape(k_all, three)
  k3t = Transpose<perm=[0, 2, 1]>(k3)
  four = Concat<axis=0>(batch1, heads1, size1, seq1)
  k4 = Reshape(k3t, four)
  scores = MatMul({q}, k4)
  logits = Mul(scores, scale)
"""
    check(Spelling(scores=scores))


@pytest.mark.parametrize("shape", ["[1,1,3,1,1]", "dynamic"])
def test_repeated_heads(shape):
    repeat = REPEAT
    if shape != "dynamic":
        repeat = REPEAT.replace("{n}_dims = Concat<axis=0>(batch1, kv1, group1, seq1, size1)", "{n}_dims = Identity(copies)")
    constants = "  copies = Constant<value = int64[5] {1, 1, 3, 1, 1}>()\n"
    _, spec = check(Spelling(repeat=repeat, constants=constants))
    assert (spec.attention.q_num_heads, spec.attention.kv_num_heads) == (6, 2)


def test_tiled_heads_are_another_attention():
    tile = REPEAT.replace("two1", "one1").replace("(batch1, kv1, group1, seq1, size1)", "(batch1, group1, kv1, seq1, size1)")
    _, report = fused(attention_model(Spelling(repeat=tile)))
    assert not report.refused
    if report.fused:  # then with the repeat outside, as keys of six heads of their own
        assert report.fused[0].note == "" and report.fused[0].spec.attention.kv_num_heads == 6
    else:
        assert report.declined


def test_output_that_is_not_merged():
    tail = "  o_other = Add(o, o)\n"
    _, report = fused(attention_model(Spelling(tail=tail, extra_outputs=", float[batch,6,seq,8] o_other")))
    assert report.fused[0].note == ""


def test_probabilities_that_are_an_output_decline():
    model, report = fused(attention_model(Spelling(extra_outputs=", float[batch,6,seq,seq] p")))
    assert not report.fused and [node.op_type for node in model.graph].count("Softmax") == 1
    assert "probabilities" in report.declined[0].reason


def test_normed_keys_that_are_an_output_stay_right():
    model, report = fused(attention_model(Spelling(extra_outputs=", float[batch,2,seq,8] k_rot")))
    assert report.fused and report.fused[0].note == ""
    assert model.graph.outputs[1].name == "k_rot"


def test_readers_of_shapes_do_not_keep_the_old_nodes():
    tail = "  k_shape = Shape(k_all)\n  probabilities_shape = Shape<start=1, end=4>(p)\n"
    outputs = ", int64[4] k_shape, int64[3] probabilities_shape"
    model, report = fused(attention_model(Spelling(tail=tail, extra_outputs=outputs)))
    assert report.fused[0].note == ""
    assert not any(node.op_type in ("Softmax", "ReduceMean", "Expand") for node in model.graph)
    feeds = {"q_in": (3, 5, 48), "k_in": (3, 5, 16), "v_in": (3, 5, 16), "angles": (5, 4)}
    outputs = run(model, {name: np.ones(shape, np.float32) for name, shape in feeds.items()})
    assert outputs[1].tolist() == [3, 6, 5, 8] and outputs[2].tolist() == [6, 5, 5]


def test_second_run_changes_nothing():
    model, first = fused(attention_model(Spelling()))
    before = [(node.op_type, [value.name if value else None for value in node.inputs]) for node in model.graph]
    AttachBodiesPass()(model)
    again, second = fused(model)
    assert [(node.op_type, [value.name if value else None for value in node.inputs]) for node in again.graph] == before
    assert [item.spec for item in second.fused] == [item.spec for item in first.fused]


def test_two_runs_are_equal():
    texts = [str(fused(attention_model(Spelling()))[0].graph) for _ in range(2)]
    assert texts[0] == texts[1]


def test_fusing_a_fused_file_gives_the_same_bytes():
    def bytes_of(model):
        result, report = fused(model, prove=False)
        AttachBodiesPass()(result)
        assert len(report.fused) == 1
        return ir.to_proto(result).SerializeToString(deterministic=True)

    first = bytes_of(attention_model(Spelling()))
    assert bytes_of(ir.from_proto(onnx.load_from_string(first))) == first


def test_overridable_weight_stays_an_input():
    norm = RMS.replace("{w}", "gain")
    model, _ = check(Spelling(q_norm=norm, k_norm=norm, extra_inputs=", float[8] gain"))
    assert [only(model).inputs[index].name for index in (3, 4)] == ["gain", "gain"]
