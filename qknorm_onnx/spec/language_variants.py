"""Attention of published language models, as their official or reference code computes it.

Read in transformers 5.24.0 (`models/<family>/modeling_<family>.py`) unless another source is given. A window of W tokens is
`left_window_size` W - 1. `1 + w` gains are folded into the weight, so the inputs hold gains.
"""

from __future__ import annotations

import math
from typing import Final

from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormSpec, RotarySpec
from qknorm_onnx.spec.variant_inputs import (
    OptionalInput,
    Variant,
    attention_bias,
    norm_gains,
    query_scale,
    rotary_tables,
)

_VERSION: Final = "transformers 5.24.0"
_MODELS: Final = "https://github.com/huggingface/transformers/tree/v5.24.0/src/transformers/models"

# Statistics and gain in float32, then one cast down (OLMo 2, Gemma, Cohere) or the gain after the cast (Qwen3, HunYuan).
_RMS: Final = NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6)
_RMS_GAIN_LAST: Final = NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6, weight_order="after_cast")
_LAYER: Final = NormSpec(q_kind="layer", k_kind="layer", q_epsilon=1e-5, k_epsilon=1e-5)
_AFTER_NORM: Final = RotarySpec(order="after_norm")
_BEFORE_NORM: Final = RotarySpec(order="before_norm")


def _family(name: str) -> str:
    return f"{_MODELS}/{name}"


def _causal(q_num_heads: int, kv_num_heads: int, scale: float, *, softcap: float = 0.0, window: int = 0) -> AttentionSpec:
    return AttentionSpec(
        q_num_heads=q_num_heads,
        kv_num_heads=kv_num_heads,
        scale=scale,
        softcap=softcap,
        is_causal=True,
        left_window_size=window - 1,
    )


_NORM_THEN_ROTARY: Final[tuple[Variant, ...]] = (
    Variant(
        name="qwen3",
        spec=QKNormSpec(attention=_causal(4, 2, 1 / math.sqrt(8)), norm=_RMS_GAIN_LAST, rotary=_AFTER_NORM),
        head_size=8,
        summary="RMSNorm per head, then rotary; the gain multiplies after the cast down",
        source=_family("qwen3"),
        version=_VERSION,
        inputs=(*norm_gains(), *rotary_tables()),
    ),
    Variant(
        name="gemma3",
        spec=QKNormSpec(attention=_causal(4, 2, 168**-0.5), norm=_RMS, rotary=_AFTER_NORM),
        head_size=10,
        summary="RMSNorm with a gain of 1 + w in float32, query_pre_attn_scalar ** -0.5 (27B: 168), no soft cap",
        source=_family("gemma3"),
        version=_VERSION,
        inputs=(*norm_gains(), *rotary_tables()),
    ),
    Variant(
        name="gemma3-sliding",
        spec=QKNormSpec(attention=_causal(8, 4, 256**-0.5, window=3), norm=_RMS, rotary=_AFTER_NORM),
        head_size=6,
        summary="the local layers of Gemma 3: a window, here of three tokens",
        source=_family("gemma3"),
        version=_VERSION,
        inputs=(*norm_gains(), *rotary_tables("(S, R/2)")),
    ),
    Variant(
        name="gemma3n",
        spec=QKNormSpec(attention=_causal(6, 2, 1.0), norm=_RMS, rotary=_AFTER_NORM),
        head_size=8,
        summary="scale 1.0 (Gemma 3n, Gemma 4 text); V has a norm of its own, outside",
        source=_family("gemma3n"),
        version=_VERSION,
        inputs=(*norm_gains(), *rotary_tables()),
    ),
    Variant(
        name="olmo2",
        spec=QKNormSpec(
            attention=_causal(4, 2, 1 / math.sqrt(8)),
            norm=NormSpec(q_kind="rms", k_kind="rms", axis="hidden", q_epsilon=1e-5, k_epsilon=1e-5),
            rotary=_AFTER_NORM,
        ),
        head_size=8,
        summary="RMSNorm over the whole projection, before the head split",
        source=_family("olmo2"),
        version=_VERSION,
        inputs=(*norm_gains("H*D"), *rotary_tables("(B, S, R)")),
    ),
    Variant(
        name="minimax-m2",
        spec=QKNormSpec(
            attention=_causal(6, 1, 1 / math.sqrt(12)),
            norm=NormSpec(q_kind="rms", k_kind="rms", axis="hidden", q_epsilon=1e-6, k_epsilon=1e-6, weight_order="after_cast"),
            rotary=RotarySpec(order="after_norm", embedding_dim=4),
        ),
        head_size=12,
        summary="RMSNorm over the whole projection, rotary on the first values of a head",
        source=_family("minimax_m2"),
        version=_VERSION,
        inputs=(*norm_gains("H*D"), *rotary_tables()),
    ),
    Variant(
        name="command-r-plus",
        spec=QKNormSpec(
            attention=_causal(4, 2, 1 / math.sqrt(8)), norm=_LAYER, rotary=RotarySpec(order="after_norm", interleaved=True)
        ),
        head_size=8,
        summary="LayerNorm without bias, gains per head and value, rotary of neighbouring pairs (use_qk_norm)",
        source=_family("cohere"),
        version=_VERSION,
        inputs=(*norm_gains("H, D"), *rotary_tables()),
    ),
    Variant(
        name="chameleon",
        spec=QKNormSpec(attention=_causal(4, 2, 1 / math.sqrt(8)), norm=_LAYER, rotary=_AFTER_NORM),
        head_size=8,
        summary="LayerNorm over each head, gain and bias per head and value",
        source=_family("chameleon"),
        version=_VERSION,
        inputs=(*norm_gains("H, D", biased=True), *rotary_tables()),
    ),
    Variant(
        name="stablelm",
        spec=QKNormSpec(
            attention=_causal(4, 4, 1 / math.sqrt(16)), norm=_LAYER, rotary=RotarySpec(order="after_norm", embedding_dim=4)
        ),
        head_size=16,
        summary="one LayerNorm without bias for every head, a quarter of the head is rotated (qk_layernorm)",
        source=_family("stablelm"),
        version=_VERSION,
        inputs=(*norm_gains("H, D"), *rotary_tables()),
    ),
    Variant(
        name="phi",
        spec=QKNormSpec(
            attention=_causal(5, 5, 1 / math.sqrt(8)), norm=_LAYER, rotary=RotarySpec(order="after_norm", embedding_dim=4)
        ),
        head_size=8,
        summary="LayerNorm with bias shared by the heads, half of the head is rotated (qk_layernorm; Persimmon likewise)",
        source=_family("phi"),
        version=_VERSION,
        inputs=(*norm_gains(biased=True), *rotary_tables()),
    ),
    Variant(
        name="qwen3-next",
        spec=QKNormSpec(
            attention=_causal(4, 1, 1 / math.sqrt(16)), norm=_RMS, rotary=RotarySpec(order="after_norm", embedding_dim=4)
        ),
        head_size=16,
        summary="1 + w gains, a quarter of the head is rotated; the output gate is outside",
        source=_family("qwen3_next"),
        version=_VERSION,
        inputs=(*norm_gains(), *rotary_tables()),
    ),
    Variant(
        name="flint",
        spec=QKNormSpec(attention=_causal(4, 2, 1 / math.sqrt(8), window=4), norm=_RMS, rotary=_AFTER_NORM),
        head_size=8,
        summary="a window and attention sinks: one more logit per head in the softmax denominator",
        source=_family("flint"),
        version=_VERSION,
        inputs=(*norm_gains(), *rotary_tables(), OptionalInput(name="head_sink", shape="(Hq)", values="logits")),
    ),
    Variant(
        name="doge",
        spec=QKNormSpec(
            attention=AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=1 / math.sqrt(8)),
            norm=_RMS_GAIN_LAST,
            rotary=_AFTER_NORM,
        ),
        head_size=8,
        summary="a mask per head that depends on the data and replaces causality",
        source=_family("doge"),
        version=_VERSION,
        inputs=(*norm_gains(), *rotary_tables(), attention_bias("(B, Hq, S, T)", "float mask")),
    ),
    Variant(
        name="deepseek-v4",
        spec=QKNormSpec(
            attention=_causal(6, 1, 1 / math.sqrt(12), window=4),
            norm=_RMS,
            rotary=RotarySpec(order="after_norm", interleaved=True, embedding_dim=4, offset=8),
        ),
        head_size=12,
        summary="one key head, queries without a gain, rotary on the tail, sinks; the value is the prepared key",
        source=_family("deepseek_v4"),
        version=_VERSION,
        inputs=(
            OptionalInput(name="k_norm_weight", shape="(D)", values="gain"),
            *rotary_tables(),
            OptionalInput(name="head_sink", shape="(Hq)", values="logits"),
        ),
    ),
    Variant(
        name="muse",
        spec=QKNormSpec(
            attention=_causal(4, 1, 2.0 / math.sqrt(8)),
            norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-5, k_epsilon=1e-5),
            rotary=_AFTER_NORM,
        ),
        head_size=8,
        summary="RMSNorm without a gain, a constant factor of the queries folded into the scale",
        source=_family("muse_glimmer"),
        version=_VERSION,
        inputs=rotary_tables(),
    ),
)

_ROTARY_THEN_NORM: Final[tuple[Variant, ...]] = (
    Variant(
        name="hunyuan",
        spec=QKNormSpec(
            attention=_causal(4, 2, 1 / math.sqrt(8)),
            norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-5, k_epsilon=1e-5, weight_order="after_cast"),
            rotary=_BEFORE_NORM,
        ),
        head_size=8,
        summary="rotary, then RMSNorm with a gain",
        source=_family("hunyuan_v1_dense"),
        version=_VERSION,
        inputs=(*norm_gains(), *rotary_tables()),
    ),
    Variant(
        name="llama4",
        spec=QKNormSpec(
            attention=_causal(5, 1, 1 / math.sqrt(8)),
            norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-5, k_epsilon=1e-5),
            rotary=RotarySpec(order="before_norm", interleaved=True),
        ),
        head_size=8,
        summary="rotary of neighbouring pairs, then RMSNorm without a gain (there named L2Norm); chunked mask as a bias",
        source=_family("llama4"),
        version=_VERSION,
        inputs=(*rotary_tables("(S, R/2)"), attention_bias("(B, 1, S, T)", "bool mask")),
    ),
    Variant(
        name="llama4-nope",
        spec=QKNormSpec(attention=_causal(5, 1, 1 / math.sqrt(8))),
        head_size=8,
        summary="the layers of Llama 4 without rotary: no norm, a temperature that grows with the position",
        source=_family("llama4"),
        version=_VERSION,
        inputs=(query_scale("(1, 1, S, 1)"),),
    ),
    Variant(
        name="nanochat",
        spec=QKNormSpec(attention=_causal(6, 3, 1 / math.sqrt(8)), norm=_RMS, rotary=_BEFORE_NORM),
        head_size=8,
        summary="rotary, then RMSNorm without a gain; its pairs turn the other way: the sign of sin",
        source=_family("nanochat"),
        version=_VERSION,
        inputs=rotary_tables("(1, S, R/2)"),
    ),
    Variant(
        name="timesfm-2.5",
        spec=QKNormSpec(attention=_causal(4, 4, 1.0), norm=_RMS_GAIN_LAST, rotary=_BEFORE_NORM),
        head_size=10,
        summary="rotary, then RMSNorm, then a learned scale per value: softplus(s) * log2(e) / sqrt(D)",
        source=_family("timesfm2_5"),
        version=_VERSION,
        inputs=(*norm_gains(), query_scale("(D)", center=1 / math.sqrt(10)), *rotary_tables()),
    ),
    Variant(
        name="ngpt",
        spec=QKNormSpec(
            attention=_causal(4, 4, math.sqrt(8)),
            norm=NormSpec(q_kind="l2", k_kind="l2", epsilon_mode="clamp"),
            rotary=RotarySpec(order="before_norm", interleaved=True),
        ),
        head_size=8,
        summary="position factors, L2 without an epsilon, learned s_qk per head and value on both, scale sqrt(D)",
        source="https://github.com/NVIDIA/ngpt",
        version="model.py, commit 8b9fa27",
        inputs=(*norm_gains("H*D"), *rotary_tables("(S, R)")),
    ),
)

_SCALED: Final[tuple[Variant, ...]] = (
    Variant(
        name="beam",
        spec=QKNormSpec(attention=_causal(6, 2, 1 / math.sqrt(8)), norm=_RMS),
        head_size=8,
        summary="full-attention layers of Beam: no rotary, queries scaled by their position",
        source=_family("beam"),
        version=_VERSION,
        inputs=(*norm_gains(), query_scale("(B, 1, S, 1)")),
    ),
    Variant(
        name="inkling",
        spec=QKNormSpec(attention=_causal(4, 2, 1 / 8), norm=_RMS_GAIN_LAST),
        head_size=8,
        summary="scale 1 / D, no rotary, learned logits by relative position",
        source=_family("inkling"),
        version=_VERSION,
        inputs=(*norm_gains(), attention_bias("(B, Hq, S, T)", "logits")),
    ),
    Variant(
        name="dory",
        spec=QKNormSpec(
            attention=_causal(4, 1, 1 / math.sqrt(8)),
            norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6 / 8, k_epsilon=1e-6 / 8),
            rotary=_AFTER_NORM,
        ),
        head_size=8,
        summary="x / sqrt(sum + eps): RMSNorm with eps / D and gains of 1 / sqrt(D); (s_qk)^2 per value on q after rotary",
        source=_family("dory"),
        version=_VERSION,
        inputs=(*norm_gains(center=1 / math.sqrt(8)), *rotary_tables(), query_scale("(Hq, 1, D)", center=8.0)),
    ),
    Variant(
        name="zaya",
        spec=QKNormSpec(
            attention=_causal(8, 2, 1 / math.sqrt(8)),
            norm=NormSpec(q_kind="l2", k_kind="l2", q_epsilon=2**-23, k_epsilon=2**-23, epsilon_mode="clamp"),
            rotary=RotarySpec(order="after_norm", embedding_dim=4),
        ),
        head_size=8,
        summary="L2 with the type's own epsilon (float32 here), sqrt(D) and a temperature per key head as gains, partial rotary",
        source=_family("zaya"),
        version=_VERSION,
        inputs=(*norm_gains("H, D", center=math.sqrt(8)), *rotary_tables()),
    ),
    Variant(
        name="x-transformers-grouped-l2",
        spec=QKNormSpec(
            attention=_causal(4, 4, 10.0),
            norm=NormSpec(q_kind="l2", k_kind="l2", groups=2, q_epsilon=1e-12, k_epsilon=1e-12, epsilon_mode="clamp"),
            rotary=_AFTER_NORM,
        ),
        head_size=8,
        summary="L2 over groups inside a head, gains per head and value, fixed scale 10 (qk_norm_groups, qk_norm_dim_scale)",
        source="https://github.com/lucidrains/x-transformers",
        version="2.x",
        inputs=(*norm_gains("H, D"), *rotary_tables("(S, R/2)")),
    ),
    Variant(
        name="rms-epsilon-outside",
        spec=QKNormSpec(
            attention=_causal(4, 2, 1 / math.sqrt(8)),
            norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-3, k_epsilon=1e-4, epsilon_mode="outside_sqrt"),
            rotary=_AFTER_NORM,
        ),
        head_size=8,
        summary="epsilon added to the root mean square, as in the code of the RMSNorm paper; unlike epsilons of q and k",
        source="https://github.com/bzhangGo/rmsnorm",
        version="rmsnorm_torch.py",
        inputs=(*norm_gains(), *rotary_tables("(1, 1, S, R/2)")),
    ),
)

_NO_NORM: Final[tuple[Variant, ...]] = (
    Variant(
        name="gemma2",
        spec=QKNormSpec(attention=_causal(4, 2, 144**-0.5, softcap=50.0, window=4), rotary=_AFTER_NORM),
        head_size=8,
        summary="no norm of q and k: soft cap 50, query_pre_attn_scalar ** -0.5 (27B: 144), a window on every other layer",
        source=_family("gemma2"),
        version=_VERSION,
        inputs=rotary_tables(),
    ),
    Variant(
        name="softcap",
        spec=QKNormSpec(attention=_causal(4, 4, 1 / math.sqrt(8), softcap=2.0)),
        head_size=8,
        summary="the soft cap alone, small enough to act",
        source="https://arxiv.org/abs/2408.00118",
        inputs=(),
    ),
    Variant(
        name="internlm2",
        spec=QKNormSpec(attention=_causal(6, 2, 1 / math.sqrt(8)), rotary=_AFTER_NORM),
        head_size=8,
        summary="no norm of q and k: rotary and grouped queries",
        source="https://github.com/InternLM/InternLM",
        version="modeling_internlm2.py",
        inputs=rotary_tables(),
    ),
)

LANGUAGE_VARIANTS: Final[tuple[Variant, ...]] = _NORM_THEN_ROTARY + _ROTARY_THEN_NORM + _SCALED + _NO_NORM
