"""One line of a validation: an output on a case in a type, with its figures and its verdict."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final, Literal

from qknorm_onnx.spec.signature import Dtype
from qknorm_onnx.validation.measures.metrics import TopOne
from qknorm_onnx.validation.report.fault import Fault

Verdict = Literal["passed", "failed", "overflows in PyTorch too", "not run"]
FROM_GOOD_TO_BAD: Final[tuple[Verdict, ...]] = ("passed", "overflows in PyTorch too", "not run", "failed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorstValue:
    """The value that is furthest off: its place in the output, what the model gives, and the exact one."""

    index: tuple[int, ...]
    given: float
    exact: float

    @property
    def text(self) -> str:
        """For example `worst at [0, 3, 17]: 1.25 instead of 1.5`."""
        return f"worst at [{', '.join(map(str, self.index))}]: {self.given:.6g} instead of {self.exact:.6g}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParityRow:
    """One output on one case in one type. Errors are max|y - r| / max|r| against the float64 truth r.

    `how` is "native", "emulated" (bfloat16 values at operator borders, float32 arithmetic) or "converted" (the float32
    file was converted); `torch_error` is None where PyTorch does not run in the type. Where the truth is `all_zero`, a wrong
    model passes as well as the right one: such a row is no evidence. `purpose` is the fault that the case is to show.
    `reason` says why there is no pass, `note` what a reader of the figures must know.
    """

    dtype: Dtype
    how: str
    case: str
    output: str
    verdict: Verdict
    error: float = math.nan
    torch_error: float | None = None
    budget: float = math.nan
    cosine: float = math.nan
    snr_db: float = math.nan
    top_one: TopOne | None = None
    required: bool = False
    all_zero: bool = False
    reason: str = ""
    note: str = ""
    purpose: str = ""
    worst: WorstValue | None = None
    fault: Fault | None = None

    @property
    def exceeds(self) -> bool:
        """Failed by nothing but the size of its error."""
        return self.verdict == "failed" and self.error > self.budget

    @property
    def is_bad(self) -> bool:
        """Failed, or not run."""
        return self.verdict in ("failed", "not run")

    @property
    def why(self) -> str:
        """Reason and note in one line."""
        return "; ".join(part for part in (self.reason, self.note) if part)


def worst_of_each_case(rows: Sequence[ParityRow]) -> list[ParityRow]:
    """For each type and case the row of the output that failed, or else came closest to its budget."""
    worst: dict[tuple[str, str], ParityRow] = {}
    for row in rows:
        key = (row.dtype, row.case)
        if key not in worst or _badness(row) > _badness(worst[key]):
            worst[key] = row
    return list(worst.values())


def _badness(row: ParityRow) -> tuple[int, float]:
    share = row.error / row.budget if row.budget > 0 and not math.isnan(row.error) else 0.0
    return FROM_GOOD_TO_BAD.index(row.verdict), share
