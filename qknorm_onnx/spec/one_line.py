"""A spec in one line for people, as `qknorm-onnx inspect` shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from qknorm_onnx.spec.qk_norm_spec import (
    AttentionSpec,
    EpsilonMode,
    NormKind,
    NormSpec,
    QKNormRotarySpec,
    QKNormSpec,
    RotarySpec,
    normalises,
    rotates,
    rotates_before_norm,
    spans_heads,
)


def one_line(spec: QKNormSpec, *, query: Sequence[QKNormRotarySpec] = (), key: Sequence[QKNormRotarySpec] = ()) -> str:
    """For example `rms eps 1e-06, then rotary, 16:8 heads, scale 0.0884, causal, window 4096`.

    query, key: what nodes of their own do to queries and keys in front of the attention, one for each stream.
    """
    spec.check()
    own = _in_order(_norm(spec.norm), _rotary(spec.rotary), spec.rotary)
    prepared = ", then ".join(part for part in (_in_front(query, key), own) if part) or "q and k as they come"
    return ", ".join([prepared, *_attention(spec.attention)])


def _in_front(query: Sequence[QKNormRotarySpec], key: Sequence[QKNormRotarySpec]) -> str:
    """For example `q rms eps 1e-06, then rotary; k rms eps 1e-05; in nodes of their own`."""
    sides = [(name, dict.fromkeys(map(_preparation, specs))) for name, specs in (("q", query), ("k", key))]
    parts = [f"{name} {' or '.join(texts)}" for name, texts in sides if texts]
    return f"{'; '.join(parts)}; in {'nodes' if len(parts) > 1 else 'a node'} of their own" if parts else ""


def _preparation(spec: QKNormRotarySpec) -> str:
    norm = _with_details(_one_norm(spec.kind, spec.epsilon), spec) if normalises(spec.kind) else ""
    return _in_order(norm, _rotary(spec.rotary), spec.rotary) or "as it comes"


def _in_order(norm: str, rotary: str, spec: RotarySpec) -> str:
    order = [rotary, norm] if rotates_before_norm(spec.order) else [norm, rotary]
    return ", then ".join(part for part in order if part)


def _norm(norm: NormSpec) -> str:
    if not normalises(norm.q_kind) and not normalises(norm.k_kind):
        return ""
    if norm.q_kind == norm.k_kind and norm.q_epsilon == norm.k_epsilon:
        text = _one_norm(norm.q_kind, norm.q_epsilon)
    else:
        text = f"q {_one_norm(norm.q_kind, norm.q_epsilon)} and k {_one_norm(norm.k_kind, norm.k_epsilon)}"
    return _with_details(text, norm)


def _with_details(text: str, norm: NormSpec | QKNormRotarySpec) -> str:
    text += _epsilon_place(norm.epsilon_mode)
    if spans_heads(norm.axis):
        text += " over all heads"
    if norm.groups > 1:
        text += f" in {norm.groups} groups"
    return text


def _epsilon_place(mode: EpsilonMode) -> str:
    match mode:
        case "inside_sqrt":
            return ""
        case "clamp":
            return " (clamp)"
        case "outside_sqrt":
            return " (outside sqrt)"
        case _:
            assert_never(mode)


def _one_norm(kind: NormKind, epsilon: float) -> str:
    return f"{kind} eps {epsilon:.3g}" if normalises(kind) else "un-normed"


def _rotary(rotary: RotarySpec) -> str:
    if not rotates(rotary.order):
        return ""
    text = "interleaved rotary" if rotary.interleaved else "rotary"
    if rotary.embedding_dim:
        text += f" of values {rotary.offset} to {rotary.offset + rotary.embedding_dim - 1}"
    if rotary.sections > 1:
        text += f" in {rotary.sections} sections"
    return text


def _attention(attention: AttentionSpec) -> list[str]:
    parts = [f"{attention.q_num_heads}:{attention.kv_num_heads} heads", f"scale {attention.scale:.4g}"]
    if attention.logit_clamp:
        parts.append(f"logits clamped to {attention.logit_clamp:.4g}")
    if attention.softcap:
        parts.append(f"soft cap {attention.softcap:.4g}")
    if attention.is_causal:
        parts.append("causal")
    left, right = attention.left_window_size, attention.right_window_size
    if attention.is_causal and left >= 0:
        parts.append(f"window {left + 1}")
    elif left >= 0 or right >= 0:
        parts.append(f"window -{left if left >= 0 else '∞'} to +{right if right >= 0 else '∞'}")
    return parts
