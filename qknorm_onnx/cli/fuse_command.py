"""`qknorm-onnx fuse MODEL OUT`."""

from __future__ import annotations

import json
from pathlib import Path

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
@require_fusion_option
@json_option
def command(
    model: Path,
    out: Path,
    target: str,
    provider: str,
    for_onnxruntime: str | None,
    verify: bool,
    require_fusion: bool,
    as_json: bool,
) -> None:
    """Make each QK-Norm attention of the ONNX file MODEL one node, and write OUT."""
    from qknorm_onnx.pipeline import fuse

    with StageProgress(5, enabled=not as_json) as progress:
        program = fuse(
            model,
            target=target,
            provider=provider,
            verify=verify,
            require_fusion=require_fusion,
            for_onnxruntime=for_onnxruntime,
            progress=progress,
        )
        progress("save")
        program.save(out)
    if as_json:
        click.echo(json.dumps({"output": str(out), **report_as_data(program.report)}))
        return
    console = Terminal()
    print_report(console, program.report)
    console.print(f"wrote {out}", highlight=False)
