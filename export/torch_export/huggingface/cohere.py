"""Command R+ (CohereAttention): LayerNorm of each head with a gain of its own for each head, then interleaved rotary.

Read off transformers 5.24.
"""

from __future__ import annotations

from typing import Any

from qknorm_onnx.spec.qk_norm_spec import NormSpec, QKNormSpec, RotarySpec
from qknorm_onnx.torch_export.huggingface.attention_fields import causal_attention

MODULE_TYPES = ("CohereAttention",)


def read(attention: Any) -> QKNormSpec | None:
    """The spec of one attention module; None where the configuration has no QK norm (plain Command R)."""
    if not attention.use_qk_norm:
        return None
    return QKNormSpec(
        attention=causal_attention(attention),
        norm=NormSpec(
            q_kind="layer",
            k_kind="layer",
            q_epsilon=attention.q_norm.variance_epsilon,
            k_epsilon=attention.k_norm.variance_epsilon,
        ),
        rotary=RotarySpec(order="after_norm", interleaved=True),
    )
