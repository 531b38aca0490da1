"""Spec and tensors as the argument groups of the Triton kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, assert_never

import torch
import triton
import triton.language as tl
from torch import Tensor

from qknorm_onnx.custom_ops.kernels.cuda import arguments
from qknorm_onnx.custom_ops.kernels.cuda.arguments import Logits, Mask, Positions, Rotary, Rows, Side
from qknorm_onnx.spec.qk_norm_spec import (
    AttentionSpec,
    EpsilonMode,
    NormKind,
    QKNormRotarySpec,
    normalises,
    rotates,
    rotates_after_norm,
    rotates_before_norm,
    rounds_before_weight,
    spans_heads,
)

TYPES: Final = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
UNLIMITED: Final = 1 << 30
UNROTATED_SECTION: Final = 16  # any multiple of 16: it only divides


def pointer(tensor: Tensor | None, instead: Tensor) -> Any:
    """`tensor` as a pointer to the type of `instead`, which stands for one that is absent."""
    if tensor is None or tensor.dtype == instead.dtype:
        return instead if tensor is None else tensor
    return triton.reinterpret(tensor, TYPES[instead.dtype])


def flag_value(bit: Any) -> int:
    """A bit of `arguments` as an int."""
    return int(bit.value)


def flags_of(spec: QKNormRotarySpec, inputs: Mapping[str, Tensor]) -> int:
    """`Side.flags` of one preparation with the inputs `weight`, `bias`, `scale`, `cos` that are given."""
    wide = {name: name in inputs and inputs[name].dtype == torch.float32 for name in ("weight", "bias", "scale", "cos")}
    size = inputs["x"].shape[2] // spec.num_heads
    table = inputs["cos"].shape[-1] if rotates(spec.rotary.order) else 0
    of_norm = {*_flags_of_kind(spec.kind), *(_flags_of_epsilon(spec.epsilon_mode) if normalises(spec.kind) else ())}
    bits = dict.fromkeys(of_norm, True) | {
        "ROUNDED": rounds_before_weight(spec.weight_order),
        "WEIGHT": "weight" in inputs,
        "WEIGHT_FLOAT32": wide["weight"],
        "BIAS": "bias" in inputs,
        "BIAS_FLOAT32": wide["bias"],
        "ROTATED_FIRST": rotates_before_norm(spec.rotary.order),
        "ROTATED_LAST": rotates_after_norm(spec.rotary.order),
        "TABLE_FLOAT32": wide["cos"],
        "TABLE_WIDE": table > 0 and table == spec.rotary.rotated_size(size),
        "SCALE": "scale" in inputs,
        "SCALE_FLOAT32": wide["scale"],
    }
    return sum(flag_value(getattr(arguments, name)) for name, value in bits.items() if value)


def _flags_of_kind(kind: NormKind) -> tuple[str, ...]:
    match kind:
        case "none":
            return ()
        case "rms" | "l2":
            return ("NORMALISED",)
        case "layer":
            return ("NORMALISED", "CENTRED")
        case _:
            assert_never(kind)


def _inverse_count(kind: NormKind, count: int) -> float:
    """1 / (the values that a mean of squares is over), 1 for their sum."""
    match kind:
        case "none" | "rms" | "layer":
            return 1.0 / count
        case "l2":
            return 1.0
        case _:
            assert_never(kind)


def _flags_of_epsilon(mode: EpsilonMode) -> tuple[str, ...]:
    match mode:
        case "inside_sqrt":
            return ()
        case "clamp":
            return ("CLAMPED",)
        case "outside_sqrt":
            return ("EPSILON_OUTSIDE",)
        case _:
            assert_never(mode)


def needs_statistics(spec: QKNormRotarySpec) -> bool:
    """Whether a normalised row is not one head: `row_statistics` must run first."""
    return normalises(spec.kind) and (spans_heads(spec.axis) or spec.groups > 1)


def _strides(tensor: Tensor | None, target: tuple[int, ...]) -> tuple[int, ...]:
    return (0, 0, 0, 0) if tensor is None else tuple(torch.broadcast_to(tensor, target).stride())


def side_of(spec: QKNormRotarySpec, inputs: Mapping[str, Tensor], statistics: Tensor | None) -> Side:
    """Queries or keys `x` (B, L, H*D) with what prepares them; see `Side`."""
    x = inputs["x"]
    size = x.shape[2] // spec.num_heads
    row = x.shape[2] if spans_heads(spec.axis) else size
    group_size = max(row // spec.groups, 1)
    gain, bias, scale = inputs.get("weight"), inputs.get("bias"), inputs.get("scale")
    scales = _strides(scale, (x.shape[0], spec.num_heads, x.shape[1], size))
    return Side(
        x=x,
        batch_stride=x.stride(0),
        row_stride=x.stride(1),
        weight=pointer(gain, x),
        weight_stride=_head_stride(gain, size),
        bias=pointer(bias, x),
        bias_stride=_head_stride(bias, size),
        scale=pointer(scale, x),
        scale_batch=scales[0],
        scale_head=scales[1],
        scale_row=scales[2],
        scale_column=scales[3],
        statistics=torch.empty(1, dtype=torch.float32, device=x.device) if statistics is None else statistics,
        groups=x.shape[2] // group_size,
        group_size=group_size,
        flags=flags_of(spec, inputs),
        epsilon=float(spec.epsilon),
        inverse_count=_inverse_count(spec.kind, group_size),
    )


def _head_stride(parameter: Tensor | None, size: int) -> int:
    return 0 if parameter is None or parameter.shape == (size,) else size


def rotary_of(spec: QKNormRotarySpec, inputs: Mapping[str, Tensor]) -> Rotary:
    """The tables as (B, H, S, W) with strides of 0 where they are repeated."""
    x = inputs["x"]
    if not rotates(spec.rotary.order):
        return Rotary(x, x, 0, 0, 0, 0, UNROTATED_SECTION, 0)
    cos, sin = (_four_axes(inputs[name]) for name in ("cos", "sin"))
    strides = _strides(cos, (x.shape[0], max(cos.shape[1], 1), x.shape[1], cos.shape[3]))
    size = spec.rotary.rotated_size(x.shape[2] // spec.num_heads)
    # A table without an axis of heads serves any number of them.
    per_head = strides[1] if cos.shape[1] > 1 else 0
    return Rotary(
        pointer(cos, x), pointer(sin, x), strides[0], per_head, strides[2], size, size // spec.rotary.sections, spec.rotary.offset
    )


def _four_axes(table: Tensor) -> Tensor:
    table = table.contiguous()
    return table if table.ndim == 4 else table.unsqueeze(-3) if table.ndim == 3 else table[None, None]


def rows_of(x_bhsd: Tensor) -> Rows:
    """A (B, H, S, D) tensor or view whose last axis is dense."""
    return Rows(x_bhsd, x_bhsd.stride(0), x_bhsd.stride(1), x_bhsd.stride(2))


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, S, H*D) as a (B, H, S, D) view."""
    return x.view(x.shape[0], x.shape[1], num_heads, x.shape[2] // num_heads).transpose(1, 2)


def positions_of(inputs: Mapping[str, Tensor], *, capacity: int) -> Positions:
    """Where queries and new keys stand, for a key buffer of `capacity` rows."""
    new_keys = inputs["key"].shape[1]
    for name, kind in (("cache_length", arguments.FROM_CACHE_LENGTH), ("query_offset", arguments.FROM_QUERY_OFFSET)):
        if name in inputs:
            return Positions(inputs[name].contiguous(), flag_value(kind), 0, new_keys, capacity)
    past = inputs["past_key"].shape[2] if "past_key" in inputs else 0
    nothing = torch.empty(1, dtype=torch.int64, device=inputs["key"].device)
    return Positions(nothing, flag_value(arguments.FROM_NUMBER), past, new_keys, capacity)


def mask_of(inputs: Mapping[str, Tensor], shape: tuple[int, int, int, int]) -> Mask:
    """The input attention_bias, broadcast to `shape` (B, Hq, S, T)."""
    query, bias = inputs["query"], inputs.get("attention_bias")
    if bias is None:
        return Mask(query, flag_value(arguments.MASK_NONE), 0, 0, 0, 0)
    kind = {torch.bool: arguments.MASK_BOOL, query.dtype: arguments.MASK_SAME}.get(bias.dtype, arguments.MASK_FLOAT32)
    return Mask(pointer(bias, query), flag_value(kind), *_strides(bias, shape))


def logits_of(attention: AttentionSpec, inputs: Mapping[str, Tensor]) -> Logits:
    """Scale, caps, window and sink."""
    sink = inputs.get("head_sink")
    after = attention.right_window_size
    return Logits(
        scale=float(attention.scale),
        clamp=float(attention.logit_clamp),
        cap=float(attention.softcap),
        keys_before=UNLIMITED if attention.left_window_size < 0 else min(attention.left_window_size, UNLIMITED),
        keys_after=0 if attention.is_causal else UNLIMITED if after < 0 else min(after, UNLIMITED),
        sink=pointer(None if sink is None else sink.contiguous(), inputs["query"]),
        has_sink=int(sink is not None),
        sink_float32=int(sink is not None and sink.dtype == torch.float32),
    )
