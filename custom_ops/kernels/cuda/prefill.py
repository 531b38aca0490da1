"""Attention of many queries over prepared keys: the running softmax of arXiv 1805.02867 in tiles, as in 2205.14135."""

from __future__ import annotations

import triton
import triton.language as tl

from qknorm_onnx.custom_ops.kernels.cuda.arguments import FROM_CACHE_LENGTH
from qknorm_onnx.custom_ops.kernels.cuda.preparation import load_parameter
from qknorm_onnx.custom_ops.kernels.cuda.prologue import append_position, first_position, store_rows
from qknorm_onnx.custom_ops.kernels.cuda.softmax_tile import masked_by_input, tile_logits, updated, with_sink


@triton.jit
def attend(
    q, head, mask, mask_at, logits, state, query_positions, start, stop, D, Dv,
    BN: tl.constexpr, DP: tl.constexpr, EDGE: tl.constexpr, CAP: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state after the keys from `start` to `stop`. EDGE: some may be unseen or behind `stop`; else a multiple of BN.

    `head` is that of `head_of_keys`, `state` the weighted sum, the sum of weights and the maximum of `updated`.
    """
    keys, key_stride, values, value_stride = head
    accumulator, total, ceiling = state
    columns = tl.arange(0, DP)[None, :]
    for n in range(start, stop, BN):
        key = n + tl.arange(0, BN)
        inside = key < stop
        k_mask = columns < D
        v_mask = columns < Dv
        if EDGE:
            k_mask = k_mask & inside[:, None]
            v_mask = v_mask & inside[:, None]
        row = key.to(tl.int64)[:, None]
        k = tl.load(keys + (row * key_stride + columns), mask=k_mask, other=0.0)
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s = tile_logits(products, logits, CAP, MASK, q.dtype == tl.float32)
        if MASK:
            s = masked_by_input(s, mask, mask_at[:, None] + key[None, :] * tl.cast(mask.column_stride, tl.int64), inside[None, :])
        if EDGE:
            distance = query_positions[:, None] - key[None, :]
            seen = (distance <= logits.keys_before) & (-distance <= logits.keys_after) & inside[None, :]
            s = tl.where(seen, s, float("-inf"))
        v = tl.load(values + (row * value_stride + columns), mask=v_mask, other=0.0)
        accumulator, total, ceiling = updated(accumulator, total, ceiling, s, v, MASK, PRECISION)
    return accumulator, total, ceiling


@triton.jit
def head_rows(rows, batch, head):
    """Pointer to the first row of one head of one batch entry."""
    return rows.data + (batch * rows.batch_stride + head * tl.cast(rows.head_stride, tl.int64))


@triton.jit
def head_of_keys(keys, values, batch, head):
    """Pointers to the keys and the values of one head, each with its row stride."""
    return head_rows(keys, batch, head), keys.row_stride, head_rows(values, batch, head), values.row_stride


@triton.jit
def mask_rows(mask, batch, heads, rows):
    """Element offsets of the rows of attention_bias for `heads` and `rows`, one of them a scalar."""
    return batch * mask.batch_stride + heads * tl.cast(mask.head_stride, tl.int64) + rows * mask.row_stride


@triton.jit
def keys_to_see(positions, batch):
    """How many rows of the key buffer hold keys, and whether the new ones fitted in."""
    num_keys = positions.capacity
    fits = True
    if positions.kind == FROM_CACHE_LENGTH:
        start, fits = append_position(positions, batch)
        num_keys = tl.where(fits, start + positions.new_keys, 0).to(tl.int32)
    return num_keys, fits


@triton.jit
def key_ranges(first, row, length, num_keys, logits, BM: tl.constexpr, BN: tl.constexpr):
    """Bounds of the keys that a tile of queries sees: begin, first and last key that all of them see, end."""
    earliest = first + row
    latest = first + tl.minimum(row + BM, length) - 1
    begin = tl.maximum(earliest - logits.keys_before, 0)
    end = tl.minimum(latest + logits.keys_after + 1, num_keys)
    # Tiles start at `begin`, so that bounds of whole tiles are counted from there.
    left = tl.maximum(latest - logits.keys_before, begin) - begin
    inner = begin + tl.minimum((left + BN - 1) // BN * BN, tl.maximum(end - begin, 0) // BN * BN)
    all_see = tl.minimum(earliest + logits.keys_after + 1, num_keys)
    outer = inner + tl.maximum(all_see - inner, 0) // BN * BN
    return begin, inner, outer, end


@triton.jit(do_not_specialize=["num_queries", "group"])
def prefill(
    query, keys, values, out, mask, logits, positions, num_queries, group, D, Dv,
    BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, CAP: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BM queries, heads of q, B). The last queries, which see most under causality, start first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    rows = tile * BM + tl.arange(0, BM)
    columns = tl.arange(0, DP)[None, :]
    first = first_position(positions, batch)
    num_keys, fits = keys_to_see(positions, batch)

    wide_rows = rows.to(tl.int64)
    row_mask = rows[:, None] < num_queries
    q_at = head_rows(query, batch, head) + (wide_rows[:, None] * query.row_stride + columns)
    q = tl.load(q_at, mask=row_mask & (columns < D), other=0.0)
    of_keys = head_of_keys(keys, values, batch, head // group)
    # Rows behind the last query read the mask of the last one.
    mask_at = mask_rows(mask, batch, head, tl.minimum(wide_rows, num_queries - 1))

    begin, inner, outer, end = key_ranges(first, tile * BM, num_queries, num_keys, logits, BM, BN)
    state = (tl.zeros((BM, DP), tl.float32), tl.zeros((BM,), tl.float32), tl.full((BM,), float("-inf"), tl.float32))
    at = first + rows
    state = attend(q, of_keys, mask, mask_at, logits, state, at, begin, inner, D, Dv, BN, DP, True, CAP, MASK, PRECISION)
    state = attend(q, of_keys, mask, mask_at, logits, state, at, inner, outer, D, Dv, BN, DP, False, CAP, MASK, PRECISION)
    state = attend(q, of_keys, mask, mask_at, logits, state, at, outer, end, D, Dv, BN, DP, True, CAP, MASK, PRECISION)
    accumulator, total, ceiling = state
    sink = load_parameter(logits.sink, head, logits.has_sink != 0, logits.sink_float32, 0.0)
    y = with_sink(accumulator, total, ceiling, sink, logits.has_sink != 0, MASK)
    y = tl.where(fits, y, float("nan"))
    store_rows(out, batch, head, wide_rows[:, None], columns, row_mask & (columns < Dv), y)
