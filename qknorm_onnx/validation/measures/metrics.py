"""How far one array is from another."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

Tensor = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopOne:
    """Agreement of the largest value of each row. Near-tie: the two largest true ones are nearer than the allowed error."""

    rows: int
    agreeing: int
    near_ties: int
    flips: int  # disagreements that no near-tie excuses

    @property
    def agreement(self) -> float:
        """Share of rows with the same largest value."""
        return self.agreeing / self.rows


def finite(array: Tensor) -> Mask:
    """Which values are finite; every integer and bool is."""
    return np.isfinite(array.astype(np.float64))


def relative_error(y: Tensor, truth: Tensor, where: Mask | None = None) -> float:
    """max|y - truth| / max|truth| over `where` (by default everything); infinite where y is not finite, NaN for no values."""
    where = np.ones(truth.shape, dtype=np.bool_) if where is None else where
    if not where.any():
        return float("nan")
    y64, truth64 = y.astype(np.float64)[where], truth.astype(np.float64)[where]
    if not np.isfinite(y64).all():
        return float("inf")
    difference, largest = float(np.max(np.abs(y64 - truth64))), float(np.max(np.abs(truth64)))
    if difference == 0:
        return 0.0
    return difference / largest if largest > 0 else float("inf")


def cosine(y: Tensor, truth: Tensor) -> float:
    """Cosine of the angle between both as vectors; NaN where one of them is zero or not finite."""
    a, b = y.astype(np.float64).ravel(), truth.astype(np.float64).ravel()
    with np.errstate(all="ignore"):
        return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def snr_db(y: Tensor, truth: Tensor) -> float:
    """Signal to noise ratio 10 log10(sum truth^2 / sum (y - truth)^2) in dB; infinite for equal arrays."""
    a, b = y.astype(np.float64), truth.astype(np.float64)
    with np.errstate(all="ignore"):
        return float(10 * np.log10(np.sum(np.square(b)) / np.sum(np.square(a - b))))


def top_one(y: Tensor, truth: Tensor, *, allowed: float) -> TopOne:
    """Agreement of logits (..., V), V >= 2, where each value may be off by `allowed` times the largest true one."""
    rows = truth.astype(np.float64).reshape(-1, truth.shape[-1])
    given = y.astype(np.float64).reshape(-1, truth.shape[-1])
    two_largest = np.sort(rows, axis=-1)[:, -2:]
    # Both of the two may be off, in opposite directions.
    tie = two_largest[:, 1] - two_largest[:, 0] <= 2 * allowed * np.max(np.abs(rows), initial=0.0)
    agrees = rows.argmax(-1) == given.argmax(-1)
    return TopOne(rows=len(rows), agreeing=int(agrees.sum()), near_ties=int(tie.sum()), flips=int((~agrees & ~tie).sum()))
