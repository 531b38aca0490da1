"""Attention in a form that is not known stays in the report: declined where it is normalised. Routers are no attention."""

from __future__ import annotations

import pytest

import qknorm_onnx as qk
from qknorm_onnx.errors import FusionRequiredError
from qknorm_onnx.inspection import inspect_model
from qknorm_onnx.pipeline import require_complete
from tests.graph.attention_text import NO_ROTARY, RMS, Spelling, attention_model, fused

torch = pytest.importorskip("torch")
F = torch.nn.functional


class Handwritten(torch.nn.Module):
    def __init__(self, form, *, norm):
        super().__init__()
        torch.manual_seed(0)
        self.form, self.norm = form, norm
        self.q, self.k, self.v = (torch.nn.Linear(32, 32) for _ in range(3))
        self.router = torch.nn.Linear(32, 4)
        self.weight = torch.nn.Parameter(0.5 + torch.rand(8))

    def heads(self, x, *, norm):
        x = x.unflatten(-1, (4, 8))
        return F.rms_norm(x, (8,), self.weight, 1e-6) if norm else x

    def forward(self, x):
        q, k, v = self.heads(self.q(x), norm=self.norm), self.heads(self.k(x), norm=self.norm), self.heads(self.v(x), norm=False)
        y = getattr(self, self.form)(q, k, v)
        return y.flatten(2) * self.router(x).softmax(-1).sum(-1, keepdim=True)

    def einsum(self, q, k, v):
        return torch.einsum("bhst,bthd->bshd", (torch.einsum("bshd,bthd->bhst", q, k) / 8**0.5).softmax(-1), v)

    def renormalised(self, q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        p = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1)
        p = p * (p > 0.01)
        return ((p / p.sum(-1, keepdim=True)) @ v).transpose(1, 2)

    def three_axes(self, q, k, v):
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
        y = torch.bmm((torch.bmm(q, k.transpose(-1, -2)) / 8**0.5).softmax(-1), v)
        return y.unflatten(0, (-1, 4)).transpose(1, 2)


@pytest.mark.parametrize("form", ["einsum", "renormalised", "three_axes"])
@pytest.mark.parametrize("norm", [True, False])
def test_it_stays_in_the_report(form, norm):
    module = Handwritten(form, norm=norm).eval()
    report = qk.export(module, (torch.randn(2, 5, 32),)).report
    found = len(report.fused) + len(report.declined)
    if norm:
        assert found == 1, report
        assert not report.plain
        assert all(item.reason and item.node for item in report.declined)
    else:
        assert found == 0, report
        assert len(report.plain) <= 1


L2 = "  {n}_l = ReduceL2<keepdims=1>({x}, last)\n  {n}_c = Clip({n}_l, eps)\n  {y} = Div({x}, {n}_c)\n"
LAYER = "  {y} = LayerNormalization<axis=-1, epsilon=0.001>({x}, {w})\n"


def without_marks(proto):
    """The model as a tool leaves it that drops what nodes say of where they come from."""
    for node in proto.graph.node:
        node.ClearField("metadata_props")
    return proto


@pytest.mark.parametrize("norm", [RMS, L2, LAYER])
@pytest.mark.parametrize("side", ["both", "queries"])
def test_what_was_lowered_to_plain_operators_is_named_and_not_called_plain(norm, side):
    """Bodies spell norms with their rows scaled, and grouped heads in a way of their own: not read back, but not lost either."""
    spelling = Spelling(q_norm=norm, k_norm=norm if side == "both" else NO_ROTARY)
    lowered = qk.fuse(attention_model(spelling), target="primitive", verify=False)
    assert len(lowered.report.fused) == 1
    report = inspect_model(without_marks(lowered.to_proto())).present
    assert not report.plain and not report.fused
    (miss,) = report.declined
    assert miss.reason and miss.hint and miss.node


@pytest.mark.parametrize("norm", [RMS, NO_ROTARY])
def test_logits_of_unknown_shape_do_not_hide_an_attention(norm):
    """An operator of which nothing is known stands between the product and the softmax."""
    model = attention_model(Spelling(q_norm=norm, k_norm=norm, mask="masked = Identity(logits)\n"))
    odd = next(node for node in model.graph if node.outputs[0].name == "masked")
    odd.domain, odd.op_type = "vendor", "Sharpen"
    model.opset_imports["vendor"] = 1
    _, report = fused(model, prove=False)
    assert not report.fused and len(report.declined) == (norm is RMS)
    assert all("unknown" in miss.reason and miss.node and miss.hint for miss in report.declined)


MIXED = """
  mix = Constant<value = float[6,6] {
    0.9, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.9, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.9, 0.1, 0.0, 0.0,
    0.0, 0.0, 0.0, 0.9, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.9, 0.1, 0.1, 0.0, 0.0, 0.0, 0.0, 0.9}>()
"""
MIXING = """
  {n}_last = Transpose<perm=[0, 2, 3, 1]>({x})
  {n}_m = MatMul({n}_last, mix)
  {y} = Transpose<perm=[0, 3, 1, 2]>({n}_m)
"""


@pytest.mark.parametrize("norm", [RMS, NO_ROTARY])
@pytest.mark.parametrize("place", ["logits", "probabilities"])
def test_talking_heads_of_unknown_shape_do_not_vanish(norm, place):
    softmax = "p0 = Softmax<axis=-1>(masked)\n" + MIXING.format(x="p0", y="p", n="pm")
    behind = {"softmax": softmax} if place == "probabilities" else {}
    mask = "shaped = Identity(logits)\n" + (
        MIXING.format(x="shaped", y="masked", n="lm") if not behind else "masked = Identity(shaped)\n"
    )
    model = attention_model(Spelling(q_norm=norm, k_norm=norm, mask=mask.replace("{", "{{"), constants=MIXED, **behind))
    odd = next(node for node in model.graph if node.outputs[0].name == "shaped")
    odd.domain, odd.op_type = "vendor", "Sharpen"
    model.opset_imports["vendor"] = 1
    _, report = fused(model, prove=False)
    assert not report.fused and not report.plain and len(report.declined) == (norm is RMS)
    assert all("unknown" in miss.reason and miss.node and miss.hint for miss in report.declined)


def talking_heads(block, q, k, v):
    return block.mixed(q @ k.mT * 0.3).softmax(-1) @ v


def talking_heads_behind(block, q, k, v):
    return block.mixed((q @ k.mT * 0.3).softmax(-1)) @ v


def talking_heads_as_convolution(block, q, k, v):
    return block.convolution(q @ k.mT * 0.3).softmax(-1) @ v


def talking_heads_from_the_left(block, q, k, v):
    scores = q @ k.mT * 0.3
    return (block.mix.weight @ scores.flatten(2)).view_as(scores).softmax(-1) @ v


def normalised_scores(block, q, k, v):
    scores = q @ k.mT
    return (scores / scores.pow(2).mean(1, keepdim=True).add(1e-6).sqrt()).softmax(-1) @ v


def sums_of_products(block, q, k, v):
    return (q.unsqueeze(3) * k.unsqueeze(2)).sum(-1).softmax(-1) @ v


def values_as_sums(block, q, k, v):
    return ((q @ k.mT).softmax(-1).unsqueeze(-1) * v.unsqueeze(2)).sum(-2)


def log_softmax(block, q, k, v):
    return F.log_softmax(q @ k.mT, -1).exp() @ v


def exponentials(block, q, k, v):
    e = (q @ k.mT).exp()
    return e / e.sum(-1, keepdim=True) @ v


def divided_last(block, q, k, v):
    e = (q @ k.mT).exp()
    return (e @ v) / e.sum(-1, keepdim=True)


def one_more(block, q, k, v):
    scores = q @ k.mT
    most = scores.amax(-1, keepdim=True).clamp(min=0)
    e = (scores - most).exp()
    return e / (e.sum(-1, keepdim=True) + (-most).exp()) @ v


def log_sum_exp(block, q, k, v):
    scores = q @ k.mT
    return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v


def transposed(block, q, k, v):
    return (k @ q.mT).softmax(-2).mT @ v


def cosine_similarity(block, q, k, v):
    return (F.cosine_similarity(q.unsqueeze(3), k.unsqueeze(2), dim=-1) * 7).softmax(-1) @ v


def cosine_by_division(block, q, k, v):
    lengths = q.norm(dim=-1, keepdim=True) * k.norm(dim=-1).unsqueeze(-2)
    return (q @ k.mT / (lengths + 1e-6) * 7).softmax(-1) @ v


def cosine_by_one_division(block, q, k, v):
    return (q @ k.mT / q.norm(dim=-1, keepdim=True)).softmax(-1) @ v


WITH_NORMS = {
    talking_heads: "MatMul stands between its logits",
    talking_heads_behind: "MatMul stands between its softmax",
    talking_heads_as_convolution: "Conv stands between its logits",
    talking_heads_from_the_left: "MatMul stands between its logits",
    normalised_scores: "logits",
    sums_of_products: "ReduceSum",
    values_as_sums: "ReduceSum",
    log_softmax: "LogSoftmax",
    exponentials: "Exp",
    divided_last: "Exp",
    one_more: "Exp",
    log_sum_exp: "by hand",
    transposed: "",
}
OWN_NORMS = {
    cosine_similarity: "ReduceSum",
    cosine_by_division: "divided by the norms",
    cosine_by_one_division: "divided by the norms",
}


def softmax_over_queries(block, q, k, v):
    return (q @ k.mT).softmax(-2) @ v


def linear_attention(block, q, k, v):
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


def pooled(block, q, k, v):
    return q * ((k @ block.vector).softmax(-1).unsqueeze(-2) @ v)


def pooled_after_attention(block, q, k, v):
    y = F.scaled_dot_product_attention(q, k, v) + q
    return y * ((F.rms_norm(y, (8,)) @ block.vector).softmax(-1).unsqueeze(-2) @ v)


def routed(block, q, k, v):
    return (block.router(q).softmax(-1) @ block.experts) * v


def expert_choice(block, q, k, v):
    chosen = block.router(q).mT.softmax(-1)
    return chosen.mT @ (chosen @ v)


def gated(block, q, k, v):
    e = q.exp()
    return e / e.sum(-1, keepdim=True) * v


def classified(block, q, k, v):
    return block.out((q @ k.mT).sigmoid() @ v).softmax(-1)


def retention(block, q, k, v):
    places = torch.arange(q.shape[-2])
    steps = places[:, None] - places
    return (q @ k.mT * 0.9 ** steps.clamp(min=0) * (steps >= 0)) @ v


NO_ATTENTION = [pooled, routed, expert_choice, gated]


def sigmoid(block, q, k, v):
    return (q @ k.mT * 0.3 - 2).sigmoid() @ v


def masked_sigmoid(block, q, k, v):
    seen = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    return (q @ k.mT * 0.3).sigmoid().masked_fill(~seen, 0.0) @ v


def sigmoid_by_einsum(block, q, k, v):
    return torch.einsum("bhst,bhtd->bhsd", torch.einsum("bhsd,bhtd->bhst", q, k).sigmoid(), v)


def squared_relu(block, q, k, v):
    return (q @ k.mT).relu().square() / q.shape[-2] @ v


def silu(block, q, k, v):
    return F.silu(q @ k.mT) / q.shape[-2] @ v


def softplus_over_its_sum(block, q, k, v):
    weights = F.softplus(q @ k.mT)
    return weights / weights.sum(-1, keepdim=True) @ v


OTHER_FUNCTIONS = {
    sigmoid: "Sigmoid",
    masked_sigmoid: "Sigmoid",
    sigmoid_by_einsum: "Sigmoid",
    squared_relu: "in place of a softmax",
    silu: "Sigmoid",
    softplus_over_its_sum: "Softplus",
    classified: "Sigmoid",
    softmax_over_queries: "does not run over the keys",
    linear_attention: "linear attention",
    retention: "linear attention",
}


class Block(torch.nn.Module):
    """An attention of `form`, on heads (batch, 4, positions, 8)."""

    def __init__(self, form, *, norm):
        super().__init__()
        self.form, self.norm = form, norm
        self.qkv, self.mix, self.convolution = torch.nn.Linear(32, 96), torch.nn.Linear(4, 4), torch.nn.Conv2d(4, 4, 1)
        self.router, self.out = torch.nn.Linear(8, 5), torch.nn.Linear(8, 8)
        self.vector, self.experts = torch.nn.Parameter(torch.rand(8)), torch.nn.Parameter(torch.rand(5, 8))
        self.q_weight, self.k_weight = (torch.nn.Parameter(0.5 + torch.rand(8)) for _ in range(2))

    def mixed(self, scores):
        return self.mix(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        if self.norm:
            q, k = F.rms_norm(q, (8,), self.q_weight, 1e-6), F.rms_norm(k, (8,), self.k_weight, 1e-6)
        return x + self.form(self, q, k, v).transpose(1, 2).flatten(2)


def good(block, q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def beside_a_good_one(form, *, norm):
    """The report of a model of two attentions: one that is fused, and `form`."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(Block(good, norm=True), Block(form, norm=norm)).eval()
    shapes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")},)
    return qk.export(module, (torch.randn(2, 5, 32),), dynamic_shapes=shapes, verify=False).report


@pytest.mark.parametrize(("form", "reason"), [*WITH_NORMS.items(), *OTHER_FUNCTIONS.items(), *OWN_NORMS.items()])
def test_a_normalised_form_is_declined_once_with_reason_node_and_hint(form, reason):
    report = beside_a_good_one(form, norm=form not in OWN_NORMS)
    assert len(report.fused) == 1 and not report.plain
    (miss,) = report.declined
    assert reason in miss.reason and miss.name and miss.node and miss.hint
    with pytest.raises(FusionRequiredError, match="1 of 2 QK-Norm attentions"):
        require_complete(report)


@pytest.mark.parametrize("form", [*WITH_NORMS, *OTHER_FUNCTIONS])
def test_the_same_form_without_norms_is_no_miss(form):
    report = beside_a_good_one(form, norm=False)
    assert len(report.fused) == 1 and report.complete and len(report.plain) <= 1


@pytest.mark.parametrize("form", NO_ATTENTION)
def test_what_is_no_attention_is_not_reported(form):
    report = beside_a_good_one(form, norm=True)
    assert len(report.fused) == 1 and report.complete and not report.plain


def test_pooling_behind_attention_is_not_reported():
    report = beside_a_good_one(pooled_after_attention, norm=True)
    assert len(report.fused) == 2 and report.complete and not report.plain
