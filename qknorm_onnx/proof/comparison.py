"""Compares the outputs of the old and the new subgraph on one case after the other."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from qknorm_onnx.proof.region_inputs import RegionCase
from qknorm_onnx.proof.subgraph_side import ProofSide
from qknorm_onnx.runtime.runner import CannotRunError, is_float

Tensor = npt.NDArray[Any]

FOLDED_CONSTANTS: Final = 4  # a right rewrite folds no more constants into one than this
FLOOR: Final = 1e-6
_TRIALS: Final = 2


@dataclasses.dataclass
class Comparison:
    """The verdicts of the cases so far: largest difference, and how many numbers were compared."""

    seed: int
    max_difference: float = 0.0
    compared: int = 0

    def in_float64(self, case: RegionCase, old: ProofSide, new: ProofSide) -> str:
        """Why `new` is not `old`, empty if it is. A case that the old subgraph itself refuses says nothing."""
        try:
            wanted = old.run(case.inputs)
        except CannotRunError:
            return ""
        try:
            given = new.run(case.inputs)
        except CannotRunError as error:
            return f"the new subgraph does not run where the old one does ({case.what}): {error}"
        allowed = self._effect_of_folding(case, old, wanted)
        for index, (a, b) in enumerate(zip(wanted, given, strict=True)):
            reason = self._compare(a, b, allowed[index], may_be_undefined=case.may_be_undefined)
            if reason:
                return f"output {index} {reason} ({case.what})"
        return ""

    def in_float32(self, case: RegionCase, old: ProofSide, new: ProofSide, exact: ProofSide) -> str:
        """Why `new` is not `old`, which only runs in float32; `exact` is the new subgraph in float64."""
        try:
            wanted = old.run(case.inputs)
        except CannotRunError:
            return ""
        try:
            given, narrow = exact.run(case.inputs), new.run(case.inputs)
        except CannotRunError as error:
            return f"the new subgraph does not run where the old one does ({case.what}): {error}"
        random = np.random.default_rng(self.seed)
        weights, inputs = exact.moved_weights(random), exact.moved_inputs(case.inputs, random)
        moved = exact.run(inputs, weights=weights)
        for index, (a, b) in enumerate(zip(wanted, given, strict=True)):
            a, b, c, d = (_written(array, case) for array in (a, b, narrow[index], moved[index]))
            finite = np.isfinite(b) & np.isfinite(c) & np.isfinite(d) if is_float(b.dtype) else None
            allowed = FLOOR
            if finite is not None:
                allowed += FOLDED_CONSTANTS * _error(d, b, finite) + 2 * _error(c, b, finite)
            reason = self._compare(a, b, allowed, may_be_undefined=case.may_be_undefined)
            if reason:
                return f"output {index} {reason} ({case.what})"
        return ""

    def in_own_type(self, case: RegionCase, exact: ProofSide, old: ProofSide, new: ProofSide) -> str:
        """Why `new` is worse than `old` in a half-precision type, judged by the old subgraph in float64."""
        try:
            truth, wanted = exact.run(case.inputs), old.run(case.inputs)
        except CannotRunError:
            return ""
        try:
            given = new.run(case.inputs)
        except CannotRunError as error:
            return f"the new subgraph does not run in its own type where the old one does ({case.what}): {error}"
        for index, (r, a, b) in enumerate(zip(truth, wanted, given, strict=True)):
            if not is_float(r.dtype) or not r.size:
                continue
            unit = float(ml_dtypes.finfo(_half_type(case)).eps)  # type: ignore[no-untyped-call]
            r, a, b = (_written(array, case) for array in (r, a, b))
            usable = np.isfinite(r) & np.isfinite(a.astype(np.float64))
            old_error, new_error = _error(a, r, usable), _error(b, r, usable)
            if not new_error <= 2 * old_error + 4 * unit:  # also where it is NaN
                errors = f"{new_error:.2g} in its own type where the old one is by {old_error:.2g}"
                return f"output {index} is off by {errors} ({case.what})"
        return ""

    def _effect_of_folding(self, case: RegionCase, old: ProofSide, wanted: list[Tensor]) -> list[float]:
        """For each output, the largest difference that folded constants explain."""
        random = np.random.default_rng(self.seed)
        effects = [0.0] * len(wanted)
        for _ in range(_TRIALS):
            moved = old.run(case.inputs, weights=old.moved_weights(random))
            for index, (a, b) in enumerate(zip(wanted, moved, strict=True)):
                if is_float(a.dtype):
                    effect = _error(b, a, np.isfinite(a) & np.isfinite(b))
                    effects[index] = max(effects[index], effect)
        return [FLOOR + FOLDED_CONSTANTS * effect for effect in effects]

    def _compare(self, old: Tensor, new: Tensor, allowed: float, *, may_be_undefined: bool) -> str:
        if old.shape != new.shape:
            return f"has shape {new.shape} instead of {old.shape}"
        if not is_float(old.dtype):
            self.compared += old.size
            return "" if np.array_equal(old, new) else "differs; it must be equal, as it is no float"
        defined, given = np.isfinite(old), np.isfinite(new)
        # A zero row or one without a visible key is NaN in some spellings; the new one must give a number there.
        wrong = np.flatnonzero(~given) if may_be_undefined else np.flatnonzero(defined != given)
        if wrong.size:
            return f"is not finite on one side only, at {wrong.size} of {old.size} values"
        difference = _error(new, old, defined)
        self.compared += int(defined.sum())
        self.max_difference = max(self.max_difference, difference)
        if difference <= allowed:
            return ""
        return f"differs by {difference:.2g} of its largest value; rounding to float32 explains {allowed:.2g}"


def _written(array: Tensor, case: RegionCase) -> Tensor:
    """The numbers that mean something: of a cache (batch, heads, positions, values), the entries that hold keys."""
    if case.keys is None or array.ndim != 4:
        return array
    return np.concatenate([row[:, :count].reshape(-1) for row, count in zip(array, case.keys, strict=True)])


def _error(y: Tensor, truth: Tensor, where: npt.NDArray[np.bool_]) -> float:
    """max|y - truth| / max|truth| over the chosen values; 0 if there are none."""
    if not where.any():
        return 0.0
    y64, truth64 = y.astype(np.float64)[where], truth.astype(np.float64)[where]
    difference, largest = np.max(np.abs(y64 - truth64)), np.max(np.abs(truth64))
    if difference == 0:
        return 0.0
    return float(difference / largest) if largest > 0 else float("inf")


def _half_type(case: RegionCase) -> np.dtype[Any]:
    halves = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
    return next(array.dtype for array in case.inputs.values() if array.dtype in halves)
