"""Tensors told apart by a few sums that do not hang on the order of their values: a transposed one has the same."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np
import numpy.typing as npt

# Two evaluations in float64 differ in the last digits; other weights differ in the first ones.
_SAME: Final = 1e-7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Of the finite values: how many, and their moments 1 to 3, each as a size (root of the mean of the power)."""

    count: int
    moments: tuple[float, ...]

    @property
    def tells(self) -> bool:
        """Whether it can tell one tensor from others: a single value, or zeros alone, are found anywhere."""
        return self.count > 1 and self.moments[1] > 0

    def equals(self, other: Fingerprint) -> bool:
        """Whether both may be the same values in any order."""
        scale = max(self.moments[1], other.moments[1])
        near = all(abs(a - b) <= _SAME * scale for a, b in zip(self.moments, other.moments, strict=True))
        return self.count == other.count and near


def fingerprint(values: npt.NDArray[Any]) -> Fingerprint:
    """The fingerprint of a float tensor of any shape."""
    numbers = values.astype(np.float64)[np.isfinite(values)]
    if not numbers.size:
        return Fingerprint(count=0, moments=(0.0, 0.0, 0.0))
    largest = float(np.abs(numbers).max()) or 1.0
    scaled = numbers / largest  # the third power of a large value must not overflow
    moments = (scaled.mean(), np.sqrt(np.square(scaled).mean()), np.cbrt((scaled**3).mean()))
    return Fingerprint(count=int(numbers.size), moments=tuple(float(moment) * largest for moment in moments))
