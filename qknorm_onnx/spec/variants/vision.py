"""Attention of published vision, audio and diffusion models, as their official or reference code computes it."""

from __future__ import annotations

import math
from typing import Final

from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormSpec, RotarySpec
from qknorm_onnx.spec.variants.variant import (
    TRANSFORMERS_VERSION,
    OptionalInput,
    Variant,
    attention_bias,
    norm_gains,
    query_scale,
    rotary_tables,
    transformers_source,
)

_DIFFUSERS: Final = "https://github.com/huggingface/diffusers/tree/v0.42.1/src/diffusers/models/transformers"

VISION_VARIANTS: Final[tuple[Variant, ...]] = (
    Variant(
        name="vit-22b",
        spec=QKNormSpec(
            attention=AttentionSpec(q_num_heads=3, kv_num_heads=3, scale=1 / math.sqrt(16)),
            norm=NormSpec(q_kind="layer", k_kind="layer", q_epsilon=1e-6, k_epsilon=1e-6),
        ),
        head_size=16,
        summary="LayerNorm without bias on q and k, 1 / sqrt(D) kept",
        source="https://arxiv.org/abs/2302.05442",
        version="section 2; no code was published",
        inputs=norm_gains(),
    ),
    Variant(
        name="swin-v2",
        spec=QKNormSpec(
            attention=AttentionSpec(q_num_heads=4, kv_num_heads=4, scale=1.0),
            norm=NormSpec(q_kind="l2", k_kind="l2", q_epsilon=1e-12, k_epsilon=1e-12, epsilon_mode="clamp"),
        ),
        head_size=8,
        summary="cosine attention, exp(min(logit_scale, log 100)) per head, logits by relative position",
        source=transformers_source("swinv2"),
        version=TRANSFORMERS_VERSION,
        inputs=(query_scale("(Hq, 1, 1)", center=10.0), attention_bias("(1, Hq, S, T)", "logits")),
    ),
    Variant(
        name="gemma4-vision",
        spec=QKNormSpec(
            attention=AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=1.0),
            norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6),
            rotary=RotarySpec(order="after_norm", sections=2),
        ),
        head_size=8,
        summary="two-dimensional rotary: halves inside each of two blocks, scale 1.0, both directions",
        source=transformers_source("gemma4"),
        version=TRANSFORMERS_VERSION,
        inputs=(*norm_gains(), *rotary_tables()),
    ),
    Variant(
        name="internvl-vision",
        spec=QKNormSpec(
            attention=AttentionSpec(q_num_heads=5, kv_num_heads=5, scale=1 / math.sqrt(8)),
            norm=NormSpec(q_kind="rms", k_kind="rms", axis="hidden", q_epsilon=1e-6, k_epsilon=1e-6, weight_order="after_cast"),
        ),
        head_size=8,
        summary="RMSNorm over the whole projection, no rotary (InternViT-6B, use_qk_norm)",
        source=transformers_source("internvl"),
        version=TRANSFORMERS_VERSION,
        inputs=norm_gains("H*D"),
    ),
    Variant(
        name="esmc",
        spec=QKNormSpec(
            attention=AttentionSpec(q_num_heads=3, kv_num_heads=3, scale=1 / math.sqrt(8)),
            norm=NormSpec(q_kind="layer", k_kind="layer", axis="hidden", q_epsilon=1e-5, k_epsilon=1e-5),
            rotary=RotarySpec(order="after_norm"),
        ),
        head_size=8,
        summary="LayerNorm without bias over the whole projection, rotary, both directions, padding mask",
        source=transformers_source("esmc"),
        version=TRANSFORMERS_VERSION,
        inputs=(*norm_gains("H*D"), *rotary_tables(), attention_bias("(B, 1, 1, T)", "bool mask")),
    ),
    Variant(
        name="mllama-cross",
        spec=QKNormSpec(
            attention=AttentionSpec(q_num_heads=4, kv_num_heads=1, scale=1 / math.sqrt(8)),
            norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-5, k_epsilon=1e-5, weight_order="after_cast"),
        ),
        head_size=8,
        summary="cross attention: text queries, image keys, no rotary",
        source=transformers_source("mllama"),
        version=TRANSFORMERS_VERSION,
        inputs=norm_gains(),
    ),
    Variant(
        name="local-vision",
        spec=QKNormSpec(
            attention=AttentionSpec(
                q_num_heads=4, kv_num_heads=4, scale=1 / math.sqrt(10), left_window_size=2, right_window_size=1
            ),
            norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6),
            rotary=RotarySpec(order="after_norm", embedding_dim=8, sections=2),
        ),
        head_size=10,
        summary="a window in both directions (encoders of T5Gemma 2, EmbeddingGemma 2), sections that leave a tail unrotated",
        source=transformers_source("t5gemma2"),
        version=TRANSFORMERS_VERSION,
        claim="composed",
        inputs=(*norm_gains(), *rotary_tables("(B, 1, S, R)")),
    ),
    Variant(
        name="wan",
        spec=QKNormSpec(
            attention=AttentionSpec(q_num_heads=4, kv_num_heads=4, scale=1 / math.sqrt(12)),
            norm=NormSpec(q_kind="rms", k_kind="rms", axis="hidden", q_epsilon=1e-6, k_epsilon=1e-6),
            rotary=RotarySpec(order="after_norm", interleaved=True),
        ),
        head_size=12,
        summary="RMSNorm over the whole projection, rotary of neighbouring pairs in three axes (one table)",
        source=f"{_DIFFUSERS}/transformer_wan.py",
        version="diffusers 0.42.1",
        inputs=(*norm_gains("H*D"), *rotary_tables("(1, S, R/2)")),
    ),
    Variant(
        name="ltx",
        spec=QKNormSpec(
            attention=AttentionSpec(q_num_heads=3, kv_num_heads=3, scale=1 / math.sqrt(6)),
            norm=NormSpec(q_kind="rms", k_kind="rms", axis="hidden", q_epsilon=1e-5, k_epsilon=1e-5),
            rotary=RotarySpec(order="after_norm", interleaved=True),
        ),
        head_size=6,
        summary="as Wan, without a gain; a table of its own for every head",
        source=f"{_DIFFUSERS}/transformer_ltx.py",
        version="diffusers 0.42.1",
        inputs=rotary_tables("(B, Hq, S, R/2)"),
    ),
    Variant(
        name="flux",
        spec=QKNormSpec(
            attention=AttentionSpec(q_num_heads=4, kv_num_heads=4, scale=1 / math.sqrt(8)),
            norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6),
            rotary=RotarySpec(order="after_norm", interleaved=True),
        ),
        head_size=8,
        summary="RMSNorm per head, rotary of neighbouring pairs (one stream of the single blocks)",
        source=f"{_DIFFUSERS}/transformer_flux.py",
        version="diffusers 0.42.1",
        inputs=(*norm_gains(), *rotary_tables("(S, R/2)")),
    ),
    Variant(
        name="cogview4",
        spec=QKNormSpec(
            attention=AttentionSpec(q_num_heads=4, kv_num_heads=4, scale=1 / math.sqrt(8)),
            norm=NormSpec(q_kind="layer", k_kind="layer", q_epsilon=1e-5, k_epsilon=1e-5),
            rotary=RotarySpec(order="after_norm"),
        ),
        head_size=8,
        summary="LayerNorm without gain and bias, then rotary",
        source=f"{_DIFFUSERS}/transformer_cogview4.py",
        version="diffusers 0.42.1",
        inputs=rotary_tables(),
    ),
    Variant(
        name="prx-text-keys",
        spec=QKNormSpec(
            attention=AttentionSpec(q_num_heads=4, kv_num_heads=4, scale=1 / math.sqrt(8)),
            norm=NormSpec(k_kind="rms", k_epsilon=1e-6),
        ),
        head_size=8,
        summary="only the keys are normalised",
        source=f"{_DIFFUSERS}/transformer_prx.py",
        version="diffusers 0.42.1",
        inputs=(OptionalInput(name="k_norm_weight", shape="(D)", values="gain"),),
    ),
    Variant(
        name="k-only-before-norm",
        spec=QKNormSpec(
            attention=AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=1 / math.sqrt(8), is_causal=True),
            norm=NormSpec(k_kind="layer", k_epsilon=1e-6),
            rotary=RotarySpec(order="before_norm"),
        ),
        head_size=8,
        summary="only the keys are normalised, after their rotary: sides of a node may differ",
        source="https://arxiv.org/abs/1607.06450",
        claim="composed",
        inputs=(
            OptionalInput(name="k_norm_weight", shape="(Hkv*D)", values="gain"),
            OptionalInput(name="k_norm_bias", shape="(Hkv*D)", values="bias"),
            *rotary_tables("(B, S, R)"),
        ),
    ),
)
