"""What a spec computes, in NumPy and float64: the one meaning that everything else is derived from or checked against.

Written from the papers and the models' official code, one function per stage; `variants/` names the sources. The
stages: split heads, norm, rotary, scale of q, cache, logits, visibility, softmax, values. Dimension letters and tensor
names follow `signature.py`. Fields that only say where a narrow type rounds (`norm_weight_order`, `softmax_precision`)
have no effect here: this is the exact value that every rounding is judged against.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, assert_never

import numpy as np
import numpy.typing as npt

from qknorm_onnx.spec.qk_norm_spec import (
    AttentionSpec,
    EpsilonMode,
    NormKind,
    QKNormRotarySpec,
    QKNormSpec,
    RotarySpec,
    normalises,
    rotates_after_norm,
    rotates_before_norm,
    spans_heads,
)
from qknorm_onnx.spec.shape_inference import check_attention_inputs, check_cache_length, check_rotary_inputs
from qknorm_onnx.spec.signature import FARTHEST_POSITION

Array = npt.NDArray[Any]  # float64, computed here
Tensor = npt.NDArray[Any]  # any type, as given

# The denominator of a norm is at least this, so that an all-zero row gives 0 / tiny = 0 where epsilon is 0.
TINY = float(np.finfo(np.float64).tiny)


def qk_norm_attention(spec: QKNormSpec, inputs: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """`QKNormAttention` in float64.

    Args:
        spec: the node's meaning.
        inputs: by the names and with the shapes of `signature.ATTENTION_INPUTS`, in any float type; None is absent.

    Returns:
        `Y` (B, S, Hq*Dv), `present_key` (B, Hkv, T, D) and `present_value` (B, Hkv, T, Dv).

    Raises:
        SpecError: shapes that contradict the spec or each other, or a length out of range; the message names the input.
    """
    scores = attention_scores(spec, inputs)
    sink = inputs.get("head_sink")
    weights = softmax_of_visible(scores.logits, scores.visible, sink=None if sink is None else _as_float64(np.asarray(sink)))
    y_bhsd = weigh_values(weights, _without_unused_entries(scores.present_value, scores.valid_keys))
    return {"Y": merge_heads(y_bhsd), "present_key": scores.present_key, "present_value": scores.present_value}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionScores:
    """What the softmax of one attention gets: `logits` (B, Hq, S, T), scaled, clamped, capped, with a float bias added, and
    `visible`, which of them count, of a shape that broadcasts to that. `valid_keys` (B): how much of the cache is filled.
    """

    logits: Array
    visible: npt.NDArray[np.bool_]
    present_key: Array
    present_value: Array
    valid_keys: Tensor | None


def attention_scores(spec: QKNormSpec, inputs: Mapping[str, Tensor | None]) -> AttentionScores:
    """`QKNormAttention` as far as its softmax, in float64; arguments and errors are those of `qk_norm_attention`."""
    given = {name: np.asarray(value) for name, value in inputs.items() if value is not None}
    shapes = {name: value.shape for name, value in given.items()}
    check_attention_inputs(spec, shapes)
    tensors = {name: _as_float64(value) for name, value in given.items()}

    query_bhsd = _prepare_side(spec.query_preparation, tensors, "query")
    key_bhsd = _prepare_side(spec.key_preparation, tensors, "key")
    value_bhsd = split_heads(tensors["value"], spec.attention.kv_num_heads).transpose(0, 2, 1, 3)
    cache_length = given.get("cache_length")
    if cache_length is not None:
        total = check_cache_length(shapes, [int(valid) for valid in cache_length])
        tensors |= {name: with_room(tensors[name], total) for name in ("past_key", "past_value")}
    present_key = append_to_cache(tensors.get("past_key"), key_bhsd, cache_length)
    present_value = append_to_cache(tensors.get("past_value"), value_bhsd, cache_length)

    logits = attention_logits(spec.attention, query_bhsd, present_key)
    bias = whole_bias(given.get("attention_bias"), present_key.shape[2])
    if bias is not None and bias.dtype != np.bool_:
        logits = logits + _as_float64(bias)
    valid_keys = None if cache_length is None else cache_length + key_bhsd.shape[2]
    visible = visible_keys(
        spec.attention,
        num_queries=query_bhsd.shape[2],
        num_keys=present_key.shape[2],
        first_query=first_query_positions(given, query_bhsd.shape[0]),
        valid_keys=valid_keys,
    )
    visible &= columns_of_bias(given.get("attention_bias"), present_key.shape[2])
    if bias is not None and bias.dtype == np.bool_:
        visible = visible & bias
    return AttentionScores(
        logits=logits, visible=visible, present_key=present_key, present_value=present_value, valid_keys=valid_keys
    )


def qk_norm_rotary(spec: QKNormRotarySpec, inputs: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """`QKNormRotary` in float64: `Y` (B, S, H*D) for `inputs` as in `signature.ROTARY_INPUTS`. Raises SpecError on bad shapes."""
    given = {name: np.asarray(value) for name, value in inputs.items() if value is not None}
    check_rotary_inputs(spec, {name: value.shape for name, value in given.items()})
    tensors = {name: _as_float64(value) for name, value in given.items()}
    y_bhsd = prepare(
        spec,
        tensors["x"],
        weight=tensors.get("weight"),
        bias=tensors.get("bias"),
        scale=tensors.get("scale"),
        cos=tensors.get("cos"),
        sin=tensors.get("sin"),
    )
    return {"Y": merge_heads(y_bhsd)}


def prepare(
    spec: QKNormRotarySpec,
    x: Array,
    *,
    weight: Array | None = None,
    bias: Array | None = None,
    scale: Array | None = None,
    cos: Array | None = None,
    sin: Array | None = None,
) -> Array:
    """Norm, rotary and scale of projected x (B, S, H*D), in the order that the spec says; returns (B, H, S, D)."""
    x_bshd = split_heads(x, spec.num_heads)
    if rotates_before_norm(spec.rotary.order):
        x_bshd = rotate(spec.rotary, x_bshd, cos, sin)
    x_bshd = normalize(spec, x_bshd)
    if weight is not None:
        x_bshd = x_bshd * per_head(weight, x_bshd)
    if bias is not None:
        x_bshd = x_bshd + per_head(bias, x_bshd)
    if rotates_after_norm(spec.rotary.order):
        x_bshd = rotate(spec.rotary, x_bshd, cos, sin)
    x_bhsd = x_bshd.transpose(0, 2, 1, 3)
    return x_bhsd if scale is None else x_bhsd * scale


def _prepare_side(spec: QKNormRotarySpec, tensors: Mapping[str, Array], name: str) -> Array:
    """`prepare` of the input `query` or `key` of an attention node, with its own gain and bias and the common tables."""
    return prepare(
        spec,
        tensors[name],
        weight=tensors.get(f"{name[0]}_norm_weight"),
        bias=tensors.get(f"{name[0]}_norm_bias"),
        scale=tensors.get("q_scale") if name == "query" else None,
        cos=tensors.get("cos"),
        sin=tensors.get("sin"),
    )


def split_heads(x: Array, num_heads: int) -> Array:
    """(B, S, H*D) -> (B, S, H, D)."""
    return x.reshape(*x.shape[:2], num_heads, x.shape[2] // num_heads)


def merge_heads(x_bhsd: Array) -> Array:
    """(B, H, S, D) -> (B, S, H*D)."""
    batch, num_heads, length, head_size = x_bhsd.shape
    return x_bhsd.transpose(0, 2, 1, 3).reshape(batch, length, num_heads * head_size)


def per_head(parameter: Array, x_bshd: Array) -> Array:
    """A gain or bias of shape (D), (H, D) or (H*D), as (D) or (H, D)."""
    head_size = x_bshd.shape[3]
    return parameter if parameter.shape == (head_size,) else parameter.reshape(x_bshd.shape[2], head_size)


def normalize(spec: QKNormRotarySpec, x_bshd: Array) -> Array:
    """x over its statistics, without gain and bias. RMSNorm arXiv 1910.07467, LayerNorm 1607.06450, L2 QK-Norm 2010.04245."""
    if not normalises(spec.kind):
        return x_bshd
    batch, length, num_heads, head_size = x_bshd.shape
    rows = (1, num_heads * head_size) if spans_heads(spec.axis) else (num_heads, head_size)
    grouped = x_bshd.reshape(batch, length, rows[0], spec.groups, rows[1] // spec.groups)
    rows_of_kind, size = _rows_and_size(spec.kind, grouped)
    return (rows_of_kind / _denominator(size, spec.epsilon, spec.epsilon_mode)).reshape(x_bshd.shape)


def _rows_and_size(kind: NormKind, rows: Array) -> tuple[Array, Array]:
    """What is divided, and what by: the rows (`layer`: centred), and the size of each without its epsilon."""
    match kind:
        case "none":
            return rows, np.ones_like(rows[..., :1])
        case "rms":
            return rows, _root(np.mean, rows)
        case "layer":
            shifted = rows - rows[..., :1]  # first, so that a constant row is exactly zero, whatever its mean rounds to
            centred = shifted - shifted.mean(-1, keepdims=True)
            return centred, _root(np.mean, centred)
        case "l2":
            return rows, _root(np.sum, rows)
        case _:
            assert_never(kind)


def _root(mean_or_sum: Callable[..., Array], rows: Array) -> Array:
    """The root of the mean or sum of each row's squares, scaled by the largest value so that no square overflows."""
    largest = np.maximum(np.abs(rows).max(-1, keepdims=True, initial=0.0), TINY)
    return np.asarray(largest * np.sqrt(mean_or_sum(np.square(rows / largest), axis=-1, keepdims=True)))


def _denominator(size: Array, epsilon: float, mode: EpsilonMode) -> Array:
    match mode:
        case "inside_sqrt":
            size = np.hypot(size, np.sqrt(epsilon))
        case "clamp":
            size = np.maximum(size, epsilon)
        case "outside_sqrt":
            size = size + epsilon
        case _:
            assert_never(mode)
    return np.maximum(size, TINY)


def rotate(spec: RotarySpec, x_bshd: Array, cos: Array | None, sin: Array | None) -> Array:
    """Rotary position embedding (arXiv 2104.09864) of the values that the spec names; the others pass unchanged."""
    assert cos is not None and sin is not None, "check_attention_inputs requires both tables"
    size = spec.rotated_size(x_bshd.shape[3])
    rotated = x_bshd[..., spec.offset : spec.offset + size]
    cos_bshr, sin_bshr = (_table_per_value(spec, table, size) for table in (cos, sin))
    blocks = rotated.reshape(*rotated.shape[:3], spec.sections, size // spec.sections)
    turned = _quarter_turn(blocks, interleaved=spec.interleaved).reshape(rotated.shape)
    out = x_bshd.copy()
    out[..., spec.offset : spec.offset + size] = rotated * cos_bshr + turned * sin_bshr
    return out


def _quarter_turn(blocks: Array, *, interleaved: bool) -> Array:
    """(x1, x2) -> (-x2, x1) for each pair of the last axis."""
    out = np.empty_like(blocks)
    half = blocks.shape[-1] // 2
    first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, half), slice(half, None))
    out[..., first], out[..., second] = -blocks[..., second], blocks[..., first]
    return out


def _table_per_value(spec: RotarySpec, table: Array, size: int) -> Array:
    """A table (S, W), (B, S, W) or (B, H, S, W) as one factor per rotated value, broadcastable to (B, S, H, R)."""
    if table.shape[-1] != size:  # one factor per pair
        pairs = table.reshape(*table.shape[:-1], spec.sections, size // 2 // spec.sections)
        repeated = np.repeat(pairs, 2, axis=-1) if spec.interleaved else np.concatenate([pairs, pairs], axis=-1)
        table = repeated.reshape(*table.shape[:-1], size)
    return table.transpose(0, 2, 1, 3) if table.ndim == 4 else table[..., :, None, :]


def append_to_cache(past: Array | None, new_bhsd: Array, cache_length: Tensor | None) -> Array:
    """past ++ new, or past with the new entries written behind the valid ones of each row."""
    if past is None:
        return new_bhsd
    if cache_length is None:
        return np.concatenate([past, new_bhsd], axis=2)
    present = past.copy()
    for row, valid in enumerate(cache_length.astype(np.int64)):
        present[row, :, int(valid) : int(valid) + new_bhsd.shape[2]] = new_bhsd[row]
    return present


def with_room(past: Array, total: int) -> Array:
    """past with zeros behind it, `total` entries in all: what neither the past had nor the new tokens fill."""
    return np.pad(past, [(0, 0), (0, 0), (0, total - past.shape[2]), (0, 0)])


def columns_of_bias(bias: Tensor | None, num_keys: int) -> npt.NDArray[np.bool_]:
    """Which keys a bias has a column for, (T); one column, or none at all, is for every key."""
    columns = num_keys if bias is None or bias.ndim == 0 or bias.shape[-1] == 1 else bias.shape[-1]
    return np.arange(num_keys) < columns


def whole_bias(bias: Tensor | None, num_keys: int) -> Tensor | None:
    """A bias with 0 or False for the keys behind its last column, which are not seen."""
    if bias is None or bias.ndim == 0 or bias.shape[-1] in (1, num_keys):
        return bias
    return np.pad(bias, [(0, 0)] * (bias.ndim - 1) + [(0, num_keys - bias.shape[-1])])


def attention_logits(spec: AttentionSpec, query_bhsd: Array, key_bhsd: Array) -> Array:
    """scale * q.k, clamped, then soft-capped (cap * tanh(logit / cap), Gemma 2): (B, Hq, S, T). No masks yet."""
    keys = np.repeat(key_bhsd, spec.group_size, axis=1)
    logits = spec.scale * (query_bhsd @ keys.transpose(0, 1, 3, 2))
    if spec.logit_clamp:
        logits = np.clip(logits, -spec.logit_clamp, spec.logit_clamp)
    if spec.softcap:
        logits = spec.softcap * np.tanh(logits / spec.softcap)
    return logits


def first_query_positions(given: Mapping[str, Tensor], batch: int) -> Tensor:
    """Key position of each row's first query (B): behind the valid cache or the past, at `query_offset`, else 0."""
    for name in ("cache_length", "query_offset"):
        if name in given:
            return given[name].astype(np.int64)
    past_length = given["past_key"].shape[2] if "past_key" in given else 0
    return np.full(batch, past_length, dtype=np.int64)


def visible_keys(
    spec: AttentionSpec, *, num_queries: int, num_keys: int, first_query: Tensor, valid_keys: Tensor | None
) -> npt.NDArray[np.bool_]:
    """Which keys each query may see by causality, windows and the filled part of the cache: (B, 1, S, T)."""
    first = np.clip(first_query.astype(np.int64), -FARTHEST_POSITION, FARTHEST_POSITION)
    positions = first[:, None] + np.arange(num_queries)
    distance = positions[:, None, :, None] - np.arange(num_keys)
    visible = np.ones(distance.shape, dtype=np.bool_)
    if spec.is_causal:
        visible &= distance >= 0
    if spec.left_window_size >= 0:
        visible &= distance <= spec.left_window_size
    if spec.right_window_size >= 0:
        visible &= -distance <= spec.right_window_size
    if valid_keys is not None:
        visible &= np.arange(num_keys) < valid_keys.astype(np.int64)[:, None, None, None]
    return visible


def softmax_of_visible(logits: Array, visible: Tensor, *, sink: Array | None) -> Array:
    """Softmax over the visible keys, with an optional sink logit (Hq) in the denominator. A row that sees nothing is zero."""
    masked = np.where(visible, logits, -np.inf)
    ceiling = masked.max(-1, keepdims=True, initial=-np.inf)
    if sink is not None:
        ceiling = np.maximum(ceiling, sink[:, None, None])
    ceiling = np.where(np.isfinite(ceiling), ceiling, 0.0)
    weights = np.exp(masked - ceiling)
    total = weights.sum(-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink[:, None, None] - ceiling)
    return weights / np.where(total > 0, total, 1.0)


def weigh_values(weights: Array, value_bhsd: Array) -> Array:
    """(B, Hq, S, T) x (B, Hkv, T, Dv) -> (B, Hq, S, Dv)."""
    values = np.repeat(value_bhsd, weights.shape[1] // value_bhsd.shape[1], axis=1)
    return np.asarray(weights @ values)


def _without_unused_entries(value_bhsd: Array, valid_keys: Tensor | None) -> Array:
    """Zeros for the entries of a fixed-size cache that were never written: they may hold anything, NaN included."""
    if valid_keys is None:
        return value_bhsd
    used = np.arange(value_bhsd.shape[2]) < valid_keys.astype(np.int64)[:, None]
    return np.where(used[:, None, :, None], value_bhsd, 0.0)


def _as_float64(value: Tensor) -> Array:
    return value.astype(np.float64)
