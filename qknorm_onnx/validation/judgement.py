"""The verdict on one output of one case: error against budget, with what is not finite told apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from qknorm_onnx.validation.measures.error_budget import OwnErrors, budget
from qknorm_onnx.validation.measures.metrics import Mask, cosine, finite, relative_error, snr_db, top_one
from qknorm_onnx.validation.report.parity_row import ParityRow, WorstValue

Tensor = npt.NDArray[Any]

_SAME: Final = 1e-9  # of the largest value: in float64, sums in another order


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One output of one case from every side; `in_dtype` is None where PyTorch does not run in the type."""

    truth: Tensor
    in_float32: Tensor
    in_dtype: Tensor | None
    given: Tensor


def own_errors(truth: Tensor, in_float32: Tensor, in_dtype: Tensor | None) -> OwnErrors:
    """The errors of one evaluation by PyTorch: of integers and bools the share that differs; NaN where nothing is to compare."""
    return OwnErrors(in_dtype=None if in_dtype is None else _own_error(in_dtype, truth), in_float32=_own_error(in_float32, truth))


def _own_error(y: Tensor, truth: Tensor) -> float:
    if np.issubdtype(truth.dtype, np.floating):
        return relative_error(y, truth, finite(truth))
    return float(np.mean(y != truth)) if truth.size else float("nan")


def without_what_changes(truth: Tensor, other: Tensor) -> Tensor:
    """`truth`, NaN where `other` differs; integers and bools are all kept or all left out."""
    if truth.shape != other.shape:
        return truth
    if not np.issubdtype(truth.dtype, np.floating):
        return truth if np.array_equal(truth, other) else np.full(truth.shape, np.nan)
    with np.errstate(invalid="ignore"):
        largest = np.abs(truth[finite(truth)]).max(initial=0.0)
        same = np.abs(truth - other) <= _SAME * largest
    return np.where(same, truth, np.nan)


def is_left_out(truth: Tensor) -> bool:
    """Whether nothing of an output that has values is to be judged: all of it hangs on hidden tokens."""
    return truth.size > 0 and not finite(truth).any()


def judge(
    row: ParityRow,
    measured: Measured,
    *,
    is_logits: bool,
    others: Sequence[OwnErrors] = (),
    tolerance: float | None = None,
) -> ParityRow:
    """`row` with the verdict, the reason and the figures. `others` are the errors of PyTorch's other evaluations.

    `tolerance` is what is allowed instead of the budget; of integers and bools as many values may differ as without it.

    Values at which the truth itself is not finite (rows without a visible key in some models) say nothing and are left out.
    Where PyTorch in the type is not finite, the candidate may be so as well, but nowhere else; a candidate that is finite
    everywhere is judged like any other.
    """
    truth, given = measured.truth, measured.given
    if given.shape != truth.shape:
        return _failed(row, f"shape {given.shape} instead of {truth.shape}")
    if not np.issubdtype(truth.dtype, np.floating):
        return _judge_exact(row, measured, others)
    defined = finite(truth)
    if not defined.any():
        return _failed(row, "nothing was compared: the truth is empty or nowhere finite")
    torch_finite = defined if measured.in_dtype is None else finite(measured.in_dtype)
    row = dataclasses.replace(_with_budget(row, measured, defined, others), all_zero=not truth[defined].any())
    if tolerance is not None:
        row = dataclasses.replace(row, budget=tolerance)
    lost = defined & ~finite(given)
    if (lost & torch_finite).any():
        count = int((lost & torch_finite).sum())
        return _failed(row, f"{count} of {truth.size} values are not finite where PyTorch's and the true ones are")
    row = _with_figures(row, measured, defined & ~lost, is_logits=is_logits and not lost.any())
    if not row.error <= row.budget and (defined & ~lost).any():
        return _failed(row, f"error {row.error:.2g} where {row.budget:.2g} is allowed")
    if lost.any():
        reason = f"{int(lost.sum())} of {truth.size} values are not finite, PyTorch's own neither"
        return dataclasses.replace(row, verdict="overflows in PyTorch too", reason=reason)
    return dataclasses.replace(row, verdict="passed")


def _with_budget(row: ParityRow, measured: Measured, defined: Mask, others: Sequence[OwnErrors]) -> ParityRow:
    own = own_errors(measured.truth, measured.in_float32, measured.in_dtype)
    worst = own.with_others(others)
    # Where PyTorch is not finite in float32 either, the floor is left.
    in_float32 = worst.in_float32 if np.isfinite(worst.in_float32) else 0.0
    allowed = budget(row.dtype, torch_error=worst.in_dtype, float32_error=in_float32)
    note = _joined(
        allowed.note,
        _spread(own, worst),
        "" if defined.all() else f"{int((~defined).sum())} values left out: the truth is not finite there",
    )
    return dataclasses.replace(row, torch_error=own.in_dtype, budget=allowed.allowed, note=note)


def _spread(own: OwnErrors, worst: OwnErrors) -> str:
    if own.in_dtype is None or worst.in_dtype is None or not worst.in_dtype > own.in_dtype:
        return ""
    return f"PyTorch's own error is up to {worst.in_dtype:.2g} with its sums in other orders"


def _with_figures(row: ParityRow, measured: Measured, where: Mask, *, is_logits: bool) -> ParityRow:
    truth, given = measured.truth, measured.given.astype(np.float64)
    agreement = top_one(given, truth, allowed=row.budget) if is_logits and where.all() else None
    return dataclasses.replace(
        row,
        error=relative_error(given, truth, where),
        cosine=cosine(given[where], truth[where]),
        snr_db=snr_db(given[where], truth[where]),
        top_one=agreement,
        worst=_worst_value(given, truth, where),
    )


def _worst_value(given: Tensor, truth: Tensor, where: Mask) -> WorstValue | None:
    """The place of the largest error; None for no values."""
    if not where.any():
        return None
    off = np.where(where, np.abs(given.astype(np.float64) - truth.astype(np.float64)), -1.0)
    index = np.unravel_index(int(off.argmax()), off.shape)
    return WorstValue(index=tuple(int(place) for place in index), given=float(given[index]), exact=float(truth[index]))


def _judge_exact(row: ParityRow, measured: Measured, others: Sequence[OwnErrors]) -> ParityRow:
    """Integers and bools: the share of values that differ; as many may as PyTorch itself gets wrong in the type."""
    if not measured.truth.size:
        return _failed(row, "nothing was compared: the output is empty")
    error = float(np.mean(measured.given != measured.truth))
    own = own_errors(measured.truth, measured.in_float32, measured.in_dtype)
    worst = own.with_others(others)
    row = dataclasses.replace(
        row,
        error=error,
        torch_error=own.in_dtype,
        budget=2 * (worst.in_dtype or 0.0),
        note=_spread(own, worst),
        worst=_worst_value(measured.given, measured.truth, np.ones(measured.truth.shape, dtype=np.bool_)),
    )
    if error <= row.budget:
        return dataclasses.replace(row, verdict="passed")
    return _failed(row, f"{error:.2%} of the values differ where {row.budget:.2%} may")


def _failed(row: ParityRow, reason: str) -> ParityRow:
    return dataclasses.replace(row, verdict="failed", reason=reason)


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
