"""Failures that have one reason, together: what a reader wants to know once, and not once for each case."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Final

from qknorm_onnx.validation.report.parity_row import ParityRow

_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?(e[-+]?\d+)?%?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailureGroup:
    """Rows of one type whose reasons differ in their numbers only; never empty. The worst comes first."""

    rows: tuple[ParityRow, ...]

    @property
    def worst(self) -> ParityRow:
        """The row that is furthest off."""
        return self.rows[0]

    @property
    def cases(self) -> tuple[str, ...]:
        """Their cases, each once, in the order in which they ran."""
        return tuple(dict.fromkeys(row.case for row in self.rows))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Their outputs, each once."""
        return tuple(dict.fromkeys(row.output for row in self.rows))

    @property
    def faults(self) -> tuple[str, ...]:
        """What was found inside the model; of texts that differ in their numbers only, the first."""
        texts = [row.fault.text for row in self.rows if row.fault is not None]
        return tuple({_NUMBER.sub("#", text): text for text in reversed(texts)}.values())[::-1]

    @property
    def purposes(self) -> tuple[str, ...]:
        """What the cases were tried for, each once."""
        return tuple(dict.fromkeys(row.purpose for row in self.rows if row.purpose))

    @property
    def headline(self) -> str:
        """The worst row in one line: case, output, reason, and the value that is furthest off."""
        row = self.worst
        where = f"; {row.worst.text}" if row.worst is not None else ""
        return f"{row.case}, {row.output}: {row.why or row.verdict}{where}"


def failure_groups(rows: Sequence[ParityRow]) -> list[FailureGroup]:
    """The rows that failed or were not run, by type and reason, in the order of their first rows."""
    found: dict[tuple[str, str, str], list[ParityRow]] = {}
    for row in rows:
        if row.is_bad:
            found.setdefault((row.dtype, row.verdict, _NUMBER.sub("#", row.reason)), []).append(row)
    return [FailureGroup(rows=_worst_first(members)) for members in found.values()]


def _worst_first(rows: Sequence[ParityRow]) -> tuple[ParityRow, ...]:
    worst = max(rows, key=_share)
    return (worst, *(row for row in rows if row is not worst))


def _share(row: ParityRow) -> float:
    if math.isnan(row.error):
        return 0.0
    return row.error / row.budget if row.budget > 0 else row.error
