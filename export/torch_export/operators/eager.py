"""The operators in plain torch ops: what `torch_op.py` runs outside a graph, and what its gradients come from.

Stage by stage the same as `qknorm_onnx.spec.reference`, which says why; dimension letters as in `signature.py`. Norm
statistics, gains, rotary, logits and softmax are computed in the wider of float32 and the inputs' type, so that float64
inputs are computed in float64 throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

import torch
from torch import Tensor

from qknorm_onnx.spec.qk_norm_spec import (
    AttentionSpec,
    EpsilonMode,
    NormKind,
    QKNormRotarySpec,
    QKNormSpec,
    RotarySpec,
    SoftmaxPrecision,
    needs_float64,
    normalises,
    rotates_after_norm,
    rotates_before_norm,
    rounds_before_weight,
    spans_heads,
)

Tensors = Mapping[str, Tensor]
Outputs = tuple[Tensor, Tensor, Tensor]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that inputs of `dtype` are computed in: the wider of it and float32."""
    return torch.promote_types(dtype, torch.float32)


def attention(spec: QKNormSpec, inputs: Tensors) -> Outputs:
    """Y (B, S, Hq*Dv), present_key (B, Hkv, T, D) and present_value (B, Hkv, T, Dv) in the type of the query.

    `inputs` are those of `signature.ATTENTION_INPUTS` that are present, with shapes that were checked before.
    """
    spec.check()
    dtype = inputs["query"].dtype
    query_bhsd = prepare(spec.query_preparation, _preparation_inputs(inputs, "query", "q_norm", scale="q_scale"))
    key_bhsd = prepare(spec.key_preparation, _preparation_inputs(inputs, "key", "k_norm"))
    value_bhsd = _split_heads(inputs["value"], spec.attention.kv_num_heads).transpose(1, 2)
    cache_length = inputs.get("cache_length")
    present_key = append_to_cache(inputs.get("past_key"), key_bhsd, cache_length)
    present_value = append_to_cache(inputs.get("past_value"), value_bhsd, cache_length)

    new_keys, all_keys = key_bhsd.shape[2], present_key.shape[2]
    used = None if cache_length is None else _entries(all_keys, present_key) < (cache_length + new_keys)[:, None]
    wide = query_bhsd.dtype
    keys, values = (_without_unused_entries(cache.to(wide), used) for cache in (present_key, present_value))
    logits = attention_logits(spec.attention, query_bhsd, keys)
    visible = visible_keys(spec.attention, logits, _first_query_positions(inputs, logits), used)
    bias, seen = _whole_bias(inputs, all_keys)
    if seen is not None:
        visible = seen if visible is None else visible & seen
    if bias is not None and bias.dtype == torch.bool:
        visible = bias if visible is None else visible & bias
    elif bias is not None:
        logits = logits + bias.to(logits.dtype)
    weights = softmax_of_visible(logits, visible, inputs.get("head_sink"))
    y_bhsd = _weigh_values(weights.to(wide), values)
    y = y_bhsd.transpose(1, 2).flatten(2)
    return y.to(dtype), present_key.to(dtype), present_value.to(dtype)


def rotary(spec: QKNormRotarySpec, inputs: Tensors) -> Tensor:
    """Y (B, S, H*D) of `QKNormRotary` for the `signature.ROTARY_INPUTS` that are present."""
    spec.check()
    return prepare(spec, inputs).transpose(1, 2).flatten(2).to(inputs["x"].dtype)


def _preparation_inputs(inputs: Tensors, x: str, norm: str, *, scale: str = "") -> dict[str, Tensor]:
    names = {"x": x, "weight": f"{norm}_weight", "bias": f"{norm}_bias", "scale": scale, "cos": "cos", "sin": "sin"}
    return {role: inputs[name] for role, name in names.items() if name in inputs}


def prepare(spec: QKNormRotarySpec, inputs: Tensors) -> Tensor:
    """Norm, rotary and scale of projected x (B, S, H*D), in the compute type: (B, H, S, D)."""
    x, dtype = inputs["x"], compute_dtype(inputs["x"].dtype)
    x_bshd = _split_heads(x, spec.num_heads).to(dtype)
    if rotates_before_norm(spec.rotary.order):
        x_bshd = rotate(spec.rotary, x_bshd, inputs)
    x_bshd = normalize(spec, x_bshd)
    if rounds_before_weight(spec.weight_order) and normalises(spec.kind):
        x_bshd = x_bshd.to(x.dtype).to(dtype)
    if "weight" in inputs:
        x_bshd = x_bshd * _per_head(inputs["weight"], x_bshd)
    if "bias" in inputs:
        x_bshd = x_bshd + _per_head(inputs["bias"], x_bshd)
    if rotates_after_norm(spec.rotary.order):
        x_bshd = rotate(spec.rotary, x_bshd, inputs)
    x_bhsd = x_bshd.transpose(1, 2)
    return x_bhsd * inputs["scale"].to(dtype) if "scale" in inputs else x_bhsd


def _split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, S, H*D) -> (B, S, H, D)."""
    return x.reshape(x.shape[0], x.shape[1], num_heads, x.shape[2] // num_heads)


def _split_last(x: Tensor, parts: int) -> Tensor:
    """(..., n) -> (..., parts, n / parts)."""
    return x.reshape(*x.shape[:-1], parts, x.shape[-1] // parts)


def _by_key_head(x: Tensor, kv_num_heads: int) -> Tensor:
    """(B, Hq, S, n) -> (B, Hkv, Hq / Hkv, S, n)."""
    return x.reshape(x.shape[0], kv_num_heads, x.shape[1] // kv_num_heads, *x.shape[2:])


def _per_head(parameter: Tensor, x_bshd: Tensor) -> Tensor:
    """A gain or bias of shape (D), (H, D) or (H*D), as (D) or (H, D)."""
    one_for_all = parameter.ndim == 1 and parameter.shape[0] == x_bshd.shape[3]
    return (parameter if one_for_all else parameter.reshape(x_bshd.shape[2], x_bshd.shape[3])).to(x_bshd.dtype)


def normalize(spec: QKNormRotarySpec, x_bshd: Tensor) -> Tensor:
    """x over its statistics, without gain and bias."""
    if not normalises(spec.kind):
        return x_bshd
    rows = x_bshd.flatten(2) if spans_heads(spec.axis) else x_bshd
    grouped = _split_last(rows, spec.groups)
    grouped, size = _rows_and_size(spec.kind, grouped)
    tiny = torch.finfo(grouped.dtype).tiny
    denominator = _denominator(size, spec.epsilon, spec.epsilon_mode).clamp_min(tiny)
    # Where only the bound keeps the denominator from zero there is no derivative; 1 / tiny would overflow to infinity.
    grouped = torch.where(denominator > tiny, grouped, grouped.detach())
    return (grouped / denominator).reshape(x_bshd.shape)


def _rows_and_size(kind: NormKind, rows: Tensor) -> tuple[Tensor, Tensor]:
    """What is divided, and what by: the rows (`layer`: centred), and the size of each without its epsilon."""
    match kind:
        case "none":
            return rows, torch.ones_like(rows[..., :1])
        case "rms":
            return rows, _length(rows) * rows.shape[-1] ** -0.5
        case "layer":
            centred = rows - rows.mean(-1, keepdim=True)
            return centred, _length(centred) * rows.shape[-1] ** -0.5
        case "l2":
            return rows, _length(rows)
        case _:
            assert_never(kind)


def _length(rows: Tensor) -> Tensor:
    """The Euclidean norm of each row. The scaling keeps every square in range and cancels."""
    largest = rows.detach().abs().amax(-1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
    size = torch.linalg.vector_norm(rows / largest, dim=-1, keepdim=True)  # its gradient at a zero row is zero
    return largest * size


def _denominator(size: Tensor, epsilon: float, mode: EpsilonMode) -> Tensor:
    match mode:
        case "inside_sqrt":
            return torch.hypot(size, torch.full_like(size, epsilon).sqrt()) if epsilon else size
        case "clamp":
            return size.clamp_min(epsilon)
        case "outside_sqrt":
            return size + epsilon
        case _:
            assert_never(mode)


def rotate(spec: RotarySpec, x_bshd: Tensor, inputs: Tensors) -> Tensor:
    """Rotary position embedding of the values that the spec names; the others pass unchanged."""
    size = spec.rotated_size(x_bshd.shape[3])
    cos, sin = (_table_per_value(spec, inputs[name].to(x_bshd.dtype), size) for name in ("cos", "sin"))
    rotated = x_bshd[..., spec.offset : spec.offset + size]
    blocks = _split_last(rotated, spec.sections)
    out = rotated * cos + _quarter_turn(blocks, interleaved=spec.interleaved).flatten(-2) * sin
    parts = (x_bshd[..., : spec.offset], out, x_bshd[..., spec.offset + size :])
    return torch.cat([part for part in parts if part.shape[-1]], dim=-1)


def _quarter_turn(blocks: Tensor, *, interleaved: bool) -> Tensor:
    """(x1, x2) -> (-x2, x1) for each pair of the last axis."""
    if interleaved:
        return torch.stack([-blocks[..., 1::2], blocks[..., 0::2]], dim=-1).flatten(-2)
    first, second = blocks.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def _table_per_value(spec: RotarySpec, table: Tensor, size: int) -> Tensor:
    """A table (S, W), (B, S, W) or (B, H, S, W) as one factor per rotated value, broadcastable to (B, S, H, R)."""
    if table.shape[-1] != size:  # one factor per pair
        pairs = _split_last(table, spec.sections)
        repeated = pairs.repeat_interleave(2, dim=-1) if spec.interleaved else torch.cat([pairs, pairs], dim=-1)
        table = repeated.flatten(-2)
    return table.transpose(1, 2) if table.ndim == 4 else table.unsqueeze(-2)


def append_to_cache(past: Tensor | None, new_bhsd: Tensor, cache_length: Tensor | None) -> Tensor:
    """past ++ new, or past with the new entries written behind the `cache_length` valid ones of each row; it grows for them."""
    if past is None:
        return new_bhsd
    past = past.to(new_bhsd.dtype)
    if cache_length is None:
        return torch.cat([past, new_bhsd], dim=2)
    missing = int(cache_length.max()) + new_bhsd.shape[2] - past.shape[2] if cache_length.numel() else 0
    past = torch.nn.functional.pad(past, (0, 0, 0, max(missing, 0)))
    places = cache_length[:, None] + _entries(new_bhsd.shape[2], new_bhsd)
    return past.scatter(2, places[:, None, :, None].expand(new_bhsd.shape), new_bhsd)


def _whole_bias(inputs: Tensors, num_keys: int) -> tuple[Tensor | None, Tensor | None]:
    """The bias, with zeros for keys behind its last column where it lacks some, and which keys (T) are not behind it."""
    bias = inputs.get("attention_bias")
    if bias is None or "cache_length" not in inputs or bias.ndim == 0 or bias.shape[-1] in (1, num_keys):
        return bias, None
    columns = bias.shape[-1]
    return torch.nn.functional.pad(bias, (0, num_keys - columns)), _entries(num_keys, bias) < columns


def _entries(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)


def _without_unused_entries(cache_bhtd: Tensor, used: Tensor | None) -> Tensor:
    """Zeros for the entries of a fixed-size cache that were never written: they may hold NaN, and 0 * NaN is NaN."""
    return cache_bhtd if used is None else torch.where(used[:, None, :, None], cache_bhtd, 0.0)


def attention_logits(spec: AttentionSpec, query_bhsd: Tensor, key_bhtd: Tensor) -> Tensor:
    """scale * q.k, clamped, then soft-capped: (B, Hq, S, T), in the spec's softmax precision at least. No masks yet."""
    grouped = _by_key_head(query_bhsd, spec.kv_num_heads)
    products = (grouped @ key_bhtd.unsqueeze(2).transpose(-1, -2)).flatten(1, 2)
    logits = spec.scale * products.to(_logit_dtype(products.dtype, spec.softmax_precision))
    if spec.logit_clamp:
        logits = logits.clamp(-spec.logit_clamp, spec.logit_clamp)
    if spec.softcap:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    return logits


def _logit_dtype(dtype: torch.dtype, precision: SoftmaxPrecision) -> torch.dtype:
    """The type of logits and softmax: `dtype`, which is float32 at least, or float64 where that is asked for."""
    return torch.float64 if needs_float64(precision) else dtype


def _first_query_positions(inputs: Tensors, logits: Tensor) -> Tensor:
    """Key position of each row's first query, (B) or one number for all rows."""
    for name in ("cache_length", "query_offset"):
        if name in inputs:
            return inputs[name]
    past_length = inputs["past_key"].shape[2] if "past_key" in inputs else 0
    return torch.full((1,), past_length, device=logits.device, dtype=torch.int64)


def visible_keys(spec: AttentionSpec, logits: Tensor, first_query: Tensor, used: Tensor | None) -> Tensor | None:
    """Which keys each query may see, (B or 1, 1, S, T): causality, windows, the filled part of the cache. None is all."""
    if not spec.is_causal and spec.left_window_size < 0 and spec.right_window_size < 0 and used is None:
        return None
    queries = first_query[:, None] + _entries(logits.shape[2], logits)
    distance = queries[:, None, :, None] - _entries(logits.shape[3], logits)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if spec.is_causal:
        visible = visible & (distance >= 0)
    if spec.left_window_size >= 0:
        visible = visible & (distance <= spec.left_window_size)
    if spec.right_window_size >= 0:
        visible = visible & (distance >= -spec.right_window_size)
    return visible if used is None else visible & used[:, None, None, :]


def softmax_of_visible(logits: Tensor, visible: Tensor | None, sink: Tensor | None) -> Tensor:
    """Softmax over the visible keys, with an optional sink logit (Hq) in the denominator. A row that sees nothing is zero."""
    if visible is not None:
        logits = torch.where(visible, logits, -torch.inf)
    # Without a sink, one more key that nobody sees: a row without keys then needs no case of its own.
    extra = logits.new_full((1, 1, 1), -torch.inf) if sink is None else sink.to(logits.dtype)[:, None, None]
    extended = torch.cat([logits, extra.expand(*logits.shape[:3], 1)], dim=-1)
    ceiling = extended.detach().amax(-1, keepdim=True)
    ceiling = torch.where(ceiling.isfinite(), ceiling, 0.0)
    weights = torch.exp(extended - ceiling)
    total = weights.sum(-1, keepdim=True)
    return weights[..., :-1] / torch.where(total > 0, total, 1.0)


def _weigh_values(weights: Tensor, value_bhtd: Tensor) -> Tensor:
    """(B, Hq, S, T) x (B, Hkv, T, Dv) -> (B, Hq, S, Dv)."""
    grouped = _by_key_head(weights, value_bhtd.shape[1])
    return (grouped @ value_bhtd.unsqueeze(2)).flatten(1, 2)
