"""Norm, gain, rotary embedding and scale of a tile of rows, in float32 registers."""

from __future__ import annotations

import triton
import triton.language as tl

from qknorm_onnx.custom_ops.kernels.cuda.arguments import (
    BIAS,
    BIAS_FLOAT32,
    CENTRED,
    CLAMPED,
    EPSILON_OUTSIDE,
    NORMALISED,
    ROTATED_FIRST,
    ROTATED_LAST,
    ROUNDED,
    SCALE,
    SCALE_FLOAT32,
    TABLE_FLOAT32,
    TABLE_WIDE,
    WEIGHT,
    WEIGHT_FLOAT32,
)

# Squares of numbers between these keep clear of both ends of float32.
LARGE: tl.constexpr = tl.constexpr(2.0**60)
SMALL: tl.constexpr = tl.constexpr(2.0**-60)
SHRINK: tl.constexpr = tl.constexpr(2.0**-100)
STRETCH: tl.constexpr = tl.constexpr(2.0**90)
NEGLIGIBLE_EPSILON: tl.constexpr = tl.constexpr(1e-30)
SMALLEST_NORMAL: tl.constexpr = tl.constexpr(2.0**-126)


@triton.jit
def has(flags, bit: tl.constexpr):
    """Whether a flag is set."""
    return (flags & bit) != 0


@triton.jit
def load_parameter(pointer, index, mask, is_float32, other):
    """Elements of a parameter as float32; its memory holds float32 or what the pointer's type says."""
    if pointer.dtype.element_ty == tl.float32:
        return tl.load(pointer + index, mask=mask, other=other)
    else:
        same = tl.load(pointer + index, mask=mask & (is_float32 == 0), other=other).to(tl.float32)
        wide = tl.load(pointer.to(tl.pointer_type(tl.float32)) + index, mask=mask & (is_float32 != 0), other=other)
        return tl.where(is_float32 != 0, wide, same)


@triton.jit
def range_factor(largest, flags, epsilon):
    """A power of two that keeps the squares of a row in range; 1 for all but extreme rows."""
    inside = (has(flags, CLAMPED) | has(flags, EPSILON_OUTSIDE)) == 0
    stretched = (largest < SMALL) & ((inside == 0) | (epsilon < NEGLIGIBLE_EPSILON))
    return tl.where(largest > LARGE, SHRINK, tl.where(stretched, STRETCH, 1.0))


@triton.jit
def inverse_denominator(square, in_range, flags, epsilon):
    """1 / denominator of a row whose values were multiplied by `in_range`, from the mean (L2: sum) of their squares."""
    small = epsilon * in_range
    size = tl.sqrt_rn(square)
    inside = tl.sqrt_rn(square + small * in_range)
    outside = tl.where(has(flags, CLAMPED), tl.maximum(size, small), size + small)
    denominator = tl.where(has(flags, CLAMPED) | has(flags, EPSILON_OUTSIDE), outside, inside)
    return 1.0 / tl.maximum(denominator, SMALLEST_NORMAL)


@triton.jit
def tile_statistics(x, mask, side):
    """Mean, range factor and 1 / denominator of each row of a tile (rows, D), each (rows, 1). Masked values of x are 0."""
    flags = side.flags
    rough = tl.sum(x, 1, keep_dims=True) * side.inverse_count
    # Corrected once, so that the mean of a constant row is exactly its value.
    mean = rough + tl.sum(tl.where(mask, x - rough, 0.0), 1, keep_dims=True) * side.inverse_count
    mean = tl.where(has(flags, CENTRED), mean, 0.0)
    centred = tl.where(mask, x - mean, 0.0)
    in_range = range_factor(tl.max(tl.abs(centred), 1, keep_dims=True), flags, side.epsilon)
    scaled = centred * in_range
    square = tl.sum(scaled * scaled, 1, keep_dims=True) * side.inverse_count
    return mean, in_range, inverse_denominator(square, in_range, flags, side.epsilon)


@triton.jit
def load_statistics(side, row_of_statistics, head, columns, mask, D):
    """The same three of `row_statistics`, one for each value: its group may begin or end inside the head."""
    group = (head * D + columns) // side.group_size
    at = (row_of_statistics * side.groups + group) * 3
    mask = mask & has(side.flags, NORMALISED)
    mean = tl.load(side.statistics + at, mask=mask, other=0.0)
    in_range = tl.load(side.statistics + at + 1, mask=mask, other=0.0)
    inverse = tl.load(side.statistics + at + 2, mask=mask, other=0.0)
    return mean, in_range, inverse


@triton.jit
def gained(x, mean, in_range, inverse, side, weight_at, bias_at, columns, mask):
    """The normalised values times the gain, plus the bias; x itself without a norm."""
    flags = side.flags
    y = (x - mean) * in_range * inverse
    y = tl.where(has(flags, ROUNDED), y.to(side.x.dtype.element_ty).to(tl.float32), y)
    y *= load_parameter(side.weight, weight_at + columns, mask & has(flags, WEIGHT), has(flags, WEIGHT_FLOAT32), 1.0)
    y += load_parameter(side.bias, bias_at + columns, mask & has(flags, BIAS), has(flags, BIAS_FLOAT32), 0.0)
    return tl.where(has(flags, NORMALISED), y, x)


@triton.jit
def swap_pairs(x):
    """(x0, x1, x2, x3, ...) -> (x1, x0, x3, x2, ...) along the last axis."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return tl.reshape(tl.join(odd, even), x.shape)


@triton.jit
def rotation_indices(columns, rotary, wide, INTERLEAVED: tl.constexpr):
    """For each column: is it rotated, the column of its partner, the sign of the partner, its column in the tables."""
    place = columns - rotary.offset
    rotated = (place >= 0) & (place < rotary.size)
    # Quotients and remainders, rather than differences: the compiler then sees that 8 columns lie side by side.
    section = place // rotary.section
    in_section = place % rotary.section
    half = rotary.section // 2
    if INTERLEAVED:
        partner = columns  # swapped in registers
        sign = tl.where((place % 2) == 0, -1.0, 1.0)
        narrow = section * half + in_section // 2
    else:
        partner = rotary.offset + section * rotary.section + (place + half) % rotary.section
        sign = tl.where(in_section < half, -1.0, 1.0)
        narrow = section * half + place % half
    return rotated, partner, sign, tl.where(wide, place, narrow)


@triton.jit
def prepare_rows(
    side, rotary, x_at, head, weight_at, bias_at, table_at, scale_at, row_of_statistics, columns, row_mask, D,
    INTERLEAVED: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """A tile (rows, columns) in float32. The `_at` are element offsets of column 0, scalars or (rows, 1)."""
    flags = side.flags
    mask = row_mask & (columns < D)
    wide = has(flags, TABLE_WIDE)
    rotated, partner, sign, entry = rotation_indices(columns, rotary, wide, INTERLEAVED)
    turning = mask & rotated & (has(flags, ROTATED_FIRST) | has(flags, ROTATED_LAST))
    cos = load_parameter(rotary.cos, table_at + entry, turning, has(flags, TABLE_FLOAT32), 1.0)
    sin = load_parameter(rotary.sin, table_at + entry, turning, has(flags, TABLE_FLOAT32), 0.0) * sign
    x = tl.load(side.x + (x_at + columns), mask=mask, other=0.0).to(tl.float32)
    if INTERLEAVED:
        other = swap_pairs(x)
    else:
        other = tl.load(side.x + (x_at + partner), mask=turning, other=0.0).to(tl.float32)
    x = tl.where(turning & has(flags, ROTATED_FIRST), x * cos + other * sin, x)
    if STATISTICS:
        mean, in_range, inverse = load_statistics(side, row_of_statistics, head, columns, mask, D)
    else:
        mean, in_range, inverse = tile_statistics(x, mask, side)
    y = gained(x, mean, in_range, inverse, side, weight_at, bias_at, columns, mask)
    if INTERLEAVED:
        other = swap_pairs(y)
    else:
        if STATISTICS:
            mean, in_range, inverse = load_statistics(side, row_of_statistics, head, partner, turning, D)
        other = gained(other, mean, in_range, inverse, side, weight_at, bias_at, partner, turning)
    y = tl.where(turning & has(flags, ROTATED_LAST), y * cos + other * sin, y)
    scaled = mask & has(flags, SCALE)
    y *= load_parameter(side.scale, scale_at + columns * side.scale_column, scaled, has(flags, SCALE_FLOAT32), 1.0)
    return tl.where(mask, y, 0.0)  # a LayerNorm moves the zeros behind the head, too
