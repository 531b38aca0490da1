"""`qknorm-onnx export SOURCE OUT`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qknorm_onnx.cli.fusion_tables import print_report, report_as_data
from qknorm_onnx.cli.options import json_option, require_fusion_option, target_options
from qknorm_onnx.cli.source_options import dtype_named, load, logits_option, require_torch, source_argument, with_past_option
from qknorm_onnx.cli.stage_progress import StageProgress
from qknorm_onnx.cli.terminal import Terminal

if TYPE_CHECKING:
    from qknorm_onnx.graph.fusion_report import FusionReport
    from qknorm_onnx.serving.decoder_ports import LogitsKept


@click.command("export")
@source_argument
@click.argument("out", type=click.Path(path_type=Path))
@target_options
@click.option("--opset", type=int, default=None, help="ONNX operator set, 18 or newer.  [default: chosen by the target]")
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), default=None, help="Convert the weights first.")
@click.option("--verify/--no-verify", default=True, show_default=True, help="Prove each rewrite on random inputs.")
@click.option(
    "--check/--no-check", default=None, help="Run the finished model beside its module.  [default: up to 2 GiB of weights]"
)
@with_past_option
@logits_option
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
    check: bool | None,
    with_past: bool,
    logits: str | None,
    require_fusion: bool,
    as_json: bool,
) -> None:
    """Export SOURCE to OUT: an ONNX file where OUT ends in .onnx, else a folder that serves a language model.

    SOURCE is a Hugging Face folder or package.module:factory. A folder OUT holds model.onnx with its cache, genai_config.json for
    onnxruntime-genai, the kernel library and the tokenizer; `qknorm-onnx generate OUT "text"` runs it.
    """
    options = {
        "target": target,
        "provider": provider,
        "opset": opset,
        "verify": verify,
        "check": check,
        "require_fusion": require_fusion,
        "for_onnxruntime": for_onnxruntime,
    }
    with StageProgress(9, enabled=not as_json) as progress:
        if out.suffix == ".onnx":
            report = _to_file(source, out, with_past, logits or "all", dtype, progress, options)
        else:
            report = _to_folder(source, out, "all" if logits == "all" else "last", dtype, progress, options)
    if as_json:
        click.echo(json.dumps({"output": str(out), **report_as_data(report)}))
        return
    console = Terminal()
    print_report(console, report)
    console.print(f"wrote {out}", highlight=False)


def _to_file(
    source: str, out: Path, with_past: bool, logits: str, dtype: str | None, progress: StageProgress, options: dict[str, Any]
) -> FusionReport:
    progress("load the module")
    loaded = load(source, with_past=with_past, dtype=dtype, logits=logits)
    from qknorm_onnx.checked_export.export import export

    program = export(
        loaded.module, loaded.args, loaded.kwargs, dynamic_shapes=loaded.dynamic_shapes, progress=progress, **options
    )
    progress("save")
    program.save(out)
    return dataclasses.replace(program.report, notes=(*loaded.notes, *program.report.notes))


def _to_folder(
    source: str, out: Path, logits: LogitsKept, dtype: str | None, progress: StageProgress, options: dict[str, Any]
) -> FusionReport:
    require_torch()
    from qknorm_onnx.checked_export.export import export_folder

    report: FusionReport = export_folder(
        source, out, logits=logits, dtype=dtype_named(dtype), progress=progress, **options
    ).report
    return report
