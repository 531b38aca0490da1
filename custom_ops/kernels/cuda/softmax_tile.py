"""One tile of keys in the running softmax, shared by prefill and decode."""

from __future__ import annotations

import triton
import triton.language as tl

from qknorm_onnx.custom_ops.kernels.cuda.arguments import LOG2_E, MASK_BOOL, MASK_FLOAT32, MASK_SAME


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """Hyperbolic tangent from exp2; PRECISE adds its series near 0, where the other form cancels."""
    small = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    size = (1.0 - small) / (1.0 + small)
    if PRECISE:
        square = x * x
        series = 1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0))))
        size = tl.where(tl.abs(x) < 0.25, tl.abs(x) * series, size)
    return tl.where(x < 0, -size, size)


@triton.jit
def capped(logits, clamp, cap, PRECISE: tl.constexpr):
    """The clamp, then the cap; both off where they are 0."""
    clamped = tl.minimum(tl.maximum(logits, -clamp), clamp)
    logits = tl.where(clamp > 0.0, clamped, logits)
    safe = tl.where(cap > 0.0, cap, 1.0)
    return tl.where(cap > 0.0, safe * tanh(logits / safe, PRECISE), logits)


@triton.jit
def masked_by_input(logits, mask, at, inside):
    """Logits plus a float mask, or -inf where a bool mask is False. `at` are element offsets of the tile."""
    pointer = mask.data
    bools = pointer.to(tl.pointer_type(tl.int8))
    seen = tl.load(bools + at, mask=inside & (mask.kind == MASK_BOOL), other=1)
    added = tl.load(pointer + at, mask=inside & (mask.kind == MASK_SAME), other=0.0).to(tl.float32)
    if pointer.dtype.element_ty != tl.float32:
        floats = pointer.to(tl.pointer_type(tl.float32))
        added += tl.load(floats + at, mask=inside & (mask.kind == MASK_FLOAT32), other=0.0)
    return tl.where(seen != 0, logits + added, float("-inf"))


@triton.jit
def tile_logits(products, logits, CAP: tl.constexpr, MASK: tl.constexpr, PRECISE: tl.constexpr):
    """q.k with the scale, clamp and cap: in units of 1 / log2(e), except where a float mask is added (`MASK`).

    There the logits stay as they are, because the lowest float32 times log2(e) is not a float32 any more.
    """
    if CAP:
        values = capped(products * logits.scale, logits.clamp, logits.cap, PRECISE)
        if not MASK:
            values *= LOG2_E
        return values
    else:
        if MASK:
            return products * logits.scale
        else:
            return products * (logits.scale * LOG2_E)


@triton.jit
def power(difference, MASK: tl.constexpr):
    """exp of a difference of logits in the unit of `tile_logits`."""
    if MASK:
        return tl.exp2(difference * LOG2_E)
    else:
        return tl.exp2(difference)


@triton.jit
def updated(accumulator, total, ceiling, values, value_tile, MASK: tl.constexpr, PRECISION: tl.constexpr):
    """The running sum of weighted values, sum of weights and maximum after one more tile of logits (rows, keys)."""
    new_ceiling = tl.maximum(ceiling, tl.max(values, 1))
    # A row that has seen nothing yet has the maximum -inf; differences to it must not be NaN.
    finite = tl.where(new_ceiling == float("-inf"), 0.0, new_ceiling)
    weights = power(values - finite[:, None], MASK)
    kept = power(ceiling - finite, MASK)
    total = total * kept + tl.sum(weights, 1)
    accumulator = tl.dot(weights.to(value_tile.dtype), value_tile, accumulator * kept[:, None], input_precision=PRECISION)
    return accumulator, total, new_ceiling


@triton.jit
def with_sink(accumulator, total, ceiling, sink, has_sink, MASK: tl.constexpr):
    """The weighted mean of the values, with one more logit (rows) in the denominator; zeros for rows that saw nothing."""
    unit = 1.0
    if not MASK:
        unit = LOG2_E
    extra = tl.where(has_sink, sink * unit, float("-inf"))
    top = tl.maximum(ceiling, extra)
    finite = tl.where(top == float("-inf"), 0.0, top)
    kept = power(ceiling - finite, MASK)
    total = total * kept + power(extra - finite, MASK)
    return accumulator * (kept / tl.where(total == 0.0, 1.0, total))[:, None]
