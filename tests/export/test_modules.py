"""`QKNormAttention`: the classic module, number for number, and every variant from a spec; each is one node."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the classic module is written with it)
from torch import nn

import qknorm_onnx as qk
from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormSpec, RotarySpec, SpecError
from qknorm_onnx.torch_export.exporter import export_graph
from qknorm_onnx.torch_export.operators.modules import QKNormAttention
from qknorm_onnx.torch_export.spec_from_module import read_specs

BATCH_AND_LENGTH = {0: "batch", 1: "sequence"}


class ClassicAttention(nn.Module):
    """L2 norm and a learnable temperature in plain torch, as people write it."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_k = n_heads, d_model // n_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))
        self.tau = nn.Parameter(torch.ones(n_heads, 1, 1) * self.d_k**0.5)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, self.n_heads, self.d_k).transpose(1, 2) for w in (self.W_q, self.W_k, self.W_v))
        attention = F.softmax(F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * self.tau, dim=-1)
        return self.W_o((attention @ v).transpose(1, 2).contiguous().view(batch, length, -1))


def classic_pair(d_model=48, n_heads=4):
    classic = ClassicAttention(d_model, n_heads).double()
    with torch.no_grad():
        classic.tau.mul_(torch.rand(n_heads, 1, 1) + 0.5)
    ours = QKNormAttention(d_model, n_heads).double()
    ours.load_state_dict(classic.state_dict())
    return classic, ours


def test_same_parameters_and_numbers_as_the_classic_module():
    classic, ours = classic_pair()
    assert {n: p.shape for n, p in classic.state_dict().items()} == {n: p.shape for n, p in ours.state_dict().items()}
    fresh = QKNormAttention(48, 4)
    assert torch.equal(fresh.tau, torch.full((4, 1, 1), 12**0.5))
    x = torch.randn(3, 7, 48, dtype=torch.float64, requires_grad=True)
    assert torch.allclose(classic(x), ours(x), rtol=1e-12, atol=1e-12)


def test_same_gradients_as_the_classic_module():
    classic, ours = classic_pair()
    x = torch.randn(2, 5, 48, dtype=torch.float64)
    for module in (classic, ours):
        module(x).square().sum().backward()
    for (name, expected), found in zip(classic.named_parameters(), dict(ours.named_parameters()).values(), strict=False):
        assert torch.allclose(dict(ours.named_parameters())[name].grad, expected.grad, rtol=1e-9, atol=1e-11), (name, found.shape)


def test_training_lowers_the_loss():
    torch.manual_seed(0)
    module, target = QKNormAttention(16, 2), torch.randn(4, 6, 16)
    x = torch.randn(4, 6, 16)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = (module(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]
    assert module.tau.grad is not None


def test_the_classic_module_and_ours_become_the_same_node(run_model, assert_as_torch):
    classic, ours = (module.float().eval() for module in classic_pair())
    x = torch.randn(2, 6, 48)
    fused = []
    for module in (classic, ours):
        program = qk.export(module, (x,), dynamic_shapes={"x": BATCH_AND_LENGTH}, require_fusion=True)
        (attention,) = program.report.fused
        fused.append(attention.spec)
        assert [node.op_type for node in program.model.graph].count("QKNormAttention") == 1
        for batch, length in ((1, 1), (3, 11)):
            inputs = torch.randn(batch, length, 48)
            assert_as_torch(run_model(program.model, {"x": inputs})[0], module(inputs))
    assert qk.canonical(fused[0]) == qk.canonical(fused[1])
    assert read_specs(ours) == {"": ours.spec}


BASE = QKNormSpec(
    attention=AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=0.25, is_causal=True),
    norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6),
    rotary=RotarySpec(order="after_norm"),
)
HIDDEN = dataclasses.replace(BASE, norm=dataclasses.replace(BASE.norm, axis="hidden"))
LAYER = QKNormSpec(
    attention=dataclasses.replace(BASE.attention, is_causal=False, softcap=20.0),
    norm=NormSpec(q_kind="layer", k_kind="layer", q_epsilon=1e-5, k_epsilon=1e-5),
)
BEFORE = dataclasses.replace(BASE, rotary=RotarySpec(order="before_norm", interleaved=True, embedding_dim=8))


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (BASE, {"rotary_base": 1e4}),
        (HIDDEN, {"rotary_base": 1e4, "bias": False}),
        (LAYER, {"norm_bias": True, "norm_per_head": True, "head_sink": True, "value_head_size": 24}),
        (BEFORE, {"rotary_base": 5e5, "norm_weight": False, "q_scale": torch.ones(4, 1, 1)}),
    ],
)
def test_from_spec_is_one_node(run_model, assert_as_torch, spec, options):
    module = QKNormAttention.from_spec(spec, d_model=32, head_size=16, **options).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model, _ = export_graph(module, (torch.randn(2, 6, 32),), dynamic_shapes={"x": BATCH_AND_LENGTH})
    assert [node.op_type for node in model.graph if node.domain == "ai.qknorm"] == ["QKNormAttention"]
    program = qk.fuse(model)
    assert [fused.spec for fused in program.report.fused] == [spec]
    x = torch.randn(3, 5, 32)
    assert_as_torch(run_model(program.model, {"x": x})[0], module(x))


def test_from_spec_with_tables_mask_and_context():
    spec = dataclasses.replace(BASE, rotary=RotarySpec(), attention=dataclasses.replace(BASE.attention, is_causal=False))
    module = QKNormAttention.from_spec(spec, d_model=32, head_size=16, d_context=20)
    x, context = torch.randn(2, 5, 32), torch.randn(2, 7, 20)
    mask = torch.rand(2, 1, 5, 7) > 0.5
    hidden = module(x, context, attention_bias=mask)
    changed = torch.where(mask.any(2).squeeze(1)[..., None], context, context + 1)  # keys that nobody sees
    assert torch.allclose(module(x, changed, attention_bias=mask), hidden)
    rotated = QKNormAttention.from_spec(BASE, d_model=32, head_size=16)
    with pytest.raises(SpecError, match="cos and sin are both needed"):
        rotated(x)
    assert rotated(x, cos=torch.ones(5, 8), sin=torch.zeros(5, 8)).shape == x.shape


@pytest.mark.parametrize("fixed_size", [False, True])
def test_decoding_with_a_cache_equals_the_whole_sequence(fixed_size):
    spec = dataclasses.replace(BASE, attention=dataclasses.replace(BASE.attention, left_window_size=3))
    module = QKNormAttention.from_spec(spec, d_model=32, head_size=16, rotary_base=1e4).double()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    past_key, past_value = (torch.full((2, 2, 12 if fixed_size else 0, 16), torch.nan, dtype=torch.float64) for _ in range(2))
    outputs, done = [], 0
    for step in (4, 1, 1, 3):
        length = {"cache_length": torch.tensor([done, done])} if fixed_size else {}
        y, past_key, past_value = module(x[:, done : done + step], past_key=past_key, past_value=past_value, **length)
        outputs.append(y)
        done += step
    assert torch.allclose(torch.cat(outputs, 1), module(x), rtol=1e-12, atol=1e-12)


def test_cache_arguments_export(run_model):
    module = QKNormAttention.from_spec(BASE, d_model=32, head_size=16, rotary_base=1e4).eval()
    past = torch.randn(2, 2, 4, 16)
    shapes = {"x": BATCH_AND_LENGTH, "past_key": {0: "batch", 2: "past"}, "past_value": {0: "batch", 2: "past"}}
    kwargs = {"past_key": past, "past_value": past}
    program = qk.export(module, (torch.randn(2, 3, 32),), kwargs, dynamic_shapes=shapes, require_fusion=True)
    for batch, length, cached in ((1, 1, 0), (3, 2, 7)):
        inputs = {"x": torch.randn(batch, length, 32)}
        inputs |= {name: torch.randn(batch, 2, cached, 16) for name in ("past_key", "past_value")}
        for found, expected in zip(run_model(program.model, inputs), module(**inputs), strict=True):
            assert torch.allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_tables_are_made_in_float32(dtype):
    module = QKNormAttention.from_spec(BASE, d_model=32, head_size=16, rotary_base=1e4)
    half = QKNormAttention.from_spec(BASE, d_model=32, head_size=16, rotary_base=1e4)
    half.load_state_dict(module.state_dict())
    x, positions = torch.randn(1, 4, 32), torch.arange(4000, 4004)
    found = half.to(dtype)(x.to(dtype), position_ids=positions).float()
    expected = module(x, position_ids=positions)
    assert float((found - expected).abs().max()) <= 16 * torch.finfo(dtype).eps * float(expected.abs().max())


def test_sizes_that_contradict_are_refused():
    with pytest.raises(SpecError, match="not a multiple of n_heads"):
        QKNormAttention(30, 4)
    with pytest.raises(SpecError, match="make the head size even"):
        QKNormAttention.from_spec(BASE, d_model=20)
    sections = dataclasses.replace(BASE, rotary=RotarySpec(order="after_norm", sections=2))
    with pytest.raises(SpecError, match="pass cos and sin to forward"):
        QKNormAttention.from_spec(sections, d_model=64, rotary_base=1e4)
