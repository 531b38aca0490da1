"""Protobuf's wire format, as far as files are written and read in parts: numbers, and the beginnings of fields."""

from __future__ import annotations

from typing import Final

VARINT: Final = 0  # wire types
EIGHT_BYTES: Final = 1
LENGTH: Final = 2
FOUR_BYTES: Final = 5


def varint(number: int) -> bytes:
    """`number`, 7 bits a byte, the lowest first."""
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def field_head(number: int, size: int) -> bytes:
    """The beginning of field `number` with `size` bytes of content."""
    return varint(number << 3 | LENGTH) + varint(size)
