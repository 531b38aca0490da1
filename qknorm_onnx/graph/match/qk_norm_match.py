"""Whole matches: one attention that one canonical node can stand for, or the reason why not."""

from __future__ import annotations

import dataclasses
from typing import Literal

from qknorm_onnx.graph.match.attention_core import Bias, Core
from qknorm_onnx.graph.match.fragments import CacheAppend, Factor, Rotary
from qknorm_onnx.graph.match.located import Located, Parameter, Unreadable
from qknorm_onnx.spec.qk_norm_spec import QKNormRotarySpec, QKNormSpec


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


Recognition = QKNormMatch | Unreadable | Plain
Role = Literal["query", "key", "value"]
