"""Attention of published models that rotate q and k before they norm them, as their official or reference code computes it."""

from __future__ import annotations

import math
from typing import Final

from qknorm_onnx.spec.qk_norm_spec import NormSpec, QKNormSpec, RotarySpec
from qknorm_onnx.spec.variants.variant import (
    TRANSFORMERS_VERSION,
    Variant,
    attention_bias,
    causal_attention,
    norm_gains,
    query_scale,
    rotary_tables,
    transformers_source,
)

_RMS: Final = NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6)
_RMS_GAIN_LAST: Final = NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6, weight_order="after_cast")
_BEFORE_NORM: Final = RotarySpec(order="before_norm")

ROTARY_FIRST_VARIANTS: Final[tuple[Variant, ...]] = (
    Variant(
        name="hunyuan",
        spec=QKNormSpec(
            attention=causal_attention(4, 2, 1 / math.sqrt(8)),
            norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-5, k_epsilon=1e-5, weight_order="after_cast"),
            rotary=_BEFORE_NORM,
        ),
        head_size=8,
        summary="rotary, then RMSNorm with a gain",
        source=transformers_source("hunyuan_v1_dense"),
        version=TRANSFORMERS_VERSION,
        inputs=(*norm_gains(), *rotary_tables()),
    ),
    Variant(
        name="llama4",
        spec=QKNormSpec(
            attention=causal_attention(5, 1, 1 / math.sqrt(8)),
            norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-5, k_epsilon=1e-5),
            rotary=RotarySpec(order="before_norm", interleaved=True),
        ),
        head_size=8,
        summary="rotary of neighbouring pairs, then RMSNorm without a gain (there named L2Norm); chunked mask as a bias",
        source=transformers_source("llama4"),
        version=TRANSFORMERS_VERSION,
        inputs=(*rotary_tables("(S, R/2)"), attention_bias("(B, 1, S, T)", "bool mask")),
    ),
    Variant(
        name="llama4-nope",
        spec=QKNormSpec(attention=causal_attention(5, 1, 1 / math.sqrt(8))),
        head_size=8,
        summary="the layers of Llama 4 without rotary: no norm, a temperature that grows with the position",
        source=transformers_source("llama4"),
        version=TRANSFORMERS_VERSION,
        inputs=(query_scale("(1, 1, S, 1)"),),
    ),
    Variant(
        name="nanochat",
        spec=QKNormSpec(attention=causal_attention(6, 3, 1 / math.sqrt(8)), norm=_RMS, rotary=_BEFORE_NORM),
        head_size=8,
        summary="rotary, then RMSNorm without a gain; its pairs turn the other way: the sign of sin",
        source=transformers_source("nanochat"),
        version=TRANSFORMERS_VERSION,
        inputs=rotary_tables("(1, S, R/2)"),
    ),
    Variant(
        name="timesfm-2.5",
        spec=QKNormSpec(attention=causal_attention(4, 4, 1.0), norm=_RMS_GAIN_LAST, rotary=_BEFORE_NORM),
        head_size=10,
        summary="rotary, then RMSNorm, then a learned scale per value: softplus(s) * log2(e) / sqrt(D)",
        source=transformers_source("timesfm2_5"),
        version=TRANSFORMERS_VERSION,
        inputs=(*norm_gains(), query_scale("(D)", center=1 / math.sqrt(10)), *rotary_tables()),
    ),
    Variant(
        name="ngpt",
        spec=QKNormSpec(
            attention=causal_attention(4, 4, math.sqrt(8)),
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
