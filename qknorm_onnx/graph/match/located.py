"""Tensors of a graph with the meaning of their axes.

A recogniser is a small function `(Located, ...) -> fragment | Unreadable | None`: None says "this is not my spelling", so
that the next one is asked; `Unreadable` says "this is what I look for, but not in a form that can be rewritten".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import onnx_ir as ir

Array = npt.NDArray[Any]
Dim = int | ir.SymbolicDim

# The meaning of each axis: B batch, H heads, S positions, D values of a head; "HD" is merged (heads outermost), and ""
# an axis of size 1 that means nothing. A digit is an axis of which only that index belongs to the attention.
# "R" is short-lived: the copies of one key / value head. "K" and "G" are heads as two axes: key / value heads, and the query
# heads of each (H = K * G). "T" are the positions of keys, in logits.
Layout = tuple[str, ...]

PROJECTED: Layout = ("B", "S", "HD")
HEADS_SECOND: Layout = ("B", "H", "S", "D")


@dataclasses.dataclass(frozen=True)
class Located:
    """A value of the graph, what its axes mean, and the size of each letter."""

    value: ir.Value
    layout: Layout
    sizes: Mapping[str, Dim]

    def at(self, value: ir.Value, layout: Layout) -> Located:
        """Another value with the same sizes."""
        return Located(value, layout, self.sizes)

    def axis_of(self, letter: str) -> int | None:
        """The axis that is exactly `letter`."""
        return self.layout.index(letter) if letter in self.layout else None

    def static(self, letter: str) -> int | None:
        """The size of `letter` where it is a number."""
        size = self.sizes.get(letter)
        return size if isinstance(size, int) else None


@dataclasses.dataclass(frozen=True)
class Unreadable:
    """Not rewritten: why (a clause that can follow the attention's name), and the node where the walk stopped.

    `hint` says what would make it match, or that nothing would, as it is not QK-Norm attention.
    """

    reason: str
    node: ir.Node | None
    hint: str


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A tensor that is broadcast against heads: `layout` names its axes, "" where it has size 1."""

    value: ir.Value
    layout: Layout
