"""How large an error may be: what PyTorch itself gets wrong in the same type, twice, and a few units of the type."""

from __future__ import annotations

import dataclasses
import math
from typing import Final

import ml_dtypes

from qknorm_onnx.spec.signature import Dtype

TORCH_FACTOR: Final = 2
FLOOR_UNITS: Final = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """The allowed error of one output on one case, and how it came about."""

    allowed: float
    note: str = ""


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
