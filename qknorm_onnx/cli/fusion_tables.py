"""A fusion report as a table for people and as plain data for machines."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from qknorm_onnx.graph.fusion_report import FusionReport
from qknorm_onnx.spec.attributes import to_attributes


def report_as_data(report: FusionReport) -> dict[str, Any]:
    """The report as JSON-ready values; a spec is its ONNX attributes and its one line."""
    fused = [
        {
            "name": item.name,
            "target": item.target,
            "spec": to_attributes(item.spec),
            "spec_line": item.line,
            "query_preparation": [to_attributes(spec) for spec in item.query_preparation],
            "key_preparation": [to_attributes(spec) for spec in item.key_preparation],
            "source_nodes": list(item.source_nodes),
            "note": item.note,
        }
        for item in report.fused
    ]
    return {
        "fused": fused,
        "declined": [dataclasses.asdict(item) for item in report.declined],
        "refused": [dataclasses.asdict(item) for item in report.refused],
        "plain": list(report.plain),
        "notes": list(report.notes),
        "needs": report.needs,
    }


def print_report(console: Console, report: FusionReport, *, fused_word: str = "fused") -> None:
    """One row for each attention, then the counts and the notes."""
    table = Table(
        Column("attention", overflow="fold"), "state", "what it is, or why not", title="QK-Norm attention", title_justify="left"
    )
    for item in report.fused:
        detail = item.line + (f"\n{item.note}" if item.note else "")
        table.add_row(escape(item.name), f"[green]{fused_word}[/] ({item.target})", escape(detail))
    for miss in report.declined:
        hint = f"\n{miss.hint}" if miss.hint else ""
        table.add_row(escape(miss.name), "[yellow]declined[/]", escape(f"{miss.reason}\nat {miss.node}{hint}"))
    for refusal in report.refused:
        detail = f"{refusal.reason} (largest difference {refusal.max_difference:.2g})"
        table.add_row(escape(refusal.name), "[red]refused[/]", escape(detail))
    for name in report.plain:
        table.add_row(escape(name), "plain", "queries and keys are not normalised")
    if table.row_count:
        console.print(table)
    console.print(report.summary(fused_word), highlight=False)
    for note in report.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    if report.needs:
        console.print(report.needs, highlight=False, markup=False)
