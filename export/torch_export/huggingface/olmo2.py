"""OLMo 2 and 3 (Olmo2Attention): RMS norm over all heads before the head split, gain in float32, then rotary.

Read off transformers 5.24.
"""

from __future__ import annotations

from typing import Any

from qknorm_onnx.spec.qk_norm_spec import NormSpec, QKNormSpec, RotarySpec
from qknorm_onnx.torch_export.huggingface.attention_fields import causal_attention

MODULE_TYPES = ("Olmo2Attention", "Olmo3Attention")


def read(attention: Any) -> QKNormSpec:
    """The spec of one attention module."""
    return QKNormSpec(
        attention=causal_attention(attention, sliding_window=getattr(attention, "sliding_window", None)),
        norm=NormSpec(
            q_kind="rms",
            k_kind="rms",
            axis="hidden",
            q_epsilon=attention.q_norm.variance_epsilon,
            k_epsilon=attention.k_norm.variance_epsilon,
        ),
        rotary=RotarySpec(order="after_norm"),
    )
