"""The kernel that prepares queries and keys and appends keys and values to the cache, and the statistics of long rows."""

from __future__ import annotations

import triton
import triton.language as tl

from qknorm_onnx.custom_ops.kernels.cuda.arguments import CENTRED, FROM_CACHE_LENGTH, FROM_NUMBER
from qknorm_onnx.custom_ops.kernels.cuda.preparation import (
    has,
    inverse_denominator,
    prepare_rows,
    range_factor,
)


@triton.jit
def first_position(positions, batch):
    """Position of a row's first query among the keys, in a range whose sums with window sizes fit 32 bits."""
    if positions.kind == FROM_NUMBER:
        first = tl.cast(positions.first, tl.int64)
    else:
        first = tl.load(positions.starts + batch)
    return tl.minimum(tl.maximum(first, -(1 << 29)), 1 << 29).to(tl.int32)


@triton.jit
def append_position(positions, batch):
    """First row of the key buffer that a new key goes to, and whether the new keys fit behind it."""
    start = tl.cast(positions.first, tl.int64)
    if positions.kind == FROM_CACHE_LENGTH:
        start = tl.load(positions.starts + batch)
    return start, (start >= 0) & (start + positions.new_keys <= positions.capacity)


@triton.jit
def side_tile(side, rotary, batch, head, rows, columns, row_mask, length, D, INTERLEAVED: tl.constexpr, STATISTICS: tl.constexpr):
    """Prepared rows of one head; `rows` is (BM, 1) int64, `columns` (1, DP)."""
    return prepare_rows(
        side,
        rotary,
        batch * side.batch_stride + rows * side.row_stride + head * D,
        head,
        head * side.weight_stride,
        head * side.bias_stride,
        batch * rotary.batch_stride + head * tl.cast(rotary.head_stride, tl.int64) + rows * rotary.row_stride,
        batch * side.scale_batch + head * tl.cast(side.scale_head, tl.int64) + rows * side.scale_row,
        batch * length + rows,
        columns,
        row_mask,
        D,
        INTERLEAVED,
        STATISTICS,
    )


@triton.jit
def store_rows(out, batch, head, rows, columns, mask, values):
    """Writes a tile to a tensor of heads, rounded to its type."""
    at = batch * out.batch_stride + head * tl.cast(out.head_stride, tl.int64) + rows * out.row_stride
    tl.store(out.data + (at + columns), values.to(out.data.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_queries", "q_heads", "kv_heads"])
def prepare(
    query, key, value, rotary, query_out, key_out, value_out, positions,
    num_queries, q_heads, kv_heads, D, Dv,
    BM: tl.constexpr, DP: tl.constexpr, INTERLEAVED: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BM rows, q_heads + 2 kv_heads, B): heads of q, then of k, then of v. Heads of q may be 0."""
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)[:, None]
    columns = tl.arange(0, DP)[None, :]
    if head < q_heads:
        mask = rows < num_queries
        q = side_tile(query, rotary, batch, head, rows, columns, mask, num_queries, D, INTERLEAVED, STATISTICS)
        store_rows(query_out, batch, head, rows, columns, mask & (columns < D), q)
    else:
        start, fits = append_position(positions, batch)
        new = (rows < positions.new_keys) & fits
        k_head = head - q_heads
        if k_head < kv_heads:
            k = side_tile(key, rotary, batch, k_head, rows, columns, new, positions.new_keys, D, INTERLEAVED, STATISTICS)
            store_rows(key_out, batch, k_head, start + rows, columns, new & (columns < D), k)
        else:
            v_head = k_head - kv_heads
            in_value = new & (columns < Dv)
            at = batch * value.batch_stride + v_head * tl.cast(value.head_stride, tl.int64) + rows * value.row_stride
            v = tl.load(value.data + (at + columns), mask=in_value, other=0.0)
            store_rows(value_out, batch, v_head, start + rows, columns, in_value, v)


@triton.jit(do_not_specialize=["length"])
def row_statistics(side, out, length, WIDTH: tl.constexpr):
    """Statistics (B, L, groups, 3) of groups of `group_size` values. Grid (L, groups, B); three passes over the group."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    x = side.x + batch * side.batch_stride + row * side.row_stride + group * tl.cast(side.group_size, tl.int64)
    columns = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, side.group_size, WIDTH):
        total += tl.load(x + start + columns, mask=start + columns < side.group_size, other=0.0).to(tl.float32)
    rough = tl.sum(total) * side.inverse_count
    rest = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, side.group_size, WIDTH):
        inside = start + columns < side.group_size
        rest += tl.where(inside, tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32) - rough, 0.0)
    mean = tl.where(has(side.flags, CENTRED), rough + tl.sum(rest) * side.inverse_count, 0.0)
    largest = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, side.group_size, WIDTH):
        inside = start + columns < side.group_size
        values = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.where(inside, tl.abs(values - mean), 0.0))
    in_range = range_factor(tl.max(largest), side.flags, side.epsilon)
    squares = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, side.group_size, WIDTH):
        inside = start + columns < side.group_size
        values = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
        scaled = tl.where(inside, (values - mean) * in_range, 0.0)
        squares += scaled * scaled
    inverse = inverse_denominator(tl.sum(squares) * side.inverse_count, in_range, side.flags, side.epsilon)
    at = out + ((batch * length + row) * side.groups + group) * 3
    tl.store(at, mean)
    tl.store(at + 1, in_range)
    tl.store(at + 2, inverse)
