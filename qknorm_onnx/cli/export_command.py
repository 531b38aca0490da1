"""`qknorm-onnx export SOURCE OUT`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from qknorm_onnx.cli.fusion_tables import print_report, report_as_data
from qknorm_onnx.cli.options import json_option, require_fusion_option, target_options
from qknorm_onnx.cli.source_options import load, source_argument, with_past_option
from qknorm_onnx.cli.stage_progress import StageProgress
from qknorm_onnx.cli.terminal import Terminal


@click.command("export")
@source_argument
@click.argument("out", type=click.Path(path_type=Path))
@target_options
@click.option("--opset", type=int, default=None, help="ONNX operator set, 18 or newer.  [default: chosen by the target]")
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), default=None, help="Convert the weights first.")
@click.option("--verify/--no-verify", default=True, show_default=True, help="Prove each rewrite on random inputs.")
@with_past_option
@require_fusion_option
@json_option
def command(
    source: str,
    out: Path,
    target: str,
    provider: str,
    for_onnxruntime: str | None,
    opset: int | None,
    dtype: str | None,
    verify: bool,
    with_past: bool,
    require_fusion: bool,
    as_json: bool,
) -> None:
    """Export SOURCE, a Hugging Face folder or package.module:factory, to the ONNX file OUT."""
    with StageProgress(7, enabled=not as_json) as progress:
        progress("load the module")
        loaded = load(source, with_past=with_past, dtype=dtype)
        from qknorm_onnx.torch_export.exporter import export

        program = export(
            loaded.module,
            loaded.args,
            loaded.kwargs,
            dynamic_shapes=loaded.dynamic_shapes,
            target=target,
            provider=provider,
            opset=opset,
            verify=verify,
            require_fusion=require_fusion,
            for_onnxruntime=for_onnxruntime,
            progress=progress,
        )
        progress("save")
        program.save(out)
    report = dataclasses.replace(program.report, notes=(*loaded.notes, *program.report.notes))
    if as_json:
        click.echo(json.dumps({"output": str(out), **report_as_data(report)}))
        return
    console = Terminal()
    print_report(console, report)
    console.print(f"wrote {out}", highlight=False)
