"""A validation in the terminal: figures in one table for each type, and below it the reasons, readable at 80 columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from qknorm_onnx.validation.report.failure_groups import FailureGroup, failure_groups
from qknorm_onnx.validation.report.parity_row import ParityRow, Verdict, worst_of_each_case

_STYLES: Final[dict[Verdict, str]] = {
    "passed": "green",
    "overflows in PyTorch too": "yellow",
    "not run": "bold red",
    "failed": "bold red",
}
_IN_A_CELL: Final[dict[Verdict, str]] = {"overflows in PyTorch too": "overflows"}
_LISTED_CASES: Final = 12


def report_table(rows: Sequence[ParityRow], *, passed: bool, notes: Sequence[str]) -> RenderableType:
    """One line per type and case, for the output that comes closest to its budget; then reasons, notes of rows, and notes."""
    parts: list[RenderableType] = [Text("passed", "bold green") if passed else Text("FAILED", "bold red")]
    for dtype in dict.fromkeys(row.dtype for row in rows):
        of_type = [row for row in rows if row.dtype == dtype]
        parts += [_table(of_type), *(_group_text(group) for group in failure_groups(of_type)), *_row_notes(of_type)]
    return Group(*parts, *(Text(note) for note in notes))


def _table(rows: Sequence[ParityRow]) -> RenderableType:
    shown = worst_of_each_case(rows)
    how = next((row.how for row in rows if row.how and row.how != "native"), "")
    with_top = any(row.top_one is not None for row in shown)
    figures = ("error", "PyTorch's", "budget", *(("top-1",) if with_top else ()))
    table = Table(
        Column("case", overflow="fold", ratio=3),
        Column("worst output", overflow="fold", ratio=2),
        *(Column(name, justify="right", no_wrap=True) for name in figures),
        Column("verdict", no_wrap=True),
        title=f"\n{rows[0].dtype}{how and f': {how}'}",
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    for row in shown:
        top = row.top_one
        tops = [f"{top.agreeing}/{top.rows}" if top is not None else ""] if with_top else []
        verdict = Text(_IN_A_CELL.get(row.verdict, row.verdict), _STYLES[row.verdict])
        table.add_row(Text(row.case), Text(row.output), *_figures(row), *tops, verdict)
    return table


def _figures(row: ParityRow) -> list[str]:
    own = "-" if row.torch_error is None else _number(row.torch_error)
    return [_number(row.error), own, _number(row.budget)]


def _group_text(group: FailureGroup) -> RenderableType:
    """What failed, once for all cases that failed for it."""
    verdict, count = group.worst.verdict, len(group.cases)
    cases = f"{count} case{'s' if count > 1 else ''}"
    title = Text.assemble(
        "\n", (f"{group.worst.dtype}: {verdict} on {cases}", _STYLES[verdict]), f", {_listed(group.outputs, 4)}"
    )
    lines = [Text(f"{'worst: ' if count > 1 else ''}{group.headline}")]
    lines += [Text(f"cause: {fault}") for fault in group.faults]
    if count > 1:
        lines.append(Text(f"cases: {_listed(group.cases, _LISTED_CASES)}"))
    if group.purposes:
        lines.append(Text(f"tried for: {'; '.join(group.purposes[:_LISTED_CASES])}"))
    return Group(title, *(Padding(line, (0, 0, 0, 2)) for line in lines))


def _row_notes(rows: Sequence[ParityRow]) -> Iterable[RenderableType]:
    """Notes of rows that are no failures: their groups say it of those."""
    notes: dict[str, list[str]] = {}
    for row in worst_of_each_case(rows):
        if not row.is_bad and row.why:
            notes.setdefault(row.why, []).append(row.case)
    return [Text(f"{_listed(cases, 3)}: {note}") for note, cases in notes.items()]


def _listed(names: Sequence[str], limit: int) -> str:
    more = len(names) - limit
    return "; ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def _number(value: float) -> str:
    return "" if math.isnan(value) else format(value, ".1e")
