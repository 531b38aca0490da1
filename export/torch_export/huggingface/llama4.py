"""Llama 4 text: interleaved (complex) rotary, then RMS norm without gain (transformers 5.24, Llama4TextAttention).

Layers without rotary are not normalised: theirs is plain attention. The chunked mask of the others is no causal window:
it stays an input of the attention.
"""

from __future__ import annotations

from typing import Any

from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormSpec, RotarySpec
from qknorm_onnx.torch_export.huggingface.attention_fields import head_counts, model_precision

MODULE_TYPES = ("Llama4TextAttention",)


def read(attention: Any) -> QKNormSpec | None:
    """The spec of one attention module; None for a layer without QK norm."""
    if not hasattr(attention, "qk_norm"):
        return None
    heads, kv_heads = head_counts(attention)
    eager = attention.config._attn_implementation == "eager"
    chunked = attention.config.attention_chunk_size is not None
    epsilon = attention.qk_norm.eps
    return QKNormSpec(
        attention=AttentionSpec(
            q_num_heads=heads,
            kv_num_heads=kv_heads,
            scale=float(attention.scaling),
            is_causal=not chunked,
            softmax_precision=model_precision(attention) if eager else "float32",
        ),
        norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=epsilon, k_epsilon=epsilon),
        rotary=RotarySpec(order="before_norm", interleaved=True),
    )
