"""Groups of kernel arguments, and the bits of their flags. The launchers fill them, the kernels read them.

Every pointer to floats has the type T of the query, also where the memory behind it holds float32 or bool: a flag says
so and the kernel casts the pointer. So one compiled kernel serves every mixture of parameter types. A pointer whose
flag is not set is never read and may be null. Strides count elements of what is really in memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

# Bits of `Side.flags`.
NORMALISED: tl.constexpr = tl.constexpr(1 << 0)
CENTRED: tl.constexpr = tl.constexpr(1 << 1)  # LayerNorm: the mean is subtracted
CLAMPED: tl.constexpr = tl.constexpr(1 << 2)  # epsilon is the least denominator
EPSILON_OUTSIDE: tl.constexpr = tl.constexpr(1 << 3)  # epsilon is added to the root; neither bit: under the root
ROUNDED: tl.constexpr = tl.constexpr(1 << 4)  # to T, before the gain multiplies
WEIGHT: tl.constexpr = tl.constexpr(1 << 5)
WEIGHT_FLOAT32: tl.constexpr = tl.constexpr(1 << 6)
BIAS: tl.constexpr = tl.constexpr(1 << 7)
BIAS_FLOAT32: tl.constexpr = tl.constexpr(1 << 8)
ROTATED_FIRST: tl.constexpr = tl.constexpr(1 << 9)
ROTATED_LAST: tl.constexpr = tl.constexpr(1 << 10)
TABLE_FLOAT32: tl.constexpr = tl.constexpr(1 << 11)
TABLE_WIDE: tl.constexpr = tl.constexpr(1 << 12)  # one factor for each value, not for each pair
SCALE: tl.constexpr = tl.constexpr(1 << 13)
SCALE_FLOAT32: tl.constexpr = tl.constexpr(1 << 14)

# `Mask.kind`.
MASK_NONE: tl.constexpr = tl.constexpr(0)
MASK_BOOL: tl.constexpr = tl.constexpr(1)
MASK_SAME: tl.constexpr = tl.constexpr(2)
MASK_FLOAT32: tl.constexpr = tl.constexpr(3)

# `Positions.kind`: where the position of a row's first query comes from.
FROM_NUMBER: tl.constexpr = tl.constexpr(0)
FROM_CACHE_LENGTH: tl.constexpr = tl.constexpr(1)
FROM_QUERY_OFFSET: tl.constexpr = tl.constexpr(2)

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


class Side(NamedTuple):
    """Queries or keys (B, L, H*D) before their preparation, and all that it needs except the tables.

    `inverse_count` is 1 / (values of a normalised row or group), or 1 for the L2 norm. `statistics` (B, L, groups, 3) are
    those of `row_statistics`, for `groups` groups of `group_size` values in each row of H*D.
    """

    x: Any
    batch_stride: Any
    row_stride: Any
    weight: Any
    weight_stride: Any
    bias: Any
    bias_stride: Any
    scale: Any
    scale_batch: Any
    scale_head: Any
    scale_row: Any
    scale_column: Any
    statistics: Any
    groups: Any
    group_size: Any
    flags: Any
    epsilon: Any
    inverse_count: Any


class Rotary(NamedTuple):
    """Tables and rotated values: `size` from `offset` on, in blocks of `section`. Without a rotary embedding size is 0."""

    cos: Any
    sin: Any
    batch_stride: Any
    head_stride: Any
    row_stride: Any
    size: Any
    section: Any
    offset: Any


class Rows(NamedTuple):
    """A tensor of heads: element (b, h, s, d) is at b * batch_stride + h * head_stride + s * row_stride + d."""

    data: Any
    batch_stride: Any
    head_stride: Any
    row_stride: Any


class Positions(NamedTuple):
    """Where the queries stand among the keys.

    `first` is the number of FROM_NUMBER, else `starts` (B) int64 holds one for each row. `capacity` is the number of
    rows of the key buffer, `new_keys` how many of them were appended by this call.
    """

    starts: Any
    kind: Any
    first: Any
    new_keys: Any
    capacity: Any


class Mask(NamedTuple):
    """The input attention_bias, with a stride of 0 where it is repeated."""

    data: Any
    kind: Any
    batch_stride: Any
    head_stride: Any
    row_stride: Any
    column_stride: Any


class Logits(NamedTuple):
    """scale * q.k, the clamp and the cap (0: off), the window of keys around a query, and the sink (H), if `has_sink`.

    `sink_float32` says that the sink's memory holds float32.
    """

    scale: Any
    clamp: Any
    cap: Any
    keys_before: Any
    keys_after: Any
    sink: Any
    has_sink: Any
    sink_float32: Any
