"""The steps of the GPU check and the tables that they fill."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
import triton

from benchmarks.gpu_cases import Shape, checks, ours, prepared, torch_ways
from benchmarks.gpu_timing import copy_bandwidth, matmul_rate, seconds
from qknorm_onnx.torch_export import triton_attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of everything that is done."""

    device: str
    repeats: int
    check_variants: int
    check_length: int
    check_types: tuple[torch.dtype, ...]
    head_size: int
    matmul_size: int
    copy_bytes: int
    prologue: Shape
    prefills: tuple[Shape, ...]
    decodes: tuple[Shape, ...]
    compiled: bool


def full_plan() -> Plan:
    """The sizes of the published table."""
    return Plan(
        device="cuda",
        repeats=20,
        check_variants=99,
        check_length=130,
        check_types=(torch.bfloat16, torch.float16, torch.float32),
        head_size=128,
        matmul_size=8192,
        copy_bytes=1 << 31,
        prologue=Shape(batch=64, new=512, cached=0),
        prefills=tuple(Shape(batch=1, new=length, cached=0) for length in (2048, 8192, 16384)),
        decodes=tuple(Shape(batch=batch, new=1, cached=cached) for cached in (8192, 32768) for batch in (1, 8, 64)),
        compiled=True,
    )


def dry_plan() -> Plan:
    """As small as can be: for the interpreter."""
    tiny = {"heads": 2, "kv_heads": 1, "head_size": 16}
    return Plan(
        device="cpu",
        repeats=1,
        check_variants=2,
        check_length=3,
        check_types=(torch.float16, torch.float32),  # the interpreter multiplies bfloat16 matrices wrongly
        head_size=16,
        matmul_size=16,
        copy_bytes=1 << 10,
        prologue=Shape(batch=1, new=4, cached=0, **tiny),
        prefills=(Shape(batch=1, new=5, cached=0, **tiny),),
        decodes=(Shape(batch=2, new=1, cached=9, **tiny),),
        compiled=False,
    )


@dataclasses.dataclass(kw_only=True)
class Report:
    """Tables as lines of Markdown, notes, limits of the device, and the names of failed checks."""

    heading: str
    tables: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)
    matmul: float = 0.0
    copy: float = 0.0

    def note(self, text: str) -> None:
        """Something that was not done, or what happened."""
        self.notes.append(text)

    def table(self, title: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
        """One more table."""
        lines = [f"## {title}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
        self.tables.append("\n".join(lines))

    def markdown(self) -> str:
        """All of it."""
        notes = "\n".join(f"- {note}" for note in self.notes)
        return "\n\n".join([self.heading, *self.tables, *(["## Notes\n\n" + notes] if notes else [])]) + "\n"


def new_report(plan: Plan) -> Report:
    """A report that says where it was made."""
    if plan.device == "cuda":
        facts = torch.cuda.get_device_properties(0)
        where = f"{facts.name}, {facts.multi_processor_count} multiprocessors, CUDA {torch.version.cuda}"
    else:
        where = f"dry run in Triton's interpreter on {platform.machine()}: the times mean nothing"
    return Report(heading=f"# GPU check\n\n{where}; torch {torch.__version__}, triton {triton.__version__}.")


def run_checks(plan: Plan, report: Report, deadline: float) -> None:
    """Every comparison with float64."""
    rows = []
    sizes: dict[str, Any] = {"variants": plan.check_variants, "length": plan.check_length, "head_size": plan.head_size}
    for check in checks(**sizes, types=plan.check_types, device=plan.device):
        rows.append((check.name, check.dtype, f"{check.error:.2e}", f"{check.allowed:.2e}", "yes" if check.passed else "NO"))
        if not check.passed:
            report.failures.append(f"{check.name} {check.dtype}")
        if time.monotonic() > deadline:
            report.note("checks: stopped, the time was over")
            break
    report.table("Against float64", ("case", "type", "error", "allowed", "passed"), rows)


def measure_limits(plan: Plan, report: Report, deadline: float) -> None:
    """What the device can do."""
    del deadline
    report.matmul = matmul_rate(size=plan.matmul_size, dtype=torch.bfloat16, device=plan.device, repeats=plan.repeats)
    report.copy = copy_bandwidth(count=plan.copy_bytes, device=plan.device, repeats=plan.repeats)
    rows = [("bfloat16 matrix product", f"{report.matmul / 1e12:.1f} TFLOP/s"), ("copy", f"{report.copy / 1e9:.0f} GB/s")]
    report.table("Limits in the same run", ("what", "rate"), rows)


Timed = tuple[float, tuple[str, ...]]  # seconds, and the cells of a row


def _row(name: str, call: Callable[[], Any], plan: Plan, work: float, limit: float, *, flush: bool) -> Timed:
    try:
        taken = seconds(call, device=plan.device, repeats=plan.repeats, flush=flush)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        return float("inf"), (name, "-", "-", "-", str(error).strip().splitlines()[0][:80])
    share = f"{work / taken / limit:.0%}" if limit else "-"
    return taken, (name, f"{taken * 1e6:.1f}", f"{work / taken / 1e9:.1f}", share, "")


COLUMNS = ("way", "µs", "G/s", "of the limit", "note")


def _compared(
    title: str,
    shape: Shape,
    inputs: Any,
    plan: Plan,
    report: Report,
    mine: list[tuple[str, Any]],
    *,
    work: float,
    limit: float,
    flush: bool,
) -> None:
    """One table: our ways, then PyTorch's."""
    timed = [_row(name, call, plan, work, limit, flush=flush) for name, call in mine]
    theirs = [
        _row(name, call, plan, work, limit, flush=flush) for name, call in torch_ways(shape, inputs, compiled=plan.compiled)
    ]
    eager_best = min((taken for taken, row in theirs if row[0] != "torch.compile"), default=float("inf"))
    report.table(title, COLUMNS, [row for _, row in timed + theirs])
    report.note(f"{title}: {eager_best / timed[0][0]:.2f}x PyTorch's best backend with norm and rotary of its own")
    if len(timed) > 1:
        report.note(f"{title}: norm and rotary cost {timed[0][0] / timed[1][0] - 1:.1%} of the attention alone (bar: 3%)")


def measure_prologue(plan: Plan, report: Report, deadline: float) -> None:
    """Norm and rotary of queries alone: all that it does is read and write."""
    del deadline
    shape = plan.prologue
    inputs = shape.inputs(dtype=torch.bfloat16, device=plan.device)
    spec = shape.spec.query_preparation
    given = {"x": inputs["query"], "weight": inputs["q_norm_weight"], "cos": inputs["cos"], "sin": inputs["sin"]}
    ways: list[tuple[str, Callable[[], Any]]] = [
        ("ours", lambda: triton_attention.rotary(spec, given)),
        ("torch, queries and keys", lambda: prepared(shape, inputs)),
    ]
    if plan.compiled:
        whole = torch.compile(prepared, dynamic=False)
        ways.append(("torch.compile, queries and keys", lambda: whole(shape, inputs)))
    per_head = 2.0 * 2 * shape.batch * shape.new * shape.head_size
    work = {"ours": per_head * shape.heads}
    rows = [
        _row(name, call, plan, work.get(name, per_head * (shape.heads + shape.kv_heads)), report.copy, flush=True)[1]
        for name, call in ways
    ]
    report.table(f"Prologue, B = {shape.batch}, S = {shape.new} (bar: 80% of the copy bandwidth)", COLUMNS, rows)


def measure_prefills(plan: Plan, report: Report, deadline: float) -> None:
    """Causal prefill without a cache."""
    for shape in plan.prefills:
        if time.monotonic() > deadline:
            report.note(f"prefill S = {shape.new}: not run, the time was over")
            continue
        inputs = shape.inputs(dtype=torch.bfloat16, device=plan.device)
        mine = [("ours", ours(shape, inputs)), ("ours, attention alone", ours(shape, inputs, plain=True))]
        title = f"Prefill, S = {shape.new} (bar at 8192: 55% of the matrix rate)"
        _compared(title, shape, inputs, plan, report, mine, work=shape.floating_operations, limit=report.matmul, flush=False)


def measure_decodes(plan: Plan, report: Report, deadline: float) -> None:
    """One new token for each row, cache in place."""
    for shape in plan.decodes:
        if time.monotonic() > deadline:
            report.note(f"decode B = {shape.batch}, {shape.cached} cached: not run, the time was over")
            continue
        inputs = shape.inputs(dtype=torch.bfloat16, device=plan.device)
        title = f"Decode, B = {shape.batch}, {shape.cached} cached (bar at B = 64: 80% of the copy bandwidth)"
        mine = [("ours", ours(shape, inputs))]
        _compared(title, shape, inputs, plan, report, mine, work=shape.cache_bytes, limit=report.copy, flush=True)


STEPS: dict[str, Callable[[Plan, Report, float], None]] = {
    "checks": run_checks,
    "limits": measure_limits,
    "prologue": measure_prologue,
    "prefill": measure_prefills,
    "decode": measure_decodes,
}
