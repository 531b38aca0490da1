"""Chameleon (ChameleonAttention): LayerNorm of each head, gain and bias of each head after the cast, then rotary.

Read off transformers 5.24.
"""

from __future__ import annotations

from typing import Any, Final

from qknorm_onnx.spec.qk_norm_spec import NormSpec, QKNormSpec, RotarySpec
from qknorm_onnx.torch_export.huggingface.attention_fields import causal_attention

MODULE_TYPES = ("ChameleonAttention",)

# ChameleonLayerNorm passes this to F.layer_norm, whatever its own eps says.
EPSILON: Final = 1e-5


def read(attention: Any) -> QKNormSpec:
    """The spec of one attention module."""
    return QKNormSpec(
        attention=causal_attention(attention),
        norm=NormSpec(q_kind="layer", k_kind="layer", q_epsilon=EPSILON, k_epsilon=EPSILON, weight_order="after_cast"),
        rotary=RotarySpec(order="after_norm"),
    )
