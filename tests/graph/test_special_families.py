"""What happens to the families whose attention is unlike the others: what their nodes say, and what stays outside of them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx_ir as ir
import pytest
import torch

from qknorm_onnx.graph.canonical.qk_norm_node import (
    AttentionInputs,
    RotaryInputs,
    input_values,
    is_attention_node,
    is_rotary_node,
    read_attention_node,
    read_rotary_node,
)
from qknorm_onnx.graph.fusion_report import FusionReport
from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormRotarySpec, QKNormSpec, RotarySpec
from tests.graph.zoo_export import assert_parity, exported, fused

SIZES = ({"batch": 3, "seq": 13, "txt": 4}, {"batch": 1, "seq": 3, "txt": 7})
NO_ROTARY = RotarySpec()
BOTH_RMS = NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6)
D = 32  # head size of the text models


@dataclasses.dataclass(frozen=True)
class Found:
    """A fused entry: its nodes in order, the module that it came from, and the report."""

    module: torch.nn.Module
    model: ir.Model
    report: FusionReport
    attentions: list[tuple[QKNormSpec, AttentionInputs]]
    rotaries: list[tuple[QKNormRotarySpec, RotaryInputs]]

    @property
    def specs(self) -> list[QKNormSpec]:
        return [spec for spec, _ in self.attentions]


def fuse(zoo, name) -> Found:
    """The entry fused, every rewrite proven, and judged against PyTorch at other sizes."""
    source = exported(zoo, name)
    model, report = fused(source.model)
    assert not report.refused
    assert all(item.note == "" for item in report.fused)
    for sizes in SIZES:
        assert_parity(model, source, sizes=sizes)
    attentions = [read_attention_node(node) for node in model.graph if is_attention_node(node)]
    rotaries = [read_rotary_node(node) for node in model.graph if is_rotary_node(node)]
    assert len(attentions) == len(report.fused)
    return Found(source.module, model, report, attentions, rotaries)


def given(inputs) -> set[str]:
    return {name for name, value in input_values(inputs).items() if value is not None}


def constant(value: ir.Value | None) -> np.ndarray:
    assert value is not None and value.const_value is not None
    return value.const_value.numpy()


def made_from(value: ir.Value | None) -> set[str]:
    """Operators on the way to a value, up to the projections."""
    kinds: set[str] = set()
    todo = [value]
    while todo:
        producer = current.producer() if (current := todo.pop()) is not None else None
        if producer is not None and producer.op_type not in ("MatMul", "Gemm"):
            kinds.add(producer.op_type)
            todo += producer.inputs
    return kinds


def depends_on(value: ir.Value, source: ir.Value) -> bool:
    """Whether `value` is computed from `source`."""
    seen, todo = set(), [value]
    while todo:
        current = todo.pop()
        if current is source:
            return True
        if current is not None and current not in seen and (producer := current.producer()) is not None:
            seen.add(current)
            todo += producer.inputs
    return False


def one_of(heads: int, kv_heads: int, scale: float, **fields) -> AttentionSpec:
    return AttentionSpec(q_num_heads=heads, kv_num_heads=kv_heads, scale=scale, **fields)


def test_llama4_text(zoo):
    """Rotary first, then a norm without a weight; the chunks stay a mask; the layer without rotary has no norm."""
    found = fuse(zoo, "llama4_text")
    assert found.report.plain == ("model.model.layers.1.self_attn",)
    ((spec, inputs),) = found.attentions
    assert spec.norm == NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-5, k_epsilon=1e-5)
    assert spec.rotary == RotarySpec(order="before_norm", interleaved=True)
    assert spec.attention == one_of(4, 2, D**-0.5, is_causal=True)
    assert given(inputs) == {"query", "key", "value", "cos", "sin", "attention_bias"}
    bias = inputs.attention_bias
    assert bias is not None and bias.dtype == ir.DataType.BOOL  # same chunk of 8 positions; causality is in the node
    assert bias.producer().op_type == "Equal"


def test_swin_v2(zoo):
    """Cosine attention: the clamped temperature of each head multiplies q; position bias and shifted windows are a bias."""
    found = fuse(zoo, "swinv2")
    cosine = NormSpec(q_kind="l2", k_kind="l2", q_epsilon=1e-12, k_epsilon=1e-12, epsilon_mode="clamp")
    blocks = [block for layer in found.module.model.encoder.layers for block in layer.blocks]
    assert len(blocks) == len(found.attentions) == 4
    for block, (spec, inputs), heads, windows in zip(blocks, found.attentions, (2, 2, 4, 4), (1, 4, 1, 1), strict=True):
        assert (spec.norm, spec.rotary, spec.attention) == (cosine, NO_ROTARY, one_of(heads, heads, 1.0))
        assert given(inputs) == {"query", "key", "value", "q_scale", "attention_bias"}
        logit_scale = block.attention.self.logit_scale.detach()
        tau = logit_scale.clamp(max=math.log(100)).exp().numpy()
        assert constant(inputs.q_scale).shape == (heads, 1, 1)
        assert constant(inputs.q_scale) == pytest.approx(tau, rel=1e-6)
        # Only the second block of the first stage is shifted: its mask differs from window to window.
        shape = list(inputs.attention_bias.shape)
        assert shape[1:] == [heads, 16, 16]
        assert (shape[0] == 1) == (windows == 1)


@pytest.mark.slow
def test_olmoe_with_clip(zoo):
    """Queries and keys are clipped between norm and rotary, which no field says: declined, and the graph stays as it is."""
    found = fuse(zoo, "olmoe_clip")
    assert not found.attentions and not found.rotaries and not found.report.plain
    assert len(found.report.declined) == 2
    for layer, miss in enumerate(found.report.declined):
        assert miss.name == f"model.model.layers.{layer}.self_attn"
        assert miss.reason == "its queries or keys are clipped between norm and attention"
        assert next(node for node in found.model.graph if node.name == miss.node).op_type == "Clip"


@pytest.mark.slow
def test_deepseek_v4(zoo):
    """Keys are the values: prepared once, with the tail rotated; a window, sinks; the inverse rotary of Y stays outside."""
    found = fuse(zoo, "deepseek_v4")
    tail = RotarySpec(order="after_norm", interleaved=True, embedding_dim=16, offset=16)
    assert len(found.rotaries) == 4 and len(found.attentions) == 2
    for layer, (spec, inputs) in enumerate(found.attentions):
        assert spec.attention == one_of(4, 1, D**-0.5, is_causal=True, left_window_size=3)
        assert (spec.norm, spec.rotary) == (NormSpec(), NO_ROTARY)
        assert given(inputs) == {"query", "key", "value", "head_sink"}
        assert inputs.key is inputs.value
        own = found.module.model.model.layers[layer].self_attn
        assert np.array_equal(constant(inputs.head_sink), own.sinks.detach().numpy())
        query, key = (read_rotary_node(value.producer()) for value in (inputs.query, inputs.key))
        assert [query[0].num_heads, key[0].num_heads] == [4, 1]
        assert all((side.kind, side.rotary) == ("rms", tail) for side, _ in (query, key))
        assert query[1].weight is None
        assert np.array_equal(constant(key[1].weight), own.kv_norm.weight.detach().numpy())


@pytest.mark.slow
def test_doge(zoo):
    """An ordinary norm and rotary; the mask that each head computes from the values is a bias, and causality is in it."""
    found = fuse(zoo, "doge")
    assert len(found.attentions) == 2
    for spec, inputs in found.attentions:
        assert (spec.norm, spec.rotary) == (BOTH_RMS, RotarySpec(order="after_norm"))
        assert spec.attention == one_of(4, 2, D**-0.5)
        assert given(inputs) == {"query", "key", "value", "q_norm_weight", "k_norm_weight", "cos", "sin", "attention_bias"}
        assert inputs.attention_bias.shape[1] == 4
        assert depends_on(inputs.attention_bias, inputs.value)
    assert not found.rotaries and not found.report.declined


@pytest.mark.slow
def test_inkling(zoo):
    """Scale 1 / D, no rotary; learned relative logits with causality and window in one bias; the convolution stays outside."""
    found = fuse(zoo, "inkling_text")
    assert len(found.attentions) == 2
    for spec, inputs in found.attentions:
        assert (spec.norm, spec.rotary) == (BOTH_RMS, NO_ROTARY)
        assert spec.attention == one_of(4, 2, 1 / D)
        assert given(inputs) == {"query", "key", "value", "q_norm_weight", "k_norm_weight", "attention_bias"}
        assert inputs.attention_bias.shape[1] == 4
        assert "Conv" in made_from(inputs.key) and "Conv" not in made_from(inputs.query)


def test_t5gemma2_merged_attention(zoo):
    """Self and cross keys share a norm, and only the self keys are rotated: three preparations, one attention."""
    found = fuse(zoo, "t5gemma2_merged_attn")
    ((spec, inputs),) = found.attentions
    assert (spec.norm, spec.rotary) == (NormSpec(), NO_ROTARY)
    assert spec.attention == one_of(4, 2, 48**-0.5)  # query_pre_attn_scalar, not the head size
    assert given(inputs) == {"query", "key", "value", "attention_bias"}
    assert inputs.attention_bias.name == "merged_mask"
    assert {side.kind for side, _ in found.rotaries} == {"rms"}
    orders = sorted((side.num_heads, side.rotary.order) for side, _ in found.rotaries)
    assert orders == [(2, "after_norm"), (2, "none"), (4, "after_norm")]
    keys = [given.weight for side, given in found.rotaries if side.num_heads == 2]
    assert keys[0] is keys[1]
    assert constant(keys[0]) == pytest.approx(1 + found.module.attn.k_norm.weight.detach().numpy())


def test_joint_attention(zoo):
    """SD3, Flux: each stream has its own norms, the rotary is that of the joined streams."""
    found = fuse(zoo, "h_joint_mmdit")
    ((spec, inputs),) = found.attentions
    assert (spec.norm, spec.rotary) == (NormSpec(), RotarySpec(order="after_norm", interleaved=True))
    assert spec.attention == one_of(4, 4, 0.25)
    assert given(inputs) == {"query", "key", "value", "cos", "sin"}
    assert [side.rotary for side, _ in found.rotaries] == [NO_ROTARY] * 4
    assert [(side.kind, side.epsilon) for side, _ in found.rotaries] == [("rms", pytest.approx(1e-5))] * 4
    norms = [getattr(found.module, name).n.weight.detach().numpy() for name in ("xtqn", "xiqn", "xtkn", "xikn")]
    assert all(np.array_equal(constant(given.weight), norm) for (_, given), norm in zip(found.rotaries, norms, strict=True))
    assert inputs.query.producer().op_type == inputs.key.producer().op_type == "Concat"


@pytest.mark.slow
def test_gemma4_text(zoo):
    """The norm of the values stays in front of the node; the scale is 1."""
    found = fuse(zoo, "gemma4_text")
    for (spec, inputs), window in zip(found.attentions, [3, -1], strict=True):
        assert spec.norm == BOTH_RMS and spec.rotary.order == "after_norm"
        assert spec.attention == one_of(4, 2, 1.0, is_causal=True, left_window_size=window)
        assert given(inputs) == {"query", "key", "value", "q_norm_weight", "k_norm_weight", "cos", "sin"}
        assert "ReduceMean" in made_from(inputs.value)
        assert not {"ReduceMean", "Pow"} & (made_from(inputs.query) | made_from(inputs.key))
