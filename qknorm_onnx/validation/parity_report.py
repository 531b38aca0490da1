"""What a validation found, as values, a table and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any, Literal

from rich.box import SIMPLE
from rich.table import Table

from qknorm_onnx.spec.signature import Dtype
from qknorm_onnx.validation.locate import Fault
from qknorm_onnx.validation.metrics import TopOne

Verdict = Literal["passed", "failed", "overflows in PyTorch too", "not run"]
_STYLES: dict[Verdict, str] = {  # from good to bad
    "passed": "green",
    "overflows in PyTorch too": "yellow",
    "not run": "bold red",
    "failed": "bold red",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParityRow:
    """One output on one case in one type. Errors are max|y - r| / max|r| against the float64 truth r.

    `how` is "native", "emulated" (bfloat16 values at operator borders, float32 arithmetic) or "converted" (the float32
    file was converted); `torch_error` is None where PyTorch does not run in the type. Where the truth is `all_zero`, a wrong
    model passes as well as the right one: such a row is no evidence. `purpose` is the fault that the case is to show.
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
    purpose: str = ""
    fault: Fault | None = None

    @property
    def exceeds(self) -> bool:
        """Failed by nothing but the size of its error."""
        return self.verdict == "failed" and self.error > self.budget


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParityReport:
    """The rows of every type that was asked for, and what a reader must know beside them."""

    dtypes: tuple[Dtype, ...]
    rows: tuple[ParityRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """No row failed or was not run; in every type every output passed on the required case and on one that is not zero."""
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
        """One line per type and case, for the output that comes closest to its budget; `rows` has all outputs."""
        table = Table(title="passed" if self.passed else "FAILED", title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
        for column in ("type", "case", "worst output", "error", "PyTorch's", "budget", "top-1", "verdict"):
            table.add_column(column)
        for row in worst_of_each_case(self.rows):
            style = _STYLES[row.verdict]
            table.add_row(*_cells(row), f"[{style}]{row.verdict}[/{style}]{_why(row)}")
        table.caption = "\n".join((*_ways_to_run(self.rows), *self.notes)) or None
        table.caption_justify = "left"
        return table

    def _has_evidence(self, dtype: Dtype) -> bool:
        rows = self.of(dtype)
        passed = {row.output for row in rows if row.verdict == "passed" and not row.all_zero}
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
        text = f"{dtype}: passed{how and f' ({how})'}, error {worst.error:.2g} of {worst.budget:.2g} allowed ({worst.case})"
        return text + _logits_summary(rows)


def _logits_summary(rows: Sequence[ParityRow]) -> str:
    """Agreement of the most likely token, cosine and signal to noise, where an output is logits."""
    judged = [(row, row.top_one) for row in rows if row.top_one and row.verdict == "passed" and not row.all_zero]
    if not judged:
        return ""
    agreeing, total, ties = (sum(getattr(top, name) for _, top in judged) for name in ("agreeing", "rows", "near_ties"))
    cosine, snr_db = (min(getattr(row, name) for row, _ in judged) for name in ("cosine", "snr_db"))
    tied = f" ({ties} near-ties)" if ties else ""
    return f", top-1 {agreeing}/{total}{tied}, cosine at least {cosine:.6f}, SNR at least {snr_db:.0f} dB"


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
    return list(_STYLES).index(row.verdict), share


def _ways_to_run(rows: Sequence[ParityRow]) -> list[str]:
    ways = {row.dtype: row.how for row in rows if row.how and row.how != "native"}
    return [f"{dtype}: {how}" for dtype, how in ways.items()]


def _cells(row: ParityRow) -> list[str]:
    top = row.top_one
    return [
        row.dtype,
        row.case,
        row.output,
        _number(row.error),
        "-" if row.torch_error is None else _number(row.torch_error),
        _number(row.budget),
        "" if top is None else f"{top.agreeing}/{top.rows}",
    ]


def _why(row: ParityRow) -> str:
    tried = f"tried for {row.purpose}" if row.verdict == "failed" and row.purpose else ""
    parts = [row.reason, row.fault.text if row.fault is not None else "", tried]
    text = "; ".join(part for part in parts if part)
    return f": {text}".replace("[", "\\[") if text else ""


def _number(value: float, form: str = ".1e") -> str:
    return "" if math.isnan(value) else format(value, form)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
