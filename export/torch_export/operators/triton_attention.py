"""Both operators on the Triton kernels: on CUDA tensors, and on CPU tensors where Triton interprets (TRITON_INTERPRET=1).

Shapes are those of `signature.py` and must have been checked before. Nothing here waits for the GPU; entries of
`cache_length` that do not fit are not written, and their rows of Y are NaN: buffers do not grow here, and a bias with fewer
columns than there are keys counts as a buffer of that size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from qknorm_onnx.custom_ops.kernels.cuda import decode as decode_kernels
from qknorm_onnx.custom_ops.kernels.cuda import prefill as prefill_kernels
from qknorm_onnx.custom_ops.kernels.cuda import prologue as prologue_kernels
from qknorm_onnx.custom_ops.kernels.cuda.arguments import Rows
from qknorm_onnx.custom_ops.kernels.cuda.tiles import (
    HEADS_OF_DECODE,
    STATISTICS_WIDTH,
    Tile,
    decode_tile,
    padded_head,
    prefill_tile,
    prologue_tile,
)
from qknorm_onnx.spec.cuda_support import cuda_refusal
from qknorm_onnx.spec.qk_norm_spec import QKNormRotarySpec, QKNormSpec, SpecError, normalises, rotates
from qknorm_onnx.torch_export.operators.triton_arguments import (
    logits_of,
    mask_of,
    needs_statistics,
    positions_of,
    rotary_of,
    rows_of,
    side_of,
    split_heads,
)

Tensors = Mapping[str, Tensor]
Outputs = tuple[Tensor, Tensor | None, Tensor | None]

PROGRAMS_PER_PROCESSOR = 3  # of `decode`, by its registers and shared memory
FEWEST_KEYS_OF_A_SPLIT = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
    """What a caller may fix instead of the defaults: tiles, the number of splits of `decode`, and the general path."""

    prologue: Tile | None = None
    prefill: Tile | None = None
    decode: Tile | None = None
    splits: int | None = None
    allow_decode: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    batch: int
    queries: int
    new_keys: int
    all_keys: int
    keys_with_bias: int
    q_heads: int
    kv_heads: int
    head: int
    value: int

    @property
    def padded(self) -> int:
        return padded_head(self.head, self.value)


def attention(
    spec: QKNormSpec,
    inputs: Tensors,
    *,
    with_present: bool = True,
    present: tuple[Tensor, Tensor] | None = None,
    choices: Choices | None = None,
) -> Outputs:
    """Y, present_key and present_value; the latter two are None where neither asked for nor needed.

    Args:
        spec: what is computed.
        inputs: those of `signature.ATTENTION_INPUTS` that are given.
        with_present: whether the cache after this call is wanted.
        present: with `cache_length`, the buffers to write to: the past ones themselves for an update in place.
        choices: tiles and splits to use instead of the defaults.

    Raises:
        SpecError: the kernels do not serve this spec.
    """
    sizes = _sizes_of(spec, inputs)
    _refuse(spec, inputs["query"], (sizes.head, sizes.value))
    inputs = {**inputs, **{name: inputs[name].contiguous() for name in ("query", "key", "value")}}
    chosen = choices or Choices()
    buffers = _key_buffers(inputs, sizes, with_present=with_present or present is not None, present=present)
    y = inputs["query"].new_empty(sizes.batch, sizes.queries, sizes.q_heads * sizes.value)
    if chosen.allow_decode and _is_decode(spec, inputs, sizes):
        cache = buffers or _new_buffers(inputs, sizes)
        _run_decode(spec, inputs, sizes, cache, y, chosen)
        return y, *cache
    q, k, v = _prepare(spec, inputs, sizes, buffers, chosen)
    _run_prefill(spec, inputs, sizes, (q, k, v), y, chosen)
    return (y, *buffers) if buffers else (y, None, None)


def rotary(spec: QKNormRotarySpec, inputs: Tensors, *, tile: Tile | None = None) -> Tensor:
    """Y (B, S, H*D) of `QKNormRotary`. Raises SpecError where the kernels do not serve `spec`."""
    x = inputs["x"].contiguous()
    size = x.shape[2] // spec.num_heads
    _refuse(spec, x, (size,))
    y = torch.empty_like(x)
    given = {**inputs, "x": x}
    side = side_of(spec, given, _statistics(spec, given))
    unused = rows_of(split_heads(x, spec.num_heads))
    positions = positions_of({"key": x}, capacity=0)
    tile = tile or prologue_tile(padded_head(size))
    grid = (triton.cdiv(x.shape[1], tile.rows), spec.num_heads, x.shape[0])
    _launch(
        prologue_kernels.prepare, grid, tile,
        side, side, unused, rotary_of(spec, given), rows_of(split_heads(y, spec.num_heads)), unused, unused, positions,
        x.shape[1], spec.num_heads, 0, size, size,
        BM=tile.rows, DP=padded_head(size), INTERLEAVED=spec.rotary.interleaved, STATISTICS=needs_statistics(spec),
    )  # fmt: skip
    return y


def _refuse(spec: QKNormSpec | QKNormRotarySpec, x: Tensor, head_sizes: tuple[int, ...]) -> None:
    reason = cuda_refusal(spec, dtype=str(x.dtype).removeprefix("torch."), head_sizes=head_sizes)  # type: ignore[arg-type]
    if reason:
        raise SpecError(reason)


def _launch(kernel: Any, grid: tuple[int, ...], tile: Tile, *arguments: Any, **constants: Any) -> None:
    if all(grid):
        kernel[grid](*arguments, **constants, num_warps=tile.warps, num_stages=tile.stages)


def _sizes_of(spec: QKNormSpec, inputs: Tensors) -> _Sizes:
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    heads, kv_heads = spec.attention.q_num_heads, spec.attention.kv_num_heads
    past = inputs["past_key"].shape[2] if "past_key" in inputs else 0
    all_keys = past if "cache_length" in inputs else past + key.shape[1]
    bias = inputs.get("attention_bias")
    widened = bias is None or "cache_length" not in inputs or bias.ndim == 0 or bias.shape[-1] == 1
    return _Sizes(
        batch=query.shape[0],
        queries=query.shape[1],
        new_keys=key.shape[1],
        all_keys=all_keys,
        keys_with_bias=all_keys if widened or bias is None else min(all_keys, bias.shape[-1]),
        q_heads=heads,
        kv_heads=kv_heads,
        head=query.shape[2] // heads,
        value=value.shape[2] // kv_heads,
    )


def _new_buffers(inputs: Tensors, sizes: _Sizes) -> tuple[Tensor, Tensor]:
    shape = (sizes.batch, sizes.kv_heads, sizes.all_keys)
    return inputs["key"].new_empty(*shape, sizes.head), inputs["value"].new_empty(*shape, sizes.value)


def _key_buffers(
    inputs: Tensors, sizes: _Sizes, *, with_present: bool, present: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor] | None:
    """The buffers that hold old keys and values and take the new ones; None where there is no need for any."""
    if "past_key" not in inputs:
        return _new_buffers(inputs, sizes) if with_present else None
    past = (inputs["past_key"], inputs["past_value"])
    if "cache_length" in inputs:
        buffers = present or (torch.empty_like(past[0]), torch.empty_like(past[1]))
    else:
        buffers = _new_buffers(inputs, sizes)
    for old, new in zip(past, buffers, strict=True):
        if new.data_ptr() != old.data_ptr():
            new[:, :, : old.shape[2]].copy_(old)
    return buffers


def _side_inputs(inputs: Tensors, x: str) -> dict[str, Tensor]:
    names = {"x": x, "weight": f"{x[0]}_norm_weight", "bias": f"{x[0]}_norm_bias", "cos": "cos", "sin": "sin"}
    if x == "query":
        names["scale"] = "q_scale"
    return {role: inputs[name].contiguous() for role, name in names.items() if name in inputs}


def _statistics(spec: QKNormRotarySpec, inputs: Tensors) -> Tensor | None:
    """Statistics (B, L, groups, 3) of rows or groups that are not one head; None where each head has its own."""
    if not needs_statistics(spec):
        return None
    x = inputs["x"]
    side = side_of(spec, inputs, None)
    out = torch.empty(x.shape[0], x.shape[1], side.groups, 3, dtype=torch.float32, device=x.device)
    tile = Tile(rows=1, keys=0, warps=4, stages=1)
    grid = (x.shape[1], side.groups, x.shape[0])
    _launch(prologue_kernels.row_statistics, grid, tile, side, out, x.shape[1], WIDTH=STATISTICS_WIDTH)
    return out


def _is_plain(spec: QKNormRotarySpec, inputs: Tensors) -> bool:
    return not normalises(spec.kind) and not rotates(spec.rotary.order) and "scale" not in inputs


def _prepare(
    spec: QKNormSpec, inputs: Tensors, sizes: _Sizes, buffers: tuple[Tensor, Tensor] | None, choices: Choices
) -> tuple[Rows, Rows, Rows]:
    """Runs the prologue; prepared queries, and all keys and values, as the prefill kernel takes them."""
    of_q, of_k = _side_inputs(inputs, "query"), _side_inputs(inputs, "key")
    q_spec, k_spec = spec.query_preparation, spec.key_preparation
    q_view, k_view = split_heads(of_q["x"], sizes.q_heads), split_heads(of_k["x"], sizes.kv_heads)
    v_view = split_heads(inputs["value"], sizes.kv_heads)
    q_in_place, k_in_place = _is_plain(q_spec, of_q), _is_plain(k_spec, of_k) and buffers is None
    q = q_view if q_in_place else torch.empty_like(q_view, memory_format=torch.contiguous_format)
    keys = buffers[0] if buffers else k_view if k_in_place else torch.empty_like(k_view, memory_format=torch.contiguous_format)
    values = buffers[1] if buffers else v_view
    tile = choices.prologue or prologue_tile(sizes.padded)
    q_heads = 0 if q_in_place else sizes.q_heads
    kv_heads = 0 if k_in_place else sizes.kv_heads * (2 if buffers else 1)
    longest = max(sizes.queries if q_heads else 0, sizes.new_keys if kv_heads else 0)
    side_q, side_k = side_of(q_spec, of_q, _statistics(q_spec, of_q)), side_of(k_spec, of_k, _statistics(k_spec, of_k))
    _launch(
        prologue_kernels.prepare, (triton.cdiv(longest, tile.rows), q_heads + kv_heads, sizes.batch), tile,
        side_q, side_k, rows_of(v_view), rotary_of(q_spec, of_q), rows_of(q), rows_of(keys), rows_of(values),
        positions_of(inputs, capacity=sizes.keys_with_bias), sizes.queries, q_heads, sizes.kv_heads, sizes.head, sizes.value,
        BM=tile.rows, DP=sizes.padded, INTERLEAVED=spec.rotary.interleaved,
        STATISTICS=needs_statistics(q_spec) or needs_statistics(k_spec),
    )  # fmt: skip
    return rows_of(q), rows_of(keys), rows_of(values)


def _capability(x: Tensor) -> int:
    if x.device.type != "cuda":
        return 80
    major, _ = torch.cuda.get_device_capability(x.device)
    return {9: 90, 10: 100, 12: 120}.get(major, 80)


def _capped(spec: QKNormSpec) -> bool:
    return spec.attention.softcap > 0 or spec.attention.logit_clamp > 0


def _run_prefill(
    spec: QKNormSpec, inputs: Tensors, sizes: _Sizes, rows: tuple[Rows, Rows, Rows], y: Tensor, choices: Choices
) -> None:
    query, masked = inputs["query"], "attention_bias" in inputs
    tile = choices.prefill or prefill_tile(
        sizes.padded, wide=query.dtype == torch.float32, masked=masked, capability=_capability(query)
    )
    shape = (sizes.batch, sizes.q_heads, sizes.queries, sizes.keys_with_bias)
    _launch(
        prefill_kernels.prefill, (triton.cdiv(sizes.queries, tile.rows), sizes.q_heads, sizes.batch), tile,
        *rows, rows_of(split_heads(y, sizes.q_heads)), mask_of(inputs, shape), logits_of(spec.attention, inputs),
        positions_of(inputs, capacity=sizes.keys_with_bias), sizes.queries, spec.attention.group_size, sizes.head, sizes.value,
        BM=tile.rows, BN=tile.keys, DP=sizes.padded, CAP=_capped(spec), MASK=masked, PRECISION="tf32x3",
    )  # fmt: skip


def _is_decode(spec: QKNormSpec, inputs: Tensors, sizes: _Sizes) -> bool:
    one_head_rows = not needs_statistics(spec.query_preparation) and not needs_statistics(spec.key_preparation)
    one_token = sizes.queries == 1 and sizes.new_keys == 1 and "query_offset" not in inputs
    return one_token and one_head_rows and spec.attention.group_size <= HEADS_OF_DECODE


def number_of_splits(sizes_of_grid: int, keys: int, x: Tensor) -> int:
    """Splits along the keys that fill the device: few programs otherwise, each with enough keys to be worth it."""
    if x.device.type != "cuda":
        return 1
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    wanted = triton.cdiv(PROGRAMS_PER_PROCESSOR * processors, max(sizes_of_grid, 1))
    return max(1, min(wanted, keys // FEWEST_KEYS_OF_A_SPLIT, 128))


def _run_decode(
    spec: QKNormSpec, inputs: Tensors, sizes: _Sizes, cache: tuple[Tensor, Tensor], y: Tensor, choices: Choices
) -> None:
    query, masked = inputs["query"], "attention_bias" in inputs
    tile = choices.decode or decode_tile(sizes.padded, wide=query.dtype == torch.float32, masked=masked)
    splits = choices.splits or number_of_splits(sizes.batch * sizes.kv_heads, sizes.all_keys, query)
    of_q, of_k = _side_inputs(inputs, "query"), _side_inputs(inputs, "key")
    out, logits = rows_of(split_heads(y, sizes.q_heads)), logits_of(spec.attention, inputs)
    count = sizes.batch * sizes.q_heads * splits if splits > 1 else 0
    partial = torch.empty(count * sizes.padded + 1, dtype=torch.float32, device=query.device)
    state = torch.empty(count * 2 + 1, dtype=torch.float32, device=query.device)
    _launch(
        decode_kernels.decode, (splits, sizes.kv_heads, sizes.batch), tile,
        side_of(spec.query_preparation, of_q, None), side_of(spec.key_preparation, of_k, None),
        rows_of(split_heads(inputs["value"], sizes.kv_heads)), rotary_of(spec.query_preparation, of_q),
        rows_of(cache[0]), rows_of(cache[1]), out, partial, state,
        mask_of(inputs, (sizes.batch, sizes.q_heads, 1, sizes.keys_with_bias)), logits,
        positions_of(inputs, capacity=sizes.keys_with_bias), spec.attention.group_size, sizes.head, sizes.value,
        HEADS=HEADS_OF_DECODE, BN=tile.keys, DP=sizes.padded, INTERLEAVED=spec.rotary.interleaved,
        CAP=_capped(spec), MASK=masked, PRECISION="tf32x3",
    )  # fmt: skip
    if splits > 1:
        _launch(
            decode_kernels.combine, (sizes.q_heads, sizes.batch), Tile(rows=1, keys=0, warps=4, stages=1),
            partial, state, out, logits, splits, sizes.value,
            NS=triton.next_power_of_2(splits), DP=sizes.padded,
        )  # fmt: skip
