"""Tile sizes, warps and pipeline stages of each kernel: one table for run-time and ahead-of-time compilation."""

from __future__ import annotations

import dataclasses
from typing import Final

SMALLEST_PADDED_HEAD: Final = 16  # what a matrix instruction takes
HEADS_OF_DECODE: Final = 16  # query heads of one key head, padded to the rows of a matrix instruction
STATISTICS_WIDTH: Final = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """`rows` x `keys` of one program, its warps, and how many key tiles are in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


def padded_head(*sizes: int) -> int:
    """The power of two that D and Dv are padded to."""
    return max(SMALLEST_PADDED_HEAD, 1 << (max(sizes) - 1).bit_length())


def prologue_tile(padded: int) -> Tile:
    """Eight values for each thread: loads of 16 bytes in half precision."""
    return Tile(rows=max(1, 1024 // padded), keys=0, warps=4, stages=1)


def prefill_tile(padded: int, *, wide: bool, masked: bool, capability: int) -> Tile:
    """The tile of `prefill`; `wide` is float32, `masked` reads attention_bias, `capability` is 80, 90, 100 or 120.

    Shared memory of one program: at most 99 KB but on 90 and 100, because images of sm_80 run on sm_86 and 89 too.
    """
    if wide and padded > 128:
        if capability in (90, 100):
            return Tile(rows=64, keys=16, warps=8, stages=1)
        return Tile(rows=32, keys=16 if masked else 32, warps=4, stages=1)
    if wide:
        return Tile(rows=64, keys=32, warps=4, stages=2 if padded <= 64 or capability in (90, 100) else 1)
    if masked:  # the addresses of the mask's tile take registers
        return Tile(rows=64, keys=32 if padded > 64 else 64, warps=8, stages=2)
    if padded > 128:
        if capability == 90:
            return Tile(rows=128, keys=64, warps=8, stages=2)
        if capability == 100:
            return Tile(rows=64, keys=64, warps=8, stages=2)
        return Tile(rows=64, keys=32, warps=4, stages=2)
    return Tile(rows=128, keys=64, warps=8, stages=3)


def decode_tile(padded: int, *, wide: bool, masked: bool) -> Tile:
    """The tile of `decode`: more keys in flight for smaller heads; `wide` and `masked` as for `prefill_tile`."""
    if wide:
        return Tile(rows=HEADS_OF_DECODE, keys=32 if padded <= 128 else 16, warps=4, stages=2)
    return Tile(rows=HEADS_OF_DECODE, keys=min(128, 8192 // padded) // (2 if masked else 1), warps=4, stages=3)
