"""`qknorm-onnx validate MODEL SOURCE`."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import click

from qknorm_onnx.cli.options import existing_model, json_option
from qknorm_onnx.cli.source_options import load, source_argument, with_past_option
from qknorm_onnx.cli.stage_progress import StageProgress
from qknorm_onnx.cli.terminal import Terminal
from qknorm_onnx.errors import InputError
from qknorm_onnx.spec.signature import Dtype

VALIDATED_DTYPES = ("float32", "float16", "bfloat16")


@click.command("validate")
@existing_model
@source_argument
@click.option("--dtypes", default="float32", show_default=True, help="Types to judge in, separated by commas, or 'all'.")
@click.option("--seeds", type=click.IntRange(min=0), default=1, show_default=True, help="Further cases with random values.")
@with_past_option
@json_option
def command(model: Path, source: str, dtypes: str, seeds: int, with_past: bool, as_json: bool) -> int:
    """Judge MODEL against the module of SOURCE, with PyTorch's own error as the budget.

    MODEL is an ONNX file, or a folder that `qknorm-onnx export` wrote.
    """
    chosen = _dtypes(dtypes)
    logits = "all"
    if model.is_dir():
        from qknorm_onnx.serving.decoder_folder import open_decoder_folder

        folder = open_decoder_folder(model)
        model, with_past = folder.model_path, True
    if not model.is_file():
        raise InputError(f"{model}: no such file")
    if with_past:
        logits = _logits_of(model)
    with StageProgress(None, enabled=not as_json) as progress:
        progress("load the module")
        loaded = load(source, with_past=with_past, logits=logits)
        from qknorm_onnx.validation.validate import validate

        report = validate(model, loaded.module, loaded.args, loaded.kwargs, dtypes=chosen, seeds=seeds, progress=progress)
    if as_json:
        click.echo(report.to_json())
    else:
        console = Terminal()
        console.print(report)
        console.print(report.summary(), highlight=False)
    return 0 if report.passed else 1


def _logits_of(model: Path) -> str:
    """Which logits the file gives: the module is asked for the same."""
    from qknorm_onnx.graph.model_file import load_model
    from qknorm_onnx.serving.decoder_ports import read_ports

    return "last" if read_ports(load_model(model)).last_logits else "all"


def _dtypes(text: str) -> tuple[Dtype, ...]:
    names = VALIDATED_DTYPES if text == "all" else tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in VALIDATED_DTYPES:
            raise InputError(f"unknown type {name!r} in --dtypes; choose from {', '.join(VALIDATED_DTYPES)}, or 'all'")
    return cast("tuple[Dtype, ...]", names)
