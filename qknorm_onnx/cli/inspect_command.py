"""`qknorm-onnx inspect MODEL`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click
from rich.console import Console

from qknorm_onnx.cli.fusion_tables import print_report, report_as_data
from qknorm_onnx.cli.options import existing_model, json_option, require_fusion_option
from qknorm_onnx.errors import FusionRequiredError


@click.command("inspect")
@existing_model
@require_fusion_option
@json_option
def command(model: Path, require_fusion: bool, as_json: bool) -> None:
    """List each attention of the ONNX file MODEL: fused or not, its spec in one line, or why not. Changes nothing."""
    from qknorm_onnx.inspection import inspect_model

    inspection = inspect_model(model)
    if as_json:
        found = {"model": str(model), "recognised": report_as_data(inspection.recognised)["fused"]}
        click.echo(json.dumps({**found, **report_as_data(inspection.present)}))
    else:
        console = Console()
        print_report(console, inspection.present)
        if inspection.recognised.fused:
            print_report(console, inspection.recognised, fused_word="recognised")
            console.print(f"'qknorm-onnx fuse {model} OUT' makes each of these one node", highlight=False)
    if require_fusion and (inspection.recognised.fused or not inspection.present.complete):
        missing = dataclasses.asdict(inspection.present)["declined"]
        count = len(inspection.recognised.fused) + len(missing)
        raise FusionRequiredError(
            f"{count} QK-Norm attention(s) of {model} are not one node" if count else f"no QK-Norm attention found in {model}"
        )
