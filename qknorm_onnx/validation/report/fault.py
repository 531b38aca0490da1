"""What is wrong inside a model that fails, as a value."""

from __future__ import annotations

import dataclasses
from typing import Literal

FaultKind = Literal["meaning", "not finite", "rounding", "not found"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """`meaning`: the graph computes something else than the module, also in float64. `not finite`, `rounding`: at `node`.

    `part` is the first part of the module whose result is off, as far as it was found. `good_attention` names the canonical
    attention nodes whose results are finite and exact enough.
    """

    kind: FaultKind
    text: str
    node: str = ""
    part: str = ""
    good_attention: tuple[str, ...] = ()
