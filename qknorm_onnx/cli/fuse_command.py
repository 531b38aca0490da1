"""`qknorm-onnx fuse MODEL OUT`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from qknorm_onnx.cli.fusion_tables import print_report, report_as_data
from qknorm_onnx.cli.options import existing_model, json_option, require_fusion_option, target_options
from qknorm_onnx.cli.stage_progress import StageProgress
from qknorm_onnx.cli.terminal import Terminal


@click.command("fuse")
@existing_model
@click.argument("out", type=click.Path(path_type=Path))
@target_options
@click.option("--verify/--no-verify", default=True, show_default=True, help="Prove each rewrite on random inputs.")
@click.option(
    "--for",
    "made_for",
    type=click.Choice(["genai"]),
    default=None,
    help="MODEL is a folder that onnxruntime-genai loads, and OUT another one.  [default: where MODEL is a folder]",
)
@require_fusion_option
@json_option
def command(model: Path, out: Path, made_for: str | None, as_json: bool, **options: Any) -> None:
    """Make each QK-Norm attention of the ONNX file MODEL one node, and write OUT.

    MODEL may be a folder of onnxruntime-genai's builder; OUT is then a folder that onnxruntime-genai loads.
    """
    with StageProgress(5, enabled=not as_json) as progress:
        if made_for == "genai" or model.is_dir():
            from qknorm_onnx.serving.fused_folder import fuse_folder

            program = fuse_folder(model, out, progress=progress, **options)
        else:
            from qknorm_onnx.pipeline import fuse

            program = fuse(model, progress=progress, **options)
            progress("save")
            program.save(out)
    if as_json:
        click.echo(json.dumps({"output": str(out), **report_as_data(program.report)}))
        return
    console = Terminal()
    print_report(console, program.report)
    console.print(f"wrote {out}", highlight=False)
