"""What the recognisers read off a graph: tensors with the meaning of their axes, fragments of a chain, and whole matches.

A recogniser is a small function `(Located, ...) -> fragment | Declined | None`: None says "this is not my spelling", so
that the next one is asked; `Declined` says "this is what I look for, but not in a form that can be rewritten".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy.typing as npt
import onnx_ir as ir

from qknorm_onnx.graph.recognise.index_terms import Linear
from qknorm_onnx.spec.qk_norm_spec import EpsilonMode, NormAxis, NormKind, QKNormRotarySpec, QKNormSpec

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
class Declined:
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
    which. `is_buffer`: the file says so, as past and present have one size.
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
    front of the table's first row are not rotated.
    """

    parts: tuple[tuple[ir.Value, tuple[int, ...]], ...]
    layout: Layout
    negated: bool = False
    roots: tuple[ir.Value, ...] = ()
    positions: ir.Value | RowLengths | None = None
    prefix: int = 0

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
    stop: Declined | None = None

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


@dataclasses.dataclass(frozen=True)
class GroupedAxes:
    """The axes of a tensor that differs between heads which are two axes: letters, "" of size 1, and the sizes of K and G."""

    letters: Layout
    kv_heads: int
    group: int


@dataclasses.dataclass(frozen=True)
class Bias:
    """One thing that is added to the logits, or a boolean that hides keys (`negated`: where it is True).

    `fill` is what hidden logits are replaced by. `axes`: for each axis of the logits' mask the axis of `value` that lies
    there, None where it does not vary (axes of `value` that are not named have size 1); absent where `value` can be broadcast
    as it is. `windows`: `value` is (1, W, 1, S, T), one mask for each of the W windows that the batch consists of
    (B = images * W, windows innermost). `folded`: `value` is (B*H, S, T). `grouped`: `value` has axes for K or G.
    """

    value: ir.Value
    negated: bool = False
    fill: float | None = None
    axes: tuple[int | None, ...] | None = None
    windows: int = 0
    folded: bool = False
    grouped: GroupedAxes | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Core:
    """softmax(scale * q.k + bias) v, as it stands in the graph: the operands still with norm, rotary and repeats in front.

    `query_steps` and `key_steps` are what the operator itself does to q and k, nearest to the softmax first. `lengths` says
    where the new keys of each row go in the cache. `refusal` says why this core cannot be rewritten, if it is QK-Norm
    attention at all.
    """

    node: ir.Node
    query: Located
    key: Located
    value: Located
    output: Located
    scale: float
    factors: tuple[Factor, ...] = ()
    softcap: float = 0.0
    logit_clamp: float = 0.0
    is_causal: bool = False
    left_window_size: int = -1
    biases: tuple[Bias, ...] = ()
    sink: Parameter | None = None
    query_steps: tuple[Fragment, ...] = ()
    key_steps: tuple[Fragment, ...] = ()
    past: tuple[ir.Value, ir.Value] | None = None
    presents: tuple[ir.Value, ir.Value] | None = None
    lengths: RowLengths | None = None
    refusal: Declined | None = None


@dataclasses.dataclass(frozen=True)
class Gain:
    """The product of parameters and a number: a norm's weight, or a factor of the queries."""

    factors: tuple[Factor, ...] = ()
    number: float = 1.0

    @property
    def trivial(self) -> bool:
        """Whether it is the number 1."""
        return not self.factors and self.number == 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preparation:
    """Norm, rotary and what belongs to them of one tensor of heads.

    `source` is what they are applied to. With `parts`, that is their concatenation along the positions, each of them
    prepared on its own before.
    """

    source: Located
    spec: QKNormRotarySpec
    weight: Gain
    bias: Parameter | None
    scale: Gain
    rotary: Rotary | None
    parts: tuple[Preparation, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Visibility:
    """Who sees whom, as numbers, and what must stay a tensor."""

    is_causal: bool = False
    left_window_size: int = -1
    right_window_size: int = -1
    biases: tuple[Bias, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class QKNormMatch:
    """One attention that one canonical node can stand for.

    With `prepared_apart`, q and k are prepared by a `QKNormRotary` node each and `spec` is that of the bare core.
    `value` is None where the values are the prepared keys themselves. `caches` are the key's and the value's, both or none.
    The core's `lengths` say where new keys go; without them they follow the past.
    """

    name: str
    core: Core
    spec: QKNormSpec
    query: Preparation
    key: Preparation
    value: Located | None
    visibility: Visibility
    caches: tuple[CacheAppend, CacheAppend] | None = None
    prepared_apart: bool = False


@dataclasses.dataclass(frozen=True)
class Plain:
    """Attention of which neither q nor k is normalised."""

    name: str


Recognition = QKNormMatch | Declined | Plain
Side = Literal["query", "key", "value"]
