"""The forms that explainers of QK-Norm describe, as described. Where a model's official code does otherwise, the name ends
in `-article` and the official form is in `language.py` or `vision.py`; `docs/semantics.md` has the list.
"""

from __future__ import annotations

import math
from typing import Final

from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormSpec, RotarySpec
from qknorm_onnx.spec.variants.variant import Variant, norm_gains, query_scale, rotary_tables

_HENRY: Final = "https://arxiv.org/abs/2010.04245"
_L2: Final = NormSpec(q_kind="l2", k_kind="l2", q_epsilon=1e-12, k_epsilon=1e-12, epsilon_mode="clamp")
_RMS: Final = NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6)
_LAYER: Final = NormSpec(q_kind="layer", k_kind="layer", q_epsilon=1e-5, k_epsilon=1e-5)
_ATTENTION: Final = AttentionSpec(q_num_heads=4, kv_num_heads=4, scale=1 / math.sqrt(8))
_UNSCALED: Final = AttentionSpec(q_num_heads=4, kv_num_heads=4, scale=1.0)

ARTICLE_VARIANTS: Final[tuple[Variant, ...]] = (
    Variant(
        name="l2-tau-per-head",
        spec=QKNormSpec(attention=_UNSCALED, norm=_L2),
        head_size=8,
        summary="F.normalize on q and k, a learned temperature per head that starts at sqrt(D), no mask",
        source=_HENRY,
        claim="article",
        inputs=(query_scale("(Hq, 1, 1)", center=math.sqrt(8)),),
    ),
    Variant(
        name="cosnorm-scalar-tau",
        spec=QKNormSpec(attention=_UNSCALED, norm=_L2),
        head_size=8,
        summary="cosine attention with one learned temperature",
        source=_HENRY,
        claim="article",
        inputs=(query_scale("()", center=10.0),),
    ),
    Variant(
        name="rms-norm",
        spec=QKNormSpec(attention=_ATTENTION, norm=_RMS),
        head_size=8,
        summary="RMSNorm with D gains per head, 1/sqrt(D) kept",
        source="https://arxiv.org/abs/1910.07467",
        claim="article",
        inputs=norm_gains("H, D"),
    ),
    Variant(
        name="layer-norm-per-head",
        spec=QKNormSpec(attention=_ATTENTION, norm=_LAYER),
        head_size=8,
        summary="LayerNorm over the values of each head, 2 D parameters per head",
        source="https://arxiv.org/abs/1607.06450",
        claim="article",
        inputs=norm_gains("H, D", biased=True),
    ),
    Variant(
        name="group-norm-in-head",
        spec=QKNormSpec(
            attention=AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=1 / math.sqrt(12)),
            norm=NormSpec(q_kind="layer", k_kind="layer", groups=3, q_epsilon=1e-5, k_epsilon=1e-5),
        ),
        head_size=12,
        summary="GroupNorm of three groups inside every head",
        source="https://arxiv.org/abs/1803.08494",
        claim="article",
        inputs=norm_gains("H*D", biased=True),
    ),
    Variant(
        name="group-norm-over-heads",
        spec=QKNormSpec(attention=_ATTENTION, norm=_LAYER),
        head_size=8,
        summary="nn.GroupNorm(heads, heads * D) on each token: per-head LayerNorm with one gain and bias per channel",
        source="https://arxiv.org/abs/1803.08494",
        claim="article",
        inputs=norm_gains("H*D", biased=True),
    ),
    Variant(
        name="vit-22b-article",
        spec=QKNormSpec(attention=AttentionSpec(q_num_heads=3, kv_num_heads=3, scale=1.0), norm=_L2),
        head_size=16,
        summary="claimed for ViT-22B: L2 and a learned temperature",
        source="https://arxiv.org/abs/2302.05442",
        claim="article",
        inputs=(query_scale("(1, Hq, 1, 1)", center=4.0),),
    ),
    Variant(
        name="gemma2-article",
        spec=QKNormSpec(
            attention=AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=144**-0.5, softcap=50.0, is_causal=True),
            norm=_RMS,
            rotary=RotarySpec(order="before_norm"),
        ),
        head_size=10,
        summary="claimed for Gemma 2: RMSNorm after rotary, together with the soft cap",
        source="https://arxiv.org/abs/2408.00118",
        claim="article",
        inputs=(*norm_gains(), *rotary_tables()),
    ),
    Variant(
        name="chameleon-article",
        spec=QKNormSpec(
            attention=AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=1 / math.sqrt(8), is_causal=True),
            norm=_RMS,
            rotary=RotarySpec(order="after_norm"),
        ),
        head_size=8,
        summary="claimed for Chameleon: RMSNorm on q and k",
        source="https://arxiv.org/abs/2405.09818",
        claim="article",
        inputs=(*norm_gains("H, D"), *rotary_tables()),
    ),
    Variant(
        name="internlm2-article",
        spec=QKNormSpec(
            attention=AttentionSpec(q_num_heads=6, kv_num_heads=2, scale=1 / math.sqrt(8), is_causal=True),
            norm=NormSpec(q_kind="layer", k_kind="layer", groups=2, q_epsilon=1e-5, k_epsilon=1e-5),
            rotary=RotarySpec(order="after_norm"),
        ),
        head_size=8,
        summary="claimed for InternLM 2: GroupNorm, here of two groups in every head",
        source="https://arxiv.org/abs/2403.17297",
        claim="article",
        inputs=(*norm_gains(biased=True), *rotary_tables()),
    ),
    Variant(
        name="rms-softcap",
        spec=QKNormSpec(
            attention=AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=1 / math.sqrt(8), softcap=5.0, is_causal=True),
            norm=_RMS,
            rotary=RotarySpec(order="after_norm"),
        ),
        head_size=8,
        summary="QK-Norm and soft cap together, as can be configured in litgpt; no published model was found to do so",
        source="https://github.com/Lightning-AI/litgpt",
        claim="article",
        inputs=(*norm_gains(), *rotary_tables()),
    ),
    Variant(
        name="logit-clamp",
        spec=QKNormSpec(
            attention=AttentionSpec(q_num_heads=4, kv_num_heads=4, scale=1 / math.sqrt(8), logit_clamp=0.75, is_causal=True)
        ),
        head_size=8,
        summary="clamped logits instead of a norm; no published model was found to do so",
        source="https://arxiv.org/abs/1706.03762",
        claim="article",
    ),
    Variant(
        name="rms-logit-clamp",
        spec=QKNormSpec(
            attention=AttentionSpec(q_num_heads=4, kv_num_heads=1, scale=0.5, logit_clamp=1.5, is_causal=True), norm=_RMS
        ),
        head_size=7,
        summary="QK-Norm and clamped logits, an odd head size",
        source="https://arxiv.org/abs/1910.07467",
        claim="composed",
        inputs=norm_gains(),
    ),
    Variant(
        name="scaled-attention",
        spec=QKNormSpec(attention=_ATTENTION),
        head_size=8,
        summary="softmax(q k / sqrt(D)) v, no norm",
        source="https://arxiv.org/abs/1706.03762",
        claim="official",
    ),
)
