"""Gemma 3: RMS norm of each head with gain 1 + w in float32, then rotary; its own scale (transformers 5.24, Gemma3Attention).

`attn_logit_softcapping` is in the configuration but never reaches the attention: it is not part of the spec.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from qknorm_onnx.spec.qk_norm_spec import NormSpec, QKNormSpec, RotarySpec
from qknorm_onnx.torch_export.huggingface.attention_fields import causal_attention

MODULE_TYPES = ("Gemma3Attention",)


def read(attention: Any) -> QKNormSpec:
    """The spec of one attention module."""
    visibility = causal_attention(attention, sliding_window=attention.sliding_window)
    if not attention.is_causal:  # use_bidirectional_attention: the window is open to both sides
        visibility = dataclasses.replace(visibility, is_causal=False, right_window_size=visibility.left_window_size)
    return QKNormSpec(
        attention=visibility,
        norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=attention.q_norm.eps, k_epsilon=attention.k_norm.eps),
        rotary=RotarySpec(order="after_norm"),
    )
