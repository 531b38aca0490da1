"""Rows of q and k near the norm's epsilon: a block's own norm in front of the projections restores every size of the inputs.

The projections of queries and keys are scaled, alike in module and file. A power of two changes no digit of a weight.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Final

from qknorm_onnx.validation.cases.case import Case, WeightScale
from qknorm_onnx.validation.cases.domain import Domain
from qknorm_onnx.validation.cases.inputs import GraphInput, example_sizes
from qknorm_onnx.validation.cases.resized import random_case, symbols_of

# Below the root of an epsilon of 1e-6 under the root, and below 1e-3 as a bound of the norm of a head; of 1e-12 under the root;
# below the bound of F.normalize.
_SIZES: Final = (1e-4, 1e-6, 1e-13)
_SMALLEST_IN_HALF: Final = 1e-5  # float16 ends at 6e-8; what a half type adds shows at the larger sizes


def near_epsilon(inputs: Sequence[GraphInput], domain: Domain) -> Iterator[Case]:
    """The values of q and k have about these sizes, at the example's sizes and at longer ones with the same weights."""
    short = example_sizes(inputs)
    symbols = symbols_of(inputs)
    long = {**short, **{symbol: short[symbol] + 3 for symbol in (*symbols.lengths, *symbols.pasts)}}
    for size in _SIZES if domain.scalable else ():
        scale = WeightScale(size=size, factors={name: 2.0 ** round(math.log2(size / of)) for name, of in domain.scalable.items()})
        for name, sizes in (("", short), (", again", long)):
            case = random_case(
                f"q and k near {size:.0e}{name}",
                inputs,
                sizes,
                seed=6000,
                purpose="an epsilon that is wrong, or in another place",
            )
            yield dataclasses.replace(case, weights=scale, in_half=size >= _SMALLEST_IN_HALF)
