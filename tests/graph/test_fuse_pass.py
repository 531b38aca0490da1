"""The pass itself: what it keeps, refuses and reports, and that a wrong rewrite cannot get through."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest

import qknorm_onnx as qk
from qknorm_onnx.graph.passes import fuse as fuse_module
from qknorm_onnx.graph.passes.fuse import FuseQKNormPass
from qknorm_onnx.graph.passes.prepare import PreparePass
from qknorm_onnx.graph.rewrite.prover import Proof
from qknorm_onnx.graph.rewrite.replacement import build_replacement
from tests.graph.attention_text import HALVES, NO_ROTARY, RMS, SCORES, Spelling, attention_model, fused, run

IDENTITY = "{y} = Identity({x})\n"
FEEDS = {"q_in": (3, 5, 48), "k_in": (3, 5, 16), "v_in": (3, 5, 16), "angles": (5, 4)}


class Verdict:
    """A prover that says always the same."""

    def __init__(self, verdict):
        self.verdict = verdict

    def prove(self, old, new):
        assert [value.name for value in old.graph.inputs] == [value.name for value in new.graph.inputs]
        assert [value.name for value in old.graph.outputs] == [value.name for value in new.graph.outputs]
        return Proof(verdict=self.verdict, max_difference=0.5, reason="because")


def listing(model):
    return [(node.op_type, [value.name if value is not None else "" for value in node.inputs]) for node in model.graph]


def prepared(spelling):
    model = attention_model(spelling)
    PreparePass()(model)
    return model


def test_refused_rewrite_leaves_the_graph_as_it_was():
    model = prepared(Spelling())
    before = listing(model)
    fuse = FuseQKNormPass(Verdict("refused"))
    result = fuse(model)
    assert listing(model) == before and not result.modified
    (refused,) = fuse.report.refused
    assert (refused.reason, refused.max_difference) == ("because", 0.5)
    assert not fuse.report.fused and not fuse.report.complete


def test_unverified_rewrite_is_kept_and_says_so():
    fuse = FuseQKNormPass(Verdict("unverified"))
    fuse(prepared(Spelling()))
    assert "because" in fuse.report.fused[0].note and "unverified" in fuse.report.fused[0].note


MUTANTS = {
    "scale": lambda spec: replace_part(spec, "attention", scale=spec.attention.scale * 1.01),
    "causal": lambda spec: replace_part(spec, "attention", is_causal=True),
    "window": lambda spec: replace_part(spec, "attention", left_window_size=2),
    "soft cap": lambda spec: replace_part(spec, "attention", softcap=2.0),
    "epsilon": lambda spec: replace_part(spec, "norm", q_epsilon=spec.norm.q_epsilon * 2),
    "epsilon mode": lambda spec: replace_part(spec, "norm", epsilon_mode="outside_sqrt"),
    "kind": lambda spec: replace_part(spec, "norm", k_kind="layer"),
    "order": lambda spec: replace_part(spec, "rotary", order="before_norm"),
    "pairs": lambda spec: replace_part(spec, "rotary", interleaved=True),
}


def replace_part(spec, part, **fields):
    return dataclasses.replace(spec, **{part: dataclasses.replace(getattr(spec, part), **fields)})


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_rewrite_is_refused(monkeypatch, name):
    def wrong(match):
        return build_replacement(dataclasses.replace(match, spec=MUTANTS[name](match.spec)))

    monkeypatch.setattr(fuse_module, "build_replacement", wrong)
    model, report = fused(attention_model(Spelling()))
    assert not report.fused and len(report.refused) == 1
    assert report.refused[0].max_difference > 1e-5
    assert not any(node.op_type == "QKNormAttention" for node in model.graph)


@pytest.mark.parametrize("kept", ["q", "k"])
def test_weight_of_head_0_for_all_heads_is_refused(monkeypatch, kept):
    def wrong(match):
        replacement = build_replacement(match)
        node = next(node for node in replacement.builder.nodes if node.op_type == "QKNormAttention")
        index = {"q": 3, "k": 4}[kept]
        weight = node.inputs[index].const_value.numpy()
        first = replacement.builder.constant(np.broadcast_to(weight[:1], weight.shape), "wrong")
        node.replace_input_with(index, first)
        return dataclasses.replace(replacement, boundary=tuple(v for v in replacement.boundary if v.const_value is None))

    monkeypatch.setattr(fuse_module, "build_replacement", wrong)
    norms = [RMS.replace("{w}", f"{side}_head_weight") for side in "qk"]
    _, report = fused(attention_model(Spelling(q_norm=norms[0], k_norm=norms[1])))
    assert not report.fused and len(report.refused) == 1


def test_attention_without_norms_is_plain_and_stays():
    model = prepared(Spelling(q_norm=IDENTITY, k_norm=IDENTITY))
    before = listing(model)
    fuse = FuseQKNormPass()
    fuse(model)
    assert fuse.report.plain == ("o",) and not fuse.report.declined
    assert listing(model) == before


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (RMS.replace("sq, last)", "sq, one1)"), "over the positions"),
        (RMS.replace("sq, last)", "sq, two1)"), "over the heads"),
        ("  {n}_th = Tanh({x})\n  {y} = Mul({n}_th, {w})\n", "Tanh"),
        (RMS + "  {n}_unused = Identity({y})\n", ""),
    ],
)
def test_what_is_no_norm_of_heads_declines_with_its_reason(norm, reason):
    _, report = fused(attention_model(Spelling(q_norm=norm, k_norm=norm)))
    if reason:
        assert not report.fused and reason in report.declined[0].reason and report.declined[0].node
    else:
        assert report.fused


def test_clip_between_norm_and_attention_declines():
    clip = "  {y} = Clip({x}, low)\n"
    constants = "  low = Constant<value = float {-0.5}>()\n"
    _, report = fused(attention_model(Spelling(q_factor=clip, k_factor=clip, constants=constants)))
    assert not report.fused and "clipped" in report.declined[0].reason


def test_unknown_step_between_logits_and_softmax_declines():
    scores = SCORES.replace("logits = Mul(scores, scale)", "l1 = Mul(scores, scale)\n  logits = Abs(l1)")
    _, report = fused(attention_model(Spelling(scores=scores)))
    assert not report.fused and "Abs" in report.declined[0].reason


def test_scale_behind_the_mask_declines():
    mask = "  biased = Add(logits, bias_in)\n  masked = Mul(biased, two)\n"
    _, report = fused(attention_model(Spelling(mask=mask, extra_inputs=", float[batch,1,seq,seq] bias_in")))
    assert not report.fused and "after the mask" in report.declined[0].reason


def test_softmax_of_something_else_is_no_attention():
    tail = "  gate_in = MatMul(y, gates)\n  gate = Softmax<axis=-1>(gate_in)\n"
    model = attention_model(Spelling(tail=tail, extra_inputs=", float[48,4] gates", extra_outputs=", float[batch,seq,4] gate"))
    _, report = fused(model)
    assert len(report.fused) == 1 and not report.declined and not report.plain


def test_weight_that_can_be_overridden_is_not_folded():
    norm = "  {n}_one_plus = Add(gain, one)\n" + RMS.replace("{w}", "{n}_one_plus")
    constants = "  one = Constant<value = float {1.0}>()\n"
    model = attention_model(Spelling(q_norm=norm, k_norm=norm, constants=constants, extra_inputs=", float[8] gain"))
    gain = next(value for value in model.graph.inputs if value.name == "gain")
    gain.const_value = ir.tensor(np.zeros(8, np.float32), name="gain")
    model.graph.register_initializer(gain)
    result, report = fused(model)
    assert report.fused and report.fused[0].note == ""
    generator = np.random.default_rng(0)
    feeds = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in FEEDS.items()}
    for value in (0.0, 0.7):
        feeds["gain"] = np.full(8, value, np.float32)
        assert run(result, feeds)[0] == pytest.approx(run(model, feeds)[0], abs=1e-5)


def test_attention_in_a_branch_is_fused_there():
    inner = attention_model(Spelling(rotary=NO_ROTARY))
    branch = inner.graph
    inputs = list(branch.inputs)
    other = ir.Graph([], [], nodes=[], name="other", opset_imports={"": 20})
    zero = ir.node("Sub", [inputs[0], inputs[0]])
    other.append(zero)
    zero.outputs[0].type, zero.outputs[0].shape = inputs[0].type, inputs[0].shape
    zero.outputs[0].name = "zeros_out"
    other.outputs.append(zero.outputs[0])
    branch.inputs.clear()
    condition = ir.Value(name="flag", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.BOOL))
    choice = ir.Node(
        "", "If", [condition], [ir.AttrGraph("then_branch", branch), ir.AttrGraph("else_branch", other)], num_outputs=1
    )
    choice.outputs[0].name, choice.outputs[0].type, choice.outputs[0].shape = "chosen", inputs[0].type, inputs[0].shape
    main = ir.Graph([condition, *inputs], choice.outputs, nodes=[choice], name="main", opset_imports={"": 20})
    model = ir.Model(main, ir_version=10)
    result, report = fused(model)
    assert len(report.fused) == 1 and report.fused[0].note == ""
    feeds = {value.name: np.ones(FEEDS[value.name], np.float32) for value in inputs if value.name != "angles"}
    feeds |= {"angles": np.ones(FEEDS["angles"], np.float32), "flag": np.asarray(True)}
    assert run(result, feeds)[0] == pytest.approx(run(model, feeds)[0], abs=1e-5)


def test_report_says_which_nodes_were_replaced():
    model = attention_model(Spelling(rotary=HALVES))
    for index, node in enumerate(model.graph):
        node.name = f"node{index}"
    _, report = fused(model)
    assert len(report.fused[0].source_nodes) > 30 and report.complete


def test_a_program_shows_itself_in_one_line():
    program = qk.fuse(attention_model(Spelling()), target="primitive", verify=False)
    nodes = len(list(program.model.graph))
    assert repr(program) == f"<Program: fused 1 of 1 QK-Norm attentions (primitive), {nodes} nodes, opset 20>"
    plain = qk.fuse(attention_model(Spelling(q_norm=IDENTITY, k_norm=IDENTITY)), verify=False)
    assert repr(plain).startswith("<Program: no QK-Norm attention found; 1 attention(s) without it, ")
