"""One new token for each row of the batch: preparation, append and attention in one launch, split along the keys."""

from __future__ import annotations

import triton
import triton.language as tl

from qknorm_onnx.custom_ops.kernels.cuda.arguments import LOG2_E
from qknorm_onnx.custom_ops.kernels.cuda.prefill import attend, head_of_keys, head_rows, mask_rows
from qknorm_onnx.custom_ops.kernels.cuda.preparation import load_parameter, prepare_rows
from qknorm_onnx.custom_ops.kernels.cuda.prologue import append_position, first_position
from qknorm_onnx.custom_ops.kernels.cuda.softmax_tile import masked_by_input, power, tile_logits, with_sink


@triton.jit
def token(side, rotary, batch, heads, columns, mask, D, INTERLEAVED: tl.constexpr):
    """The prepared row of each head in `heads` (rows, 1), rounded to T."""
    wide_heads = heads.to(tl.int64)
    prepared = prepare_rows(
        side,
        rotary,
        batch * side.batch_stride + heads * D,
        heads,
        heads * side.weight_stride,
        heads * side.bias_stride,
        batch * rotary.batch_stride + wide_heads * rotary.head_stride,
        batch * side.scale_batch + wide_heads * side.scale_head,
        batch,
        columns,
        mask,
        D,
        INTERLEAVED,
        False,
    )
    return prepared.to(side.x.dtype.element_ty)


@triton.jit
def new_token(
    q, key, value, rotary, key_out, value_out, mask, mask_at, logits, batch, head, row, fits, D, Dv,
    DP: tl.constexpr, INTERLEAVED: tl.constexpr, CAP: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Appends the new key and value, and starts the running softmax with them. Every query of the row sees its own token."""
    columns = tl.arange(0, DP)[None, :]
    k = token(key, rotary, batch, tl.full((1, 1), 0, tl.int32) + head, columns, columns >= 0, D, INTERLEAVED)
    at = row * key_out.row_stride + columns
    tl.store(head_rows(key_out, batch, head) + at, k, mask=fits & (columns < D))
    v_mask = fits & (columns < Dv)
    v = tl.load(head_rows(value, batch, head) + columns, mask=v_mask, other=0.0)
    tl.store(head_rows(value_out, batch, head) + row * value_out.row_stride + columns, v, mask=v_mask)
    products = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)[:, None]
    s = tile_logits(products, logits, CAP, MASK, q.dtype == tl.float32)
    if MASK:
        s = masked_by_input(s, mask, mask_at[:, None] + row * mask.column_stride, fits)
    ceiling = tl.max(s, 1)
    total = tl.where(ceiling == float("-inf"), 0.0, 1.0)
    return total[:, None] * v.to(tl.float32), total, ceiling


@triton.jit
def split_range(past, first, logits, split, splits, BN: tl.constexpr):
    """The older keys of one split: begin, end of the whole tiles, end."""
    begin = tl.maximum(first - logits.keys_before, 0)
    share = tl.cdiv(tl.cdiv(tl.maximum(past - begin, 0), BN), splits) * BN
    start = begin + split * share
    end = tl.minimum(start + share, past)
    return start, start + tl.maximum(end - start, 0) // BN * BN, end


@triton.jit
def write_output(state, out, logits, batch, heads, row_mask, fits, Dv, DP: tl.constexpr, MASK: tl.constexpr):
    """The output of a decode without splits."""
    accumulator, total, ceiling = state
    columns = tl.arange(0, DP)[None, :]
    sink = load_parameter(logits.sink, heads, row_mask & (logits.has_sink != 0), logits.sink_float32, 0.0)
    y = with_sink(accumulator, total, ceiling, sink, logits.has_sink != 0, MASK)
    at = batch * out.batch_stride + heads[:, None] * tl.cast(out.head_stride, tl.int64) + columns
    y = tl.where(fits, y, float("nan")).to(out.data.dtype.element_ty)
    tl.store(out.data + at, y, mask=row_mask[:, None] & (columns < Dv))


@triton.jit
def write_partial(state, partial, partial_state, place, row_mask, fits, Dv, DP: tl.constexpr, MASK: tl.constexpr):
    """The state of one split for `combine`, its maximum in the unit of logits.

    Without room for the new token the maximum is NaN, which goes on to the output.
    """
    accumulator, total, ceiling = state
    if not MASK:
        ceiling *= 1.0 / LOG2_E
    columns = tl.arange(0, DP)[None, :]
    tl.store(partial + (place[:, None] * DP + columns), accumulator, mask=row_mask[:, None] & (columns < Dv))
    tl.store(partial_state + place * 2, tl.where(fits, ceiling, float("nan")), mask=row_mask)
    tl.store(partial_state + place * 2 + 1, total, mask=row_mask)


@triton.jit(do_not_specialize=["group"])
def decode(
    query, key, value, rotary, keys, values, out, partial, partial_state, mask, logits, positions, group, D, Dv,
    HEADS: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, INTERLEAVED: tl.constexpr,
    CAP: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (splits, heads of k, B). Split 0 appends the new token; all read only older keys, so that nobody waits.

    With one split the output is written, else `partial` (B, Hq, splits, DP) and `partial_state` (B, Hq, splits, 2) are.
    """
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    row = tl.arange(0, HEADS)
    heads = head * group + row
    first = first_position(positions, batch)
    start, fits = append_position(positions, batch)

    columns = tl.arange(0, DP)[None, :]
    q = token(query, rotary, batch, heads[:, None], columns, row[:, None] < group, D, INTERLEAVED)
    mask_at = mask_rows(mask, batch, tl.minimum(heads, head * group + group - 1), 0)
    accumulator = tl.zeros((HEADS, DP), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    ceiling = tl.full((HEADS,), float("-inf"), tl.float32)
    if split == 0:
        accumulator, total, ceiling = new_token(
            q, key, value, rotary, keys, values, mask, mask_at, logits, batch, head, start, fits, D, Dv,
            DP, INTERLEAVED, CAP, MASK,
        )  # fmt: skip
    state = (accumulator, total, ceiling)
    begin, whole, end = split_range(tl.where(fits, start, 0).to(tl.int32), first, logits, split, splits, BN)
    of_keys = head_of_keys(keys, values, batch, head)
    at = first + 0 * row
    state = attend(q, of_keys, mask, mask_at, logits, state, at, begin, whole, D, Dv, BN, DP, False, CAP, MASK, PRECISION)
    state = attend(q, of_keys, mask, mask_at, logits, state, at, whole, end, D, Dv, BN, DP, True, CAP, MASK, PRECISION)
    if splits == 1:
        write_output(state, out, logits, batch, heads, row < group, fits, Dv, DP, MASK)
    else:
        place = (batch * tl.num_programs(1) * group + heads) * splits + split
        write_partial(state, partial, partial_state, place, row < group, fits, Dv, DP, MASK)


@triton.jit(do_not_specialize=["splits"])
def combine(
    partial, partial_state, out, logits, splits, Dv,
    NS: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Grid (Hq, B): the splits of `decode` as one output, with the sink."""
    head = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    split = tl.arange(0, NS)
    columns = tl.arange(0, DP)
    given = split < splits
    place = (batch * tl.num_programs(0) + head) * splits + split
    ceilings = tl.load(partial_state + place * 2, mask=given, other=float("-inf"))
    totals = tl.load(partial_state + place * 2 + 1, mask=given, other=0.0)
    tile_mask = given[:, None] & (columns[None, :] < Dv)
    sums = tl.load(partial + (place[:, None] * DP + columns[None, :]), mask=tile_mask, other=0.0)
    ceiling = tl.max(ceilings, 0)
    finite = tl.where(ceiling == float("-inf"), 0.0, ceiling)
    shares = power(ceilings - finite, True)
    accumulator = tl.sum(sums * shares[:, None], 0)[None, :]
    total = tl.zeros((1,), tl.float32) + tl.sum(totals * shares, 0)
    sink = load_parameter(logits.sink, head, logits.has_sink != 0, logits.sink_float32, 0.0)
    y = with_sink(accumulator, total, total * 0.0 + ceiling, sink, logits.has_sink != 0, True)
    at = batch * out.batch_stride + head * tl.cast(out.head_stride, tl.int64) + columns[None, :]
    tl.store(out.data + at, y.to(out.data.dtype.element_ty), mask=columns[None, :] < Dv)
