"""One case: inputs, and what it is for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

Tensor = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightScale:
    """Factors of the module's parameters by name, powers of two, the same in the file; their products then have about `size`."""

    size: float
    factors: Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Inputs by graph input name, in float64, int64 or bool, and `purpose`, the fault that the case is to show.

    `required`: without a result on it there is no verdict. `with_other_padding`: the same inputs with other values where tokens
    are hidden; what of the truth depends on those (the rows of the padding itself) has no agreed meaning and is not judged.
    `weights`: projections to be scaled for this case. `in_half`: whether it says anything in float16 and bfloat16.
    """

    name: str
    inputs: Mapping[str, Tensor]
    purpose: str = ""
    required: bool = False
    with_other_padding: Mapping[str, Tensor] | None = None
    weights: WeightScale | None = None
    in_half: bool = True
