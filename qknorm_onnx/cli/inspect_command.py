"""`qknorm-onnx inspect MODEL`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qknorm_onnx.cli.fusion_tables import print_report, report_as_data
from qknorm_onnx.cli.options import existing_model, json_option, listed, provider_option, require_fusion_option
from qknorm_onnx.cli.terminal import Terminal
from qknorm_onnx.errors import FusionRequiredError
from qknorm_onnx.spec.targets import PROVIDERS

if TYPE_CHECKING:
    from qknorm_onnx.inspection import Explanation
    from qknorm_onnx.runtime.placement import NodePlacement
    from qknorm_onnx.spec.signature import Provider

RUNS_IN_STYLES: Final = {"native kernel": "green", "function body": "yellow", "unknown": "yellow"}


@click.command("inspect")
@existing_model
@require_fusion_option
@click.option("--explain", is_flag=True, help="Also say of each declined attention how far each recogniser came.")
@click.option("--placement", is_flag=True, help="Also create a session and say which kernel runs each fused node.")
@provider_option(f"With --placement: the session is on {listed(PROVIDERS)}.")
@json_option
def command(model: Path, require_fusion: bool, explain: bool, placement: bool, provider: str, as_json: bool) -> None:
    """List each attention of the ONNX file MODEL: fused or not, its spec in one line, or why not. Changes nothing."""
    from qknorm_onnx.inspection import explain_model, inspect_model

    inspection, explanations = explain_model(model) if explain else (inspect_model(model), ())
    placements = _placements(model, provider) if placement else None
    if as_json:
        found = {"model": str(model), "recognised": report_as_data(inspection.recognised)["fused"]}
        if explain:
            found["explanations"] = [{"name": item.declined.name, "lines": list(item.lines)} for item in explanations]
        if placements is not None:
            found["placement"] = [dataclasses.asdict(item) for item in placements]
        click.echo(json.dumps({**found, **report_as_data(inspection.present)}))
    else:
        console = Terminal()
        present = inspection.present
        if any((present.fused, present.declined, present.plain, present.notes)) or not inspection.recognised.fused:
            print_report(console, present)
        if inspection.recognised.fused:
            print_report(console, inspection.recognised, fused_word="recognised")
            console.print(f"'qknorm-onnx fuse {model} OUT' makes each of these one node", highlight=False)
        _print_explanations(console, explanations)
        if placements is not None:
            _print_placements(console, placements)
    if require_fusion and (inspection.recognised.fused or not inspection.present.complete):
        missing = dataclasses.asdict(inspection.present)["declined"]
        count = len(inspection.recognised.fused) + len(missing)
        absent = f"no QK-Norm attention found in {model}: {inspection.present.absence}"
        raise FusionRequiredError(f"{count} QK-Norm attention(s) of {model} are not one node" if count else absent)


def _print_explanations(console: Console, explanations: tuple[Explanation, ...]) -> None:
    """Each declined attention, and the lines of its explanation."""
    for item in explanations:
        for line in (str(item.declined), *(f"  {line}" for line in item.lines)):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _placements(model: Path, provider: str) -> tuple[NodePlacement, ...]:
    from qknorm_onnx.runtime.placement import expected_placements, has_provider, node_placements

    known = cast("Provider", provider)
    return node_placements(model, provider=known) if has_provider(known) else expected_placements(model, provider=known)


def _print_placements(console: Console, placements: tuple[NodePlacement, ...]) -> None:
    """One row for each canonical node, then the count of those that run natively."""
    if not placements:
        console.print("no node of the domain ai.qknorm to place")
        return
    table = Table("node", "operator", "runs in", "by, or why not", title="Placement", title_justify="left")
    for item in placements:
        detail = item.reason or f"{item.kernel} ({item.execution_provider})"
        style = RUNS_IN_STYLES[item.runs_in]
        table.add_row(escape(item.name), item.op_type, f"[{style}]{item.runs_in}[/]", escape(detail))
    console.print(table)
    native = sum(item.runs_in == "native kernel" for item in placements)
    unknown = sum(item.runs_in == "unknown" for item in placements)
    more = f"; where {unknown} of them run could not be seen here" if unknown else ""
    console.print(f"{native} of {len(placements)} nodes run in the native kernel{more}", highlight=False)
