"""The verdict on one output of one case: error against budget, with what is not finite told apart."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from qknorm_onnx.validation.error_budget import budget
from qknorm_onnx.validation.metrics import Mask, cosine, finite, relative_error, snr_db, top_one
from qknorm_onnx.validation.report import ParityRow

Tensor = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One output of one case from every side; `in_dtype` is None where PyTorch does not run in the type."""

    truth: Tensor
    in_float32: Tensor
    in_dtype: Tensor | None
    given: Tensor


def judge(row: ParityRow, measured: Measured, *, is_logits: bool) -> ParityRow:
    """`row` with the verdict, the reason and the figures.

    Values at which the truth itself is not finite (rows without a visible key in some models) say nothing and are left out.
    Where PyTorch in the type is not finite, the candidate may be so as well, but nowhere else; a candidate that is finite
    everywhere is judged like any other.
    """
    truth, given = measured.truth, measured.given
    if given.shape != truth.shape:
        return _failed(row, f"shape {given.shape} instead of {truth.shape}")
    if not np.issubdtype(truth.dtype, np.floating):
        return _judge_exact(row, measured)
    defined = finite(truth)
    if not defined.any():
        return _failed(row, "nothing was compared: the truth is empty or nowhere finite")
    torch_finite = defined if measured.in_dtype is None else finite(measured.in_dtype)
    row = dataclasses.replace(_with_budget(row, measured, defined), all_zero=not truth[defined].any())
    lost = defined & ~finite(given)
    if (lost & torch_finite).any():
        count = int((lost & torch_finite).sum())
        return _failed(row, f"{count} of {truth.size} values are not finite where PyTorch's and the true ones are")
    row = _with_figures(row, measured, defined & ~lost, is_logits=is_logits and not lost.any())
    if not row.error <= row.budget and (defined & ~lost).any():
        return _failed(row, f"error {row.error:.2g} where {row.budget:.2g} is allowed")
    if lost.any():
        reason = f"{int(lost.sum())} of {truth.size} values are not finite, PyTorch's own neither"
        return dataclasses.replace(row, verdict="overflows in PyTorch too", reason=_joined(row.reason, reason))
    return dataclasses.replace(row, verdict="passed")


def _with_budget(row: ParityRow, measured: Measured, defined: Mask) -> ParityRow:
    own = None if measured.in_dtype is None else relative_error(measured.in_dtype, measured.truth, defined)
    allowed = budget(row.dtype, torch_error=own, float32_error=_scale_free(measured, defined))
    note = _joined(
        allowed.note, "" if defined.all() else f"{int((~defined).sum())} values left out: the truth is not finite there"
    )
    return dataclasses.replace(row, torch_error=own, budget=allowed.allowed, reason=note)


def _scale_free(measured: Measured, defined: Mask) -> float:
    """PyTorch's float32 error; 0 where that is not finite either, which leaves the floor."""
    error = relative_error(measured.in_float32, measured.truth, defined)
    return error if np.isfinite(error) else 0.0


def _with_figures(row: ParityRow, measured: Measured, where: Mask, *, is_logits: bool) -> ParityRow:
    truth, given = measured.truth, measured.given.astype(np.float64)
    agreement = top_one(given, truth, allowed=row.budget) if is_logits and where.all() else None
    return dataclasses.replace(
        row,
        error=relative_error(given, truth, where),
        cosine=cosine(given[where], truth[where]),
        snr_db=snr_db(given[where], truth[where]),
        top_one=agreement,
    )


def _judge_exact(row: ParityRow, measured: Measured) -> ParityRow:
    """Integers and bools: the share of values that differ; as many may as PyTorch itself gets wrong in the type."""
    if not measured.truth.size:
        return _failed(row, "nothing was compared: the output is empty")
    error = float(np.mean(measured.given != measured.truth))
    own = None if measured.in_dtype is None else float(np.mean(measured.in_dtype != measured.truth))
    row = dataclasses.replace(row, error=error, torch_error=own, budget=2 * (own or 0.0))
    if error <= row.budget:
        return dataclasses.replace(row, verdict="passed")
    return _failed(row, f"{error:.2%} of the values differ where {row.budget:.2%} may")


def _failed(row: ParityRow, reason: str) -> ParityRow:
    return dataclasses.replace(row, verdict="failed", reason=_joined(reason, row.reason))


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
