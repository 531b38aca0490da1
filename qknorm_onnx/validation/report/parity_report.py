"""What a validation found, as values, a table and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType

from qknorm_onnx.spec.signature import Dtype
from qknorm_onnx.validation.report.about import About
from qknorm_onnx.validation.report.parity_row import ParityRow
from qknorm_onnx.validation.report.ranges import LogitRange, ValueRange, range_table
from qknorm_onnx.validation.report.table import report_table


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParityReport:
    """The rows of every type that was asked for, and what a reader must know beside them.

    `ranges` are those of every type and `logits` those of the first, where they were asked for.
    """

    dtypes: tuple[Dtype, ...]
    rows: tuple[ParityRow, ...]
    notes: tuple[str, ...] = ()
    about: About = About()
    ranges: tuple[ValueRange, ...] = ()
    logits: tuple[LogitRange, ...] = ()

    @property
    def passed(self) -> bool:
        """No row failed or was not run; in every type every output passed on the required case and on one that is not zero."""
        return bool(self.dtypes) and not self.failures and all(self.has_evidence(dtype) for dtype in self.dtypes)

    @property
    def failures(self) -> tuple[ParityRow, ...]:
        """The rows that failed or were not run."""
        return tuple(row for row in self.rows if row.is_bad)

    def of(self, dtype: Dtype) -> tuple[ParityRow, ...]:
        """The rows of one type."""
        return tuple(row for row in self.rows if row.dtype == dtype)

    def summary(self) -> str:
        """One line per type: the worst case, or the first failure."""
        return "\n".join(self.summary_of(dtype) for dtype in self.dtypes)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values; numbers that JSON does not know are strings."""
        plain: dict[str, Any] = _plain({"passed": self.passed, "summary": self.summary(), **dataclasses.asdict(self)})
        return plain

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def to_junit_xml(self) -> str:
        """JUnit XML: one suite for each type, one test for each case and output."""
        from qknorm_onnx.validation.report.junit_xml import junit_xml

        return junit_xml(self)

    def to_html(self) -> str:
        """One page of HTML with its charts in place. Raises InputError where jinja2 is missing."""
        from qknorm_onnx.validation.report.html_page import html_page

        return html_page(self)

    def __rich__(self) -> RenderableType:
        """One line per type and case, for the output that comes closest to its budget, reasons below; `rows` has all outputs."""
        table = report_table(self.rows, passed=self.passed, notes=self.notes)
        of_first = [item for item in self.ranges if item.dtype == self.dtypes[0]]
        return Group(table, range_table(of_first, self.logits)) if of_first else table

    def has_evidence(self, dtype: Dtype) -> bool:
        """In this type every output passed on the required case and on one that is not zero."""
        rows = self.of(dtype)
        passed = {row.output for row in rows if row.verdict == "passed" and not row.all_zero}
        required = [row for row in rows if row.required]
        return bool(required) and all(row.verdict == "passed" for row in required) and {row.output for row in rows} == passed

    def summary_of(self, dtype: Dtype) -> str:
        """One line on one type."""
        rows = self.of(dtype)
        bad = [row for row in rows if row.is_bad]
        if bad:
            return f"{dtype}: {len(bad)} of {len(rows)} {bad[0].verdict}; case {bad[0].case}, {bad[0].output}: {bad[0].why}"
        if not self.has_evidence(dtype):
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


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
