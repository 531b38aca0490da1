"""Names of the values behind a rotary embedding: what the channels of a tensor are made of, and a node on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qknorm_onnx.graph.match.located import Dim, Layout
from qknorm_onnx.graph.walk.constants import attribute_int


@dataclasses.dataclass(frozen=True)
class Term:
    """sign * x[source], times column `column` of `table` if there is one.

    A table is broadcast against x, or where `of_operator` it is (B or 1, S, W) as RotaryEmbedding takes it. Its columns are
    counted over its last `axes` axes; `lead` names the others where they are not those of x.
    """

    sign: int
    source: int
    table: ir.Value | None = None
    column: int = 0
    of_operator: bool = False
    axes: int = 1
    lead: Layout | None = None


Terms = tuple[Term, ...]
Channels = npt.NDArray[Any]  # of Terms; its axes are the trailing axes of the tensor that x's last axis was cut into


class NotLinearError(Exception):
    """The stretch does something else than to select, negate, add and multiply by tables; the message says what, `node` where."""

    node: ir.Node | None = None


@dataclasses.dataclass(frozen=True)
class Visit:
    """A node on the way: which of its outputs is wanted, and the channels of its inputs (None where they are no data)."""

    node: ir.Node
    value: ir.Value
    operands: list[Channels | None]
    lead_dims: tuple[Dim, ...]

    @property
    def only(self) -> Channels:
        """The first operand, which alone depends on x."""
        if self.operands[0] is None or any(operand is not None for operand in self.operands[1:]):
            raise NotLinearError("several of its operands are computed from what it would rotate")
        return self.operands[0]

    @property
    def lead(self) -> int:
        """The number of axes that are not followed."""
        return len(self.lead_dims)

    def axis(self, rank: int, default: int = 0) -> int:
        """The `axis` attribute, counted from the first followed axis."""
        axis = attribute_int(self.node, "axis", default) % rank - self.lead
        if axis < 0:
            raise NotLinearError("it works on axes before the last one")
        return axis


Rule = Callable[[Visit], Channels]


def changed(channels: Channels, change: Callable[[Term], Term]) -> Channels:
    """Each term of each channel, changed."""
    out = np.empty(channels.shape, dtype=object)
    for index in np.ndindex(channels.shape):
        out[index] = tuple(change(term) for term in channels[index])
    return out


def negated(channels: Channels) -> Channels:
    """Minus the channels."""
    return changed(channels, lambda term: dataclasses.replace(term, sign=-term.sign))
