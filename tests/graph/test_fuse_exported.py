"""What torch.onnx writes for real model families: one node per attention, proven, with the right meaning and parity."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)

from qknorm_onnx.spec.canonical import canonical
from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormSpec, RotarySpec
from tests.graph.zoo_export import Exported, assert_parity, export, exported, fused

HALF = RotarySpec(order="after_norm")
RMS = NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6)
COSINE = NormSpec(q_kind="l2", k_kind="l2", q_epsilon=1e-12, k_epsilon=1e-12, epsilon_mode="clamp")


def spec_of(heads, kv_heads, scale, norm, rotary=None, **attention):
    return canonical(
        QKNormSpec(
            attention=AttentionSpec(q_num_heads=heads, kv_num_heads=kv_heads, scale=scale, **attention),
            norm=norm,
            rotary=rotary or RotarySpec(),
        )
    )


HIDDEN = NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-5, k_epsilon=1e-5, axis="hidden")
LAYER = NormSpec(q_kind="layer", k_kind="layer", q_epsilon=1e-5, k_epsilon=1e-5)
GEMMA = 48**-0.5
EXPECTED = {
    "qwen3": [spec_of(4, 2, 32**-0.5, RMS, HALF, is_causal=True)] * 2,
    "gemma3_text": [
        spec_of(4, 2, GEMMA, RMS, HALF, is_causal=True, left_window_size=3),
        spec_of(4, 2, GEMMA, RMS, HALF, is_causal=True),
    ],
    "olmo2": [spec_of(4, 2, 16**-0.5, HIDDEN, HALF, is_causal=True)] * 2,
    "cohere_qk": [spec_of(4, 2, 32**-0.5, LAYER, RotarySpec(order="after_norm", interleaved=True), is_causal=True)] * 2,
    "h_cosine_tau_per_head": [spec_of(4, 4, 1.0, COSINE)] * 2,
    "h_cosine_tau_causal": [spec_of(4, 4, 1.0, COSINE, is_causal=True)] * 2,
    "h_ngpt": [spec_of(4, 4, 4.0, COSINE, RotarySpec(order="before_norm"), is_causal=True)] * 2,
    "h_vit22b_ln_nobias": [spec_of(4, 4, 0.25, NormSpec(q_kind="layer", k_kind="layer", q_epsilon=1e-6, k_epsilon=1e-6))] * 2,
    "h_vit22b_sdpa": [spec_of(4, 4, 0.25, NormSpec(q_kind="layer", k_kind="layer", q_epsilon=1e-6, k_epsilon=1e-6))] * 2,
}
LANGUAGE = ("qwen3", "gemma3_text", "olmo2", "cohere_qk")
HANDWRITTEN = tuple(name for name in EXPECTED if name not in LANGUAGE)
QUICK = [(name, "sdpa", 20) for name in EXPECTED] + [("qwen3", "eager", 20), ("qwen3", "sdpa", 23), ("cohere_qk", "sdpa", 23)]
EVERY = [(name, attention, opset) for name in LANGUAGE for attention in ("eager", "sdpa") for opset in (18, 20, 23, 25)]
EVERY += [(name, "sdpa", opset) for name in HANDWRITTEN for opset in (18, 23, 25)]
CASES = [pytest.param(*case, id="-".join(map(str, case))) for case in QUICK]
CASES += [pytest.param(*case, id="-".join(map(str, case)), marks=pytest.mark.slow) for case in EVERY if case not in QUICK]


@pytest.mark.parametrize(("name", "attention", "opset"), CASES)
def test_one_node_for_each_attention(zoo, name, attention, opset):
    source = exported(zoo, name, attention=attention, opset=opset)
    model, report = fused(source.model)
    assert not report.declined and not report.refused and not report.plain
    assert [item.note for item in report.fused] == [""] * len(EXPECTED[name])
    assert [canonical(item.spec) for item in report.fused] == EXPECTED[name]
    left = {node.op_type for node in model.graph}
    assert not left & {"Softmax", "RotaryEmbedding", "Attention", "ReduceL2", "Expand", "Where", "Neg"} - {"Expand"}
    for sizes in ({"batch": 3, "seq": 7}, {"batch": 1, "seq": 13}):
        assert_parity(model, source, sizes=sizes)


def test_scalar_temperature_is_the_scale(zoo):
    source = exported(zoo, "h_cosnorm_scalar_tau")
    model, report = fused(source.model)
    taus = [float(block.post.tau) for block in source.module.a]
    assert [item.spec.attention.scale for item in report.fused] == pytest.approx(taus, rel=1e-6)
    assert_parity(model, source, sizes={"batch": 3, "seq": 5})


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
def test_llama4_rotates_first_and_leaves_its_unnormed_layer(zoo, attention):
    source = exported(zoo, "llama4_text", attention=attention)
    model, report = fused(source.model)
    (item,) = report.fused
    assert item.note == "" and len(report.plain) == 1 and not report.declined
    assert item.spec.rotary == RotarySpec(order="before_norm", interleaved=True)
    assert item.spec.norm.q_kind == item.spec.norm.k_kind == "rms"
    assert_parity(model, source, sizes={"batch": 3, "seq": 13})


class ArticleAttention(torch.nn.Module):
    """The module of the explainer that this project implements."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_k = n_heads, d_model // n_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (torch.nn.Linear(d_model, d_model) for _ in range(4))
        self.tau = torch.nn.Parameter(torch.ones(n_heads, 1, 1) * self.d_k**0.5)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, self.n_heads, self.d_k).transpose(1, 2) for w in (self.W_q, self.W_k, self.W_v))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        probabilities = F.softmax(torch.matmul(q, k.transpose(-2, -1)) * self.tau, dim=-1)
        return self.W_o(torch.matmul(probabilities, v).transpose(1, 2).contiguous().view(batch, length, -1))


@pytest.mark.parametrize("opset", [18, 20, 23])
def test_module_of_the_article(opset):
    torch.manual_seed(0)
    module = ArticleAttention(48, 6).eval()
    with torch.no_grad():
        module.tau.add_(torch.rand(6, 1, 1))
    kwargs, axes = {"x": torch.randn(2, 7, 48)}, {"x": {0: "batch", 1: "seq"}}
    source = Exported(module, kwargs, axes, export(module, kwargs, axes, opset=opset))
    model, report = fused(source.model)
    (item,) = report.fused
    assert item.note == "" and item.spec.attention.scale == 1.0
    assert math.isclose(item.spec.norm.q_epsilon, 1e-12, rel_tol=1e-6)
    attention = next(node for node in model.graph if node.op_type == "QKNormAttention")
    assert attention.inputs[7].const_value.numpy() == pytest.approx(module.tau.detach().numpy())
    for sizes in ({"batch": 3, "seq": 5}, {"batch": 1, "seq": 1}):
        assert_parity(model, source, sizes=sizes)
