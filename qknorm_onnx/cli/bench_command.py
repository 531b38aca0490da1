"""`qknorm-onnx bench`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qknorm_onnx.cli.stage_progress import StageProgress
from qknorm_onnx.errors import InputError

if TYPE_CHECKING:
    from qknorm_onnx.speed.benchmark_report import BenchmarkReport, CaseResult, Figure, TimedEntry

STANDARD_OUTPUT: Final = "-"
QUICK_ROUNDS: Final = 3
FULL_ROUNDS: Final = 21
FULL_PLACEMENTS: Final = 3
VERDICT_STYLES: Final = {"stretch": "[bold green]stretch[/]", "reached": "[green]reached[/]", "missed": "[red]missed[/]", "": ""}


@click.command("bench")
@click.option("--cases", "names", default="", help="Ids, or their beginnings, separated by commas (see --list). Default: all.")
@click.option("--list", "only_list", is_flag=True, help="List the cases and stop.")
@click.option("--rounds", type=click.IntRange(min=1), help=f"Turns of each contestant.  [default: {FULL_ROUNDS}]")
@click.option("--threads", type=click.IntRange(min=1), help="Of every contestant.  [default: all cores]")
@click.option("--compile", "with_compile", is_flag=True, help="With torch.compile as a contestant (needs a C++ compiler).")
@click.option("--quick", is_flag=True, help="Small sizes: shows in seconds that everything runs and is right.")
@click.option(
    "--json", "json_path", is_flag=False, flag_value=STANDARD_OUTPUT, metavar="[FILE]",
    help="Write one JSON object to FILE, or print it instead of tables.",
)  # fmt: skip
def command(
    names: str,
    only_list: bool,
    rounds: int | None,
    threads: int | None,
    with_compile: bool,
    quick: bool,
    json_path: str | None,
) -> None:
    """Measure the native kernels beside torch and ONNX Runtime, in turns, each result checked first."""
    from qknorm_onnx.speed.cases import chosen_cases, full_cases, quick_cases
    from qknorm_onnx.speed.run import Settings, run_benchmark

    cases = chosen_cases(quick_cases() if quick else full_cases(), names)
    if only_list:
        click.echo("\n".join(f"{case.id:20} {case.title}" for case in cases))
        return
    file = None if json_path in (None, STANDARD_OUTPUT) else Path(str(json_path))
    if file is not None and not file.absolute().parent.is_dir():
        raise InputError(f"{file.parent} is no folder; create it first, or write elsewhere")
    settings = Settings(
        rounds=rounds or (QUICK_ROUNDS if quick else FULL_ROUNDS),
        threads=threads or os.cpu_count() or 1,
        placements=1 if quick else FULL_PLACEMENTS,
        with_compile=with_compile,
        quick=quick,
    )
    with StageProgress(len(cases) + 1, enabled=json_path != STANDARD_OUTPUT) as progress:
        report = run_benchmark(cases, settings, progress=progress)
    if json_path == STANDARD_OUTPUT:
        click.echo(report.to_json())
        return
    if file is not None:
        file.write_text(report.to_json() + "\n", encoding="utf-8")
    _print(Console(), report)


def _print(console: Console, report: BenchmarkReport) -> None:
    """The machine, the times, the figures beside their bars, and what to know about them."""
    machine, limits = report.machine, report.limits
    console.print(
        f"{machine.processor}, {machine.threads} of {machine.logical_cores} cores, {machine.clock}; native kernels: "
        f"{machine.instruction_set}; torch {machine.torch}, onnxruntime {machine.onnxruntime}; {report.rounds} rounds",
        highlight=False,
    )
    console.print(
        f"limits: MatMul {limits.matmul_size}^3 in ONNX Runtime {limits.matmul_gflops:.0f} GFLOP/s, "
        f"reading memory {limits.read_gb_per_s:.1f} GB/s",
        highlight=False,
    )
    for case in report.cases:
        if case.entries:
            console.print(_times(case))
    console.print(_figures(report))
    for case in report.cases:
        for name, reason in case.left_out.items():
            console.print(f"left out: {name} of {case.id}: {reason}", highlight=False, markup=False)
    for note in report.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def _times(case: CaseResult) -> Table:
    columns = ("contestant", "median ms", "best ms", "rate", "error", "allowed")
    table = Table(*columns, title=f"{case.id}: {case.title}", title_justify="left", box=SIMPLE)
    reading = any(entry.cache_gb_per_s is not None for entry in case.entries)
    for entry in case.entries:
        times = (f"{entry.median_ms:.3f}", f"{entry.best_ms:.3f}")
        table.add_row(escape(entry.name), *times, _rate(entry, reading), f"{entry.error:.1e}", f"{entry.allowed:.1e}")
    return table


def _rate(entry: TimedEntry, reading: bool) -> str:
    """Reading the cache is what decoding does, whatever a contestant does besides; elsewhere it is arithmetic."""
    if entry.cache_gb_per_s is not None:
        return f"{entry.cache_gb_per_s:.1f} GB/s"
    return "" if reading else f"{entry.gflops:.0f} GFLOP/s"


def _figures(report: BenchmarkReport) -> Table:
    table = Table(title="Bars", title_justify="left", box=SIMPLE)
    for name in ("case", "figure", "value", "bar", "stretch", ""):
        table.add_column(name, no_wrap=name != "figure")
    for case in report.cases:
        for figure in case.figures:
            table.add_row(*_figure_row(case, figure))
    return table


def _figure_row(case: CaseResult, figure: Figure) -> tuple[str, ...]:
    sign = "<=" if figure.at_most else ">="
    goals = (f"{sign} {_number(figure, goal)}" if goal is not None else "" for goal in (figure.bar, figure.stretch))
    return (escape(case.id), escape(figure.what), _number(figure, figure.value), *goals, VERDICT_STYLES[figure.verdict])


def _number(figure: Figure, value: float) -> str:
    if figure.unit == "x":
        return f"{value:.3f}x" if 0.9 < value < 1.1 else f"{value:.2f}x"
    return f"{value:.0f} MB" if figure.unit == "MB" else f"{value:.0%}"
