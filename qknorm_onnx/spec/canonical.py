"""The one normal form of a spec: two roads to the same attention (module, graph) must end in equal values."""

from __future__ import annotations

import dataclasses
import math
from typing import Final

from qknorm_onnx.spec.qk_norm_spec import UNLIMITED_WINDOW, AttentionSpec, NormSpec, QKNormSpec, RotarySpec, normalises, rotates
from qknorm_onnx.spec.signature import Dtype

SIGNIFICANT_DIGITS: Final = 6


def canonical(spec: QKNormSpec, *, dtype: Dtype = "float32") -> QKNormSpec:
    """`spec` with every field that has no effect at its default, and every number in one spelling.

    A graph in a wide `dtype` cannot show where a narrow type would round, so `norm_weight_order` and
    `softmax_precision` keep their value only for float16 and bfloat16. Numbers that an exporter split into float32
    square roots or folded with others are compared by six significant digits. What belongs to the weights rather than to
    the spec (1 + w folded, weights of ones dropped) is done where the node's inputs are made.
    """
    spec.check()
    narrow = dtype in ("float16", "bfloat16")
    return QKNormSpec(
        attention=_canonical_attention(spec.attention, narrow=narrow),
        norm=_canonical_norm(spec, narrow=narrow),
        rotary=_canonical_rotary(spec.rotary),
    )


def _canonical_attention(attention: AttentionSpec, *, narrow: bool) -> AttentionSpec:
    causal = attention.is_causal or attention.right_window_size == 0
    return dataclasses.replace(
        attention,
        scale=_rounded_scale(attention.scale),
        softcap=_rounded(attention.softcap),
        logit_clamp=_rounded(attention.logit_clamp),
        is_causal=causal,
        right_window_size=UNLIMITED_WINDOW if causal else attention.right_window_size,
        softmax_precision=attention.softmax_precision if narrow else "float32",
    )


def _canonical_norm(spec: QKNormSpec, *, narrow: bool) -> NormSpec:
    norm = spec.norm
    if not spec.has_norm:
        return NormSpec()
    single_head = spec.attention.q_num_heads == spec.attention.kv_num_heads == 1
    q_epsilon = _rounded(norm.q_epsilon) if normalises(norm.q_kind) else 0.0
    k_epsilon = _rounded(norm.k_epsilon) if normalises(norm.k_kind) else 0.0
    return dataclasses.replace(
        norm,
        axis="head" if single_head else norm.axis,
        q_epsilon=q_epsilon,
        k_epsilon=k_epsilon,
        weight_order=norm.weight_order if narrow else "before_cast",
    )


def _canonical_rotary(rotary: RotarySpec) -> RotarySpec:
    return rotary if rotates(rotary.order) else RotarySpec()


def _rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def _rounded_scale(scale: float) -> float:
    """Scales are mostly roots of integers or their reciprocals: those are recognised first, others are rounded."""
    if scale <= 0:
        return _rounded(scale)
    for square, root in ((scale**2, math.sqrt), (scale**-2, lambda n: 1 / math.sqrt(n))):
        nearest = round(square)
        if 1 <= nearest <= 1 << 16 and abs(square / nearest - 1) < 2e-6:
            return root(nearest)
    return _rounded(scale)
