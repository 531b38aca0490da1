"""Attention of published language models that norm before they rotate, or do not rotate, as their reference code computes it.

Read in transformers 5.24.0 (`models/<family>/modeling_<family>.py`) unless another source is given. A window of W tokens is
`left_window_size` W - 1. `1 + w` gains are folded into the weight, so the inputs hold gains.
"""

from __future__ import annotations

import math
from typing import Final

from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormSpec, RotarySpec
from qknorm_onnx.spec.variants.variant import (
    TRANSFORMERS_VERSION,
    OptionalInput,
    Variant,
    attention_bias,
    causal_attention,
    norm_gains,
    query_scale,
    rotary_tables,
    transformers_source,
)

# Statistics and gain in float32, then one cast down (OLMo 2, Gemma, Cohere) or the gain after the cast (Qwen3, HunYuan).
_RMS: Final = NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6)
_RMS_GAIN_LAST: Final = NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6, weight_order="after_cast")
_LAYER: Final = NormSpec(q_kind="layer", k_kind="layer", q_epsilon=1e-5, k_epsilon=1e-5)
_AFTER_NORM: Final = RotarySpec(order="after_norm")


_NORM_THEN_ROTARY: Final[tuple[Variant, ...]] = (
    Variant(
        name="qwen3",
        spec=QKNormSpec(attention=causal_attention(4, 2, 1 / math.sqrt(8)), norm=_RMS_GAIN_LAST, rotary=_AFTER_NORM),
        head_size=8,
        summary="RMSNorm per head, then rotary; the gain multiplies after the cast down",
        source=transformers_source("qwen3"),
        version=TRANSFORMERS_VERSION,
        inputs=(*norm_gains(), *rotary_tables()),
    ),
    Variant(
        name="gemma3",
        spec=QKNormSpec(attention=causal_attention(4, 2, 168**-0.5), norm=_RMS, rotary=_AFTER_NORM),
        head_size=10,
        summary="RMSNorm with a gain of 1 + w in float32, query_pre_attn_scalar ** -0.5 (27B: 168), no soft cap",
        source=transformers_source("gemma3"),
        version=TRANSFORMERS_VERSION,
        inputs=(*norm_gains(), *rotary_tables()),
    ),
    Variant(
        name="gemma3-sliding",
        spec=QKNormSpec(attention=causal_attention(8, 4, 256**-0.5, window=3), norm=_RMS, rotary=_AFTER_NORM),
        head_size=6,
        summary="the local layers of Gemma 3: a window, here of three tokens",
        source=transformers_source("gemma3"),
        version=TRANSFORMERS_VERSION,
        inputs=(*norm_gains(), *rotary_tables("(S, R/2)")),
    ),
    Variant(
        name="gemma3n",
        spec=QKNormSpec(attention=causal_attention(6, 2, 1.0), norm=_RMS, rotary=_AFTER_NORM),
        head_size=8,
        summary="scale 1.0 (Gemma 3n, Gemma 4 text); V has a norm of its own, outside",
        source=transformers_source("gemma3n"),
        version=TRANSFORMERS_VERSION,
        inputs=(*norm_gains(), *rotary_tables()),
    ),
    Variant(
        name="olmo2",
        spec=QKNormSpec(
            attention=causal_attention(4, 2, 1 / math.sqrt(8)),
            norm=NormSpec(q_kind="rms", k_kind="rms", axis="hidden", q_epsilon=1e-5, k_epsilon=1e-5),
            rotary=_AFTER_NORM,
        ),
        head_size=8,
        summary="RMSNorm over the whole projection, before the head split",
        source=transformers_source("olmo2"),
        version=TRANSFORMERS_VERSION,
        inputs=(*norm_gains("H*D"), *rotary_tables()),
    ),
    Variant(
        name="olmo3-sliding",
        spec=QKNormSpec(
            attention=causal_attention(6, 3, 1 / math.sqrt(10), window=4),
            norm=NormSpec(q_kind="rms", k_kind="rms", axis="hidden", q_epsilon=1e-5, k_epsilon=1e-5),
            rotary=_AFTER_NORM,
        ),
        head_size=10,
        summary="as OLMo 2; three of four layers of OLMo 3 have a window, here of four tokens",
        source=transformers_source("olmo3"),
        version=TRANSFORMERS_VERSION,
        inputs=(*norm_gains("H*D"), *rotary_tables()),
    ),
    Variant(
        name="minimax-m2",
        spec=QKNormSpec(
            attention=causal_attention(6, 1, 1 / math.sqrt(12)),
            norm=NormSpec(q_kind="rms", k_kind="rms", axis="hidden", q_epsilon=1e-6, k_epsilon=1e-6, weight_order="after_cast"),
            rotary=RotarySpec(order="after_norm", embedding_dim=4),
        ),
        head_size=12,
        summary="RMSNorm over the whole projection, rotary on the first values of a head",
        source=transformers_source("minimax_m2"),
        version=TRANSFORMERS_VERSION,
        inputs=(*norm_gains("H*D"), *rotary_tables()),
    ),
    Variant(
        name="command-r-plus",
        spec=QKNormSpec(
            attention=causal_attention(4, 2, 1 / math.sqrt(8)),
            norm=_LAYER,
            rotary=RotarySpec(order="after_norm", interleaved=True),
        ),
        head_size=8,
        summary="LayerNorm without bias, gains per head and value, rotary of neighbouring pairs (use_qk_norm)",
        source=transformers_source("cohere"),
        version=TRANSFORMERS_VERSION,
        inputs=(*norm_gains("H, D"), *rotary_tables()),
    ),
    Variant(
        name="chameleon",
        spec=QKNormSpec(attention=causal_attention(4, 2, 1 / math.sqrt(8)), norm=_LAYER, rotary=_AFTER_NORM),
        head_size=8,
        summary="LayerNorm over each head, gain and bias per head and value",
        source=transformers_source("chameleon"),
        version=TRANSFORMERS_VERSION,
        inputs=(*norm_gains("H, D", biased=True), *rotary_tables()),
    ),
    Variant(
        name="stablelm",
        spec=QKNormSpec(
            attention=causal_attention(4, 4, 1 / math.sqrt(16)),
            norm=_LAYER,
            rotary=RotarySpec(order="after_norm", embedding_dim=4),
        ),
        head_size=16,
        summary="one LayerNorm without bias for every head, a quarter of the head is rotated (qk_layernorm)",
        source=transformers_source("stablelm"),
        version=TRANSFORMERS_VERSION,
        inputs=(*norm_gains("H, D"), *rotary_tables()),
    ),
    Variant(
        name="phi",
        spec=QKNormSpec(
            attention=causal_attention(5, 5, 1 / math.sqrt(8)),
            norm=_LAYER,
            rotary=RotarySpec(order="after_norm", embedding_dim=4),
        ),
        head_size=8,
        summary="LayerNorm with bias shared by the heads, half of the head is rotated (qk_layernorm; Persimmon likewise)",
        source=transformers_source("phi"),
        version=TRANSFORMERS_VERSION,
        inputs=(*norm_gains(biased=True), *rotary_tables()),
    ),
    Variant(
        name="qwen3-next",
        spec=QKNormSpec(
            attention=causal_attention(4, 1, 1 / math.sqrt(16)), norm=_RMS, rotary=RotarySpec(order="after_norm", embedding_dim=4)
        ),
        head_size=16,
        summary="1 + w gains, a quarter of the head is rotated; the output gate is outside",
        source=transformers_source("qwen3_next"),
        version=TRANSFORMERS_VERSION,
        inputs=(*norm_gains(), *rotary_tables()),
    ),
    Variant(
        name="flint",
        spec=QKNormSpec(attention=causal_attention(4, 2, 1 / math.sqrt(8), window=4), norm=_RMS, rotary=_AFTER_NORM),
        head_size=8,
        summary="a window and attention sinks: one more logit per head in the softmax denominator",
        source=transformers_source("flint"),
        version=TRANSFORMERS_VERSION,
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
        source=transformers_source("doge"),
        version=TRANSFORMERS_VERSION,
        inputs=(*norm_gains(), *rotary_tables(), attention_bias("(B, Hq, S, T)", "float mask")),
    ),
    Variant(
        name="deepseek-v4",
        spec=QKNormSpec(
            attention=causal_attention(6, 1, 1 / math.sqrt(12), window=4),
            norm=_RMS,
            rotary=RotarySpec(order="after_norm", interleaved=True, embedding_dim=4, offset=8),
        ),
        head_size=12,
        summary="one key head, queries without a gain, rotary on the tail, sinks; the value is the prepared key",
        source=transformers_source("deepseek_v4"),
        version=TRANSFORMERS_VERSION,
        inputs=(
            OptionalInput(name="k_norm_weight", shape="(D)", values="gain"),
            *rotary_tables(),
            OptionalInput(name="head_sink", shape="(Hq)", values="logits"),
        ),
    ),
    Variant(
        name="muse",
        spec=QKNormSpec(
            attention=causal_attention(4, 1, 2.0 / math.sqrt(8)),
            norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-5, k_epsilon=1e-5),
            rotary=_AFTER_NORM,
        ),
        head_size=8,
        summary="RMSNorm without a gain, a constant factor of the queries folded into the scale",
        source=transformers_source("muse_glimmer"),
        version=TRANSFORMERS_VERSION,
        inputs=rotary_tables(),
    ),
)

_SCALED: Final[tuple[Variant, ...]] = (
    Variant(
        name="beam",
        spec=QKNormSpec(attention=causal_attention(6, 2, 1 / math.sqrt(8)), norm=_RMS),
        head_size=8,
        summary="full-attention layers of Beam: no rotary, queries scaled by their position",
        source=transformers_source("beam"),
        version=TRANSFORMERS_VERSION,
        inputs=(*norm_gains(), query_scale("(B, 1, S, 1)")),
    ),
    Variant(
        name="inkling",
        spec=QKNormSpec(attention=causal_attention(4, 2, 1 / 8), norm=_RMS_GAIN_LAST),
        head_size=8,
        summary="scale 1 / D, no rotary, learned logits by relative position",
        source=transformers_source("inkling"),
        version=TRANSFORMERS_VERSION,
        inputs=(*norm_gains(), attention_bias("(B, Hq, S, T)", "logits")),
    ),
    Variant(
        name="dory",
        spec=QKNormSpec(
            attention=causal_attention(4, 1, 1 / math.sqrt(8)),
            norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6 / 8, k_epsilon=1e-6 / 8),
            rotary=_AFTER_NORM,
        ),
        head_size=8,
        summary="x / sqrt(sum + eps): RMSNorm with eps / D and gains of 1 / sqrt(D); (s_qk)^2 per value on q after rotary",
        source=transformers_source("dory"),
        version=TRANSFORMERS_VERSION,
        inputs=(*norm_gains(center=1 / math.sqrt(8)), *rotary_tables(), query_scale("(Hq, 1, D)", center=8.0)),
    ),
    Variant(
        name="zaya",
        spec=QKNormSpec(
            attention=causal_attention(8, 2, 1 / math.sqrt(8)),
            norm=NormSpec(q_kind="l2", k_kind="l2", q_epsilon=2**-23, k_epsilon=2**-23, epsilon_mode="clamp"),
            rotary=RotarySpec(order="after_norm", embedding_dim=4),
        ),
        head_size=8,
        summary="L2 with the type's own epsilon (float32 here), sqrt(D) and a temperature per key head as gains, partial rotary",
        source=transformers_source("zaya"),
        version=TRANSFORMERS_VERSION,
        inputs=(*norm_gains("H, D", center=math.sqrt(8)), *rotary_tables()),
    ),
    Variant(
        name="x-transformers-grouped-l2",
        spec=QKNormSpec(
            attention=causal_attention(4, 4, 10.0),
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
            attention=causal_attention(4, 2, 1 / math.sqrt(8)),
            norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-3, k_epsilon=1e-4, epsilon_mode="outside_sqrt"),
            rotary=_AFTER_NORM,
        ),
        head_size=8,
        summary="epsilon added to the root mean square, as in the code of the RMSNorm paper; unlike epsilons of q and k",
        source="https://github.com/bzhangGo/rmsnorm",
        version="rmsnorm_torch.py",
        claim="composed",
        inputs=(*norm_gains(), *rotary_tables("(1, 1, S, R/2)")),
    ),
)

_NO_NORM: Final[tuple[Variant, ...]] = (
    Variant(
        name="gemma2",
        spec=QKNormSpec(attention=causal_attention(4, 2, 144**-0.5, softcap=50.0, window=4), rotary=_AFTER_NORM),
        head_size=8,
        summary="no norm of q and k: soft cap 50, query_pre_attn_scalar ** -0.5 (27B: 144), a window on every other layer",
        source=transformers_source("gemma2"),
        version=TRANSFORMERS_VERSION,
        inputs=rotary_tables(),
    ),
    Variant(
        name="softcap",
        spec=QKNormSpec(attention=causal_attention(4, 4, 1 / math.sqrt(8), softcap=2.0)),
        head_size=8,
        summary="the soft cap alone, small enough to act",
        source="https://arxiv.org/abs/2408.00118",
        claim="composed",
    ),
    Variant(
        name="internlm2",
        spec=QKNormSpec(attention=causal_attention(6, 2, 1 / math.sqrt(8)), rotary=_AFTER_NORM),
        head_size=8,
        summary="no norm of q and k: rotary and grouped queries",
        source="https://github.com/InternLM/InternLM",
        version="modeling_internlm2.py",
        inputs=rotary_tables(),
    ),
)

LANGUAGE_VARIANTS: Final[tuple[Variant, ...]] = _NORM_THEN_ROTARY + _SCALED + _NO_NORM
