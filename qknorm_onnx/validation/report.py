"""What a validation found, as values, a table and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, Literal

from rich.table import Table

from qknorm_onnx.spec.signature import Dtype
from qknorm_onnx.validation.locate import Fault
from qknorm_onnx.validation.metrics import TopOne

Verdict = Literal["passed", "failed", "overflows in PyTorch too", "not run"]
_STYLES: dict[Verdict, str] = {
    "passed": "green",
    "failed": "bold red",
    "overflows in PyTorch too": "yellow",
    "not run": "bold red",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParityRow:
    """One output on one case in one type. Errors are max|y - r| / max|r| against the float64 truth r.

    `how` is "native", "emulated" (bfloat16 values at operator borders, float32 arithmetic) or "converted" (the float32
    file was converted); `torch_error` is None where PyTorch does not run in the type.
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
    reason: str = ""
    fault: Fault | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParityReport:
    """The rows of every type that was asked for, and what a reader must know beside them."""

    dtypes: tuple[Dtype, ...]
    rows: tuple[ParityRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """No row failed or was not run, and in every type every output passed on at least one case and on the required one."""
        return bool(self.dtypes) and not self.failures and all(self._has_evidence(dtype) for dtype in self.dtypes)

    @property
    def failures(self) -> tuple[ParityRow, ...]:
        """The rows that failed or were not run."""
        return tuple(row for row in self.rows if row.verdict in ("failed", "not run"))

    def of(self, dtype: Dtype) -> tuple[ParityRow, ...]:
        """The rows of one type."""
        return tuple(row for row in self.rows if row.dtype == dtype)

    def summary(self) -> str:
        """One line per type: the worst case, or the first failure."""
        return "\n".join(self._summary_of(dtype) for dtype in self.dtypes)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values; numbers that JSON does not know are strings."""
        plain: dict[str, Any] = _plain({"passed": self.passed, **dataclasses.asdict(self)})
        return plain

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def __rich__(self) -> Table:
        table = Table(title="passed" if self.passed else "FAILED", caption="\n".join(self.notes) or None)
        for column in ("type", "run", "case", "output", "error", "PyTorch's", "budget", "SNR dB", "top-1", "verdict"):
            table.add_column(column)
        for row in self.rows:
            style = _STYLES[row.verdict]
            table.add_row(*_cells(row), f"[{style}]{row.verdict}[/{style}]{_why(row)}")
        return table

    def _has_evidence(self, dtype: Dtype) -> bool:
        rows = self.of(dtype)
        passed = {row.output for row in rows if row.verdict == "passed"}
        required = [row for row in rows if row.required]
        return bool(required) and all(row.verdict == "passed" for row in required) and {row.output for row in rows} == passed

    def _summary_of(self, dtype: Dtype) -> str:
        rows = self.of(dtype)
        bad = [row for row in rows if row.verdict in ("failed", "not run")]
        if bad:
            return f"{dtype}: {len(bad)} of {len(rows)} {bad[0].verdict}; case {bad[0].case}, {bad[0].output}: {bad[0].reason}"
        if not self._has_evidence(dtype):
            return f"{dtype}: nothing that counts was compared"
        worst = max((row for row in rows if row.verdict == "passed"), key=lambda row: row.error / row.budget)
        how = worst.how if worst.how != "native" else ""
        return f"{dtype}: passed{how and f' ({how})'}, error {worst.error:.2g} of {worst.budget:.2g} allowed ({worst.case})"


def _cells(row: ParityRow) -> list[str]:
    top = row.top_one
    return [
        row.dtype,
        row.how,
        row.case,
        row.output,
        _number(row.error),
        "-" if row.torch_error is None else _number(row.torch_error),
        _number(row.budget),
        _number(row.snr_db, ".1f"),
        "" if top is None else f"{top.agreeing}/{top.rows}" + (f" ({top.near_ties} near-ties)" if top.near_ties else ""),
    ]


def _why(row: ParityRow) -> str:
    parts = [row.reason, row.fault.text if row.fault is not None else ""]
    text = "; ".join(part for part in parts if part)
    return f": {text}".replace("[", "\\[") if text else ""


def _number(value: float, form: str = ".2e") -> str:
    return "" if math.isnan(value) else format(value, form)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
