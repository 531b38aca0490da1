"""How large an error may be: what PyTorch itself gets wrong in the same type, twice, and a few units of the type.

One run of PyTorch is one draw of its rounding errors. Where the result hangs on a few of them (two large logits that nearly tie:
each is rounded to its own size, and their difference decides), the draws vary by their whole size: of two that are equally
distributed around 0, one is more than twice the other in 30% of all cases. A candidate that exceeds the budget of the one run
is therefore judged by several, in which the module adds the terms of its sums in other orders (`OwnErrors.with_others`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

import ml_dtypes

from qknorm_onnx.spec.signature import Dtype

TORCH_FACTOR: Final = 2
FLOOR_UNITS: Final = 4
# A normal error exceeds twice the largest of 1 + 8 like it in 0.6% of all cases.
OTHER_ORDERS: Final = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """The allowed error of one output on one case, and how it came about."""

    allowed: float
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnErrors:
    """PyTorch's own error on one output: in the type (None where it does not run in it), and in float32."""

    in_dtype: float | None
    in_float32: float

    def with_others(self, others: Sequence[OwnErrors]) -> OwnErrors:
        """The largest of these and of evaluations in `others` that are finite."""
        in_dtype = self.in_dtype
        if in_dtype is not None:
            in_dtype = _largest(in_dtype, [other.in_dtype for other in others])
        return OwnErrors(in_dtype=in_dtype, in_float32=_largest(self.in_float32, [other.in_float32 for other in others]))


def _largest(error: float, others: Sequence[float | None]) -> float:
    """`error` where it is not finite itself."""
    if not math.isfinite(error):
        return error
    return max([error, *(other for other in others if other is not None and math.isfinite(other))])


def unit(dtype: Dtype) -> float:
    """Distance from 1 to the next larger number of the type."""
    return float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]


def floor(dtype: Dtype) -> float:
    """The error that is always allowed: four units of the type."""
    return FLOOR_UNITS * unit(dtype)


def budget(dtype: Dtype, *, torch_error: float | None, float32_error: float) -> Budget:
    """`2 * torch_error + floor`.

    Where PyTorch does not run in `dtype` (None) or is not finite there, its float32 error on the same rounded inputs is
    scaled by the ratio of the units: to first order, rounding errors are proportional to the unit.
    """
    if torch_error is not None and math.isfinite(torch_error):
        return Budget(allowed=TORCH_FACTOR * torch_error + floor(dtype))
    scaled = float32_error * unit(dtype) / unit("float32")
    why = "does not run" if torch_error is None else "is not finite"
    note = f"PyTorch {why} in {dtype}; the budget is its float32 error scaled to {dtype}"
    return Budget(allowed=TORCH_FACTOR * scaled + floor(dtype), note=note)
