"""`qknorm-onnx validate MODEL SOURCE`, and `qknorm-onnx validate LIST.yaml`."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from qknorm_onnx.cli.options import existing_model, json_option
from qknorm_onnx.cli.source_options import load, with_past_option
from qknorm_onnx.cli.stage_progress import StageProgress
from qknorm_onnx.cli.terminal import Terminal
from qknorm_onnx.errors import InputError
from qknorm_onnx.spec.signature import Dtype

if TYPE_CHECKING:
    import onnx_ir as ir

    from qknorm_onnx.validation.cases.case import Case
    from qknorm_onnx.validation.report.parity_report import ParityReport

VALIDATED_DTYPES = ("float32", "float16", "bfloat16")
LIST_ENDINGS = (".yaml", ".yml")
_FILE = click.Path(path_type=Path)


@click.command("validate")
@existing_model
@click.argument("source", required=False)
@click.option("--dtypes", default="float32", show_default=True, help="Types to judge in, separated by commas, or 'all'.")
@click.option("--seeds", type=click.IntRange(min=0), default=1, show_default=True, help="Further cases with random values.")
@click.option("--inputs", type=_FILE, help="Judge on these arrays alone: an .npz file, by the names of the model's inputs.")
@click.option("--tolerance", type=float, help="What an error may be, of the largest value, instead of the budget.")
@click.option("--fail-fast", is_flag=True, help="End with the first failure.")
@click.option(
    "--locate",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Failures of each type to follow into the model; 0 for none.",
)
@click.option("--range-report", is_flag=True, help="Say how large values and logits are inside, and what a half type holds.")
@click.option("--save-failure", type=_FILE, metavar="FOLDER", help="Keep a failing case there, with a script that repeats it.")
@click.option("--html", type=_FILE, metavar="FILE", help="Write a page with charts; for a list, a folder of pages.")
@click.option("--junit-xml", type=_FILE, metavar="FILE", help="Write JUnit XML for a CI server; for a list, a folder of files.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Models of a list to judge at a time.")
@with_past_option
@json_option
def command(model: Path, source: str | None, jobs: int, as_json: bool, **options: Any) -> int:
    """Judge MODEL against the module of SOURCE, with PyTorch's own error as the budget.

    MODEL is an ONNX file, or a folder that `qknorm-onnx export` wrote. A list of models, LIST.yaml, has entries such as
    {model: m.onnx, source: folder, dtypes: "float32,float16"}, and takes no SOURCE.
    """
    if model.suffix in LIST_ENDINGS:
        if source is not None:
            raise click.UsageError(f"{model} is a list of models, and its entries name their sources: leave {source} out.")
        return _judge_list(model, jobs=jobs, html=options["html"], junit=options["junit_xml"], as_json=as_json)
    if source is None:
        raise click.UsageError("Missing argument 'SOURCE'.")
    report = _judge_one(model, source, as_json=as_json, **options)
    for path, text in ((options["html"], report.to_html), (options["junit_xml"], report.to_junit_xml)):
        if path is not None:
            path.write_text(text(), encoding="utf-8")
    if as_json:
        click.echo(report.to_json())
    else:
        console = Terminal()
        console.print(report)
        console.print(report.summary(), highlight=False, markup=False)
    return 0 if report.passed else 1


def _judge_one(
    model: Path,
    source: str,
    *,
    dtypes: str,
    inputs: Path | None,
    with_past: bool,
    range_report: bool,
    html: Path | None,
    junit_xml: Path | None,
    as_json: bool,
    **options: Any,
) -> ParityReport:
    """The verdict; whatever can be refused at once is, before the module is loaded."""
    chosen = _dtypes(dtypes)
    _require_folders_of(html, junit_xml)
    path, in_folder = _model_file(model)
    with StageProgress(None, enabled=not as_json) as progress:
        progress("open the model")
        opened, cases = _opened(path), _given_cases(inputs)
        with_cache = with_past or in_folder
        if not with_cache:
            _require_no_past(opened, source)
        progress("load the module")
        loaded = load(source, with_past=with_cache, logits=_logits_of(opened) if with_cache else "all")
        from qknorm_onnx.validation.validate import validate

        ranges, call = range_report or html is not None, (loaded.module, loaded.args, loaded.kwargs)
        report = validate(opened, *call, dtypes=chosen, cases=cases, ranges=ranges, progress=progress, **options)
    about = dataclasses.replace(report.about, model=str(path), source=source, command=_this_command())
    return dataclasses.replace(report, about=about)


def _model_file(path: Path) -> tuple[Path, bool]:
    """The ONNX file, and whether it is that of a folder, which has a cache."""
    if not path.is_dir():
        return path, False
    from qknorm_onnx.serving.decoder_folder import open_decoder_folder

    return open_decoder_folder(path).model_path, True


def _opened(path: Path) -> ir.Model:
    from qknorm_onnx.graph.model_file import load_model

    if not path.is_file():
        raise InputError(f"{path}: no such file")
    return load_model(path)


def _given_cases(path: Path | None) -> tuple[Case, ...] | None:
    """The one case of `--inputs`; None without it."""
    if path is None:
        return None
    from qknorm_onnx.validation.cases.given import case_of_file

    return (case_of_file(path),)


def _judge_list(path: Path, *, jobs: int, html: Path | None, junit: Path | None, as_json: bool) -> int:
    from qknorm_onnx.validation.many_models import judge_many, read_list

    if not path.is_file():
        raise InputError(f"{path}: no such file")
    entries = read_list(path)
    for folder in (html, junit):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    console = Terminal()
    words = {0: "[green]passed[/]", 1: "[bold red]FAILED[/]", 2: "[bold red]not judged[/]"}
    results = []
    for judged in judge_many(entries, jobs=jobs, html=html, junit=junit):
        results.append(judged)
        if not as_json:
            console.print(f"{words[judged.exit_code]} ", end="")
            console.print(f"{judged.entry.model}\n  " + "\n  ".join(judged.summary.splitlines()), highlight=False, markup=False)
    good = sum(judged.exit_code == 0 for judged in results)
    if as_json:
        import json

        plain = [{"model": item.entry.model, "exit_code": item.exit_code, "summary": item.summary} for item in results]
        click.echo(json.dumps({"passed": good == len(results), "models": plain}, indent=2))
    else:
        console.print(f"{good} of {len(results)} models passed", highlight=False)
    return max(judged.exit_code for judged in results)


def _this_command() -> str:
    """The line that was typed, as far as it was typed."""
    return shlex.join(["qknorm-onnx", *sys.argv[1:]]) if "validate" in sys.argv else ""


def _require_folders_of(*paths: Path | None) -> None:
    for path in paths:
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise InputError(f"{path}: no file can be written there; name one in a folder that exists")


def _require_no_past(model: ir.Model, source: str) -> None:
    """Raises InputError where the file takes a cache and the folder's module would be called without one."""
    past = [str(value.name) for value in model.graph.inputs if "past" in str(value.name)]
    if past and Path(source).is_dir():
        more = f" and {len(past) - 1} more" if len(past) > 1 else ""
        raise InputError(f"the model takes a cache ({past[0]}{more}): add --with-past, so that the module is called with one")


def _logits_of(model: ir.Model) -> str:
    """Which logits the file gives: the module is asked for the same."""
    from qknorm_onnx.serving.decoder_ports import read_ports

    return "last" if read_ports(model).last_logits else "all"


def _dtypes(text: str) -> tuple[Dtype, ...]:
    names = VALIDATED_DTYPES if text == "all" else tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in VALIDATED_DTYPES:
            raise InputError(f"unknown type {name!r} in --dtypes; choose from {', '.join(VALIDATED_DTYPES)}, or 'all'")
    return cast("tuple[Dtype, ...]", names)
