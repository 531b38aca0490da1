"""Fragments: what one stretch of a graph does to queries, keys or values on their way to the attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import onnx_ir as ir

from qknorm_onnx.graph.match.located import Layout, Located, Parameter, Unreadable
from qknorm_onnx.graph.symbolic.terms import Linear
from qknorm_onnx.spec.qk_norm_spec import EpsilonMode, NormAxis, NormKind


@dataclasses.dataclass(frozen=True)
class Factor:
    """x * parameter, or x / parameter where `inverse`."""

    parameter: Parameter
    inverse: bool = False
    node: ir.Node | None = None


@dataclasses.dataclass(frozen=True)
class Offset:
    """x + parameter: a norm's bias."""

    parameter: Parameter
    node: ir.Node | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    """x over its statistics. `weight_factor` is a number that belongs into the norm's weight (1 / sqrt(D) of an L2 form)."""

    kind: NormKind
    axis: NormAxis
    epsilon: float
    mode: EpsilonMode
    groups: int = 1
    weight_factor: float = 1.0
    node: ir.Node | None = None


@dataclasses.dataclass(frozen=True)
class RowLengths:
    """How many keys each row of the batch has after the call, as GroupQueryAttention is told.

    `last` (B) is the position of the newest key, `total` () the number of keys of the longest row. Past keys lie at the
    front of a tensor that the caller lets grow to `total` keys, or of a buffer with room for more: at run time, sizes tell
    which. `is_buffer`: it needs no more room than it has, or none to be made for it; the file says so where past and present
    have one size.
    """

    last: ir.Value
    total: ir.Value
    is_buffer: bool


@dataclasses.dataclass(frozen=True)
class Table:
    """cos or sin: one column for each rotated value or pair, out of one or several values of the graph.

    `parts` lists (value, columns of its last axis); `layout` names the axes of the values, the last one is "W".
    `roots` are the values that a proof must start from where columns are equal only because of how they were computed.
    With `positions`, the values have one row per position (N, W), and the table is their rows at `positions`, whose axes
    `layout` then names; as `RowLengths` they are those of the new tokens behind each row's past keys. `prefix` tokens in
    front of the table's first row and `suffix` tokens behind its last one are not rotated. With `heads`, the columns are
    those of so many heads, one head behind the other.
    """

    parts: tuple[tuple[ir.Value, tuple[int, ...]], ...]
    layout: Layout
    negated: bool = False
    roots: tuple[ir.Value, ...] = ()
    positions: ir.Value | RowLengths | None = None
    prefix: int = 0
    suffix: int = 0
    heads: int = 0

    @property
    def width(self) -> int:
        """Number of columns."""
        return sum(len(columns) for _, columns in self.parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotary:
    """A rotary embedding of `size` values from `offset` on, in pairs as `RotarySpec` says."""

    cos: Table
    sin: Table
    interleaved: bool
    size: int
    offset: int
    sections: int
    node: ir.Node | None = None


@dataclasses.dataclass(frozen=True)
class Repeat:
    """Each key / value head serves `count` query heads."""

    count: int


@dataclasses.dataclass(frozen=True)
class CacheAppend:
    """Concat(past, new) along the positions: `present` is its result, with heads second.

    With `first`, past is a buffer of fixed size, and new entries were written into it from that position on.
    """

    past: Located
    present: Located
    node: ir.Node
    first: Linear | None = None


@dataclasses.dataclass(frozen=True)
class Streams:
    """Concat along the positions of tensors that have chains of their own (text and image, self and cross keys)."""

    chains: tuple[Chain, ...]
    node: ir.Node


Fragment = Factor | Offset | Norm | Rotary | Repeat | CacheAppend | Streams


@dataclasses.dataclass(frozen=True)
class Step:
    """One fragment and the tensor in front of it."""

    fragment: Fragment
    source: Located


@dataclasses.dataclass(frozen=True)
class Chain:
    """What happens to q, k or v on the way to the core, nearest to the core first.

    `path` are all tensors that were walked through from the core to where the walk stopped, the core's operand first.
    `stop` says why it stopped there, if that was a refusal.
    """

    start: Located
    steps: tuple[Step, ...]
    path: tuple[Located, ...]
    stop: Unreadable | None = None

    def fragments(self) -> Iterator[Fragment]:
        """The fragments, nearest to the core first."""
        return (step.fragment for step in self.steps)

    @property
    def norm(self) -> Norm | None:
        """The norm of the chain, if it has one."""
        return next((fragment for fragment in self.fragments() if isinstance(fragment, Norm)), None)

    @property
    def streams(self) -> Streams | None:
        """The streams that the chain joins, if it does."""
        return next((fragment for fragment in self.fragments() if isinstance(fragment, Streams)), None)

    @property
    def normalised(self) -> bool:
        """Whether there is a norm, in this chain or in one of its streams."""
        streams = self.streams
        return self.norm is not None or (streams is not None and any(chain.normalised for chain in streams.chains))
