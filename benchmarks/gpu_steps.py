"""The steps of the GPU check."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from benchmarks.gpu_cases import Case, Shape, cases, ours, prepared, relative_error, torch_ways
from benchmarks.gpu_launcher import Launcher
from benchmarks.gpu_report import Report, Row
from benchmarks.gpu_timing import Timing, copy_bandwidth, enqueue_seconds, matmul_rate, timing
from qknorm_onnx.torch_export.operators import triton_attention

LEAST_SHARE_OF_COPY: Final = 0.8
LEAST_SHARE_OF_MATMUL: Final = 0.55
MOST_COST_OF_NORM: Final = 1.03
BAR_LENGTH, BAR_BATCH = 8192, 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of everything that is done; `launcher` is None where there is no kernel pack to check."""

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
    launcher: Launcher | None = None


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
        prologue=Shape(batch=BAR_BATCH, new=512, cached=0),
        prefills=tuple(Shape(batch=1, new=length, cached=0) for length in (BAR_LENGTH, 2048, 16384)),
        decodes=tuple(Shape(batch=batch, new=1, cached=cached) for cached in (8192, 32768) for batch in (BAR_BATCH, 1, 8)),
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


def measure_limits(plan: Plan, report: Report, deadline: float) -> None:
    """What the device can do."""
    del deadline
    report.matmul = matmul_rate(size=plan.matmul_size, dtype=torch.bfloat16, device=plan.device, repeats=plan.repeats)
    report.copy = copy_bandwidth(count=plan.copy_bytes, device=plan.device, repeats=plan.repeats)
    rows = [("bfloat16 matrix product", f"{report.matmul / 1e12:.1f} TFLOP/s"), ("copy", f"{report.copy / 1e9:.0f} GB/s")]
    report.table("Limits in the same run", ("what", "rate"), rows)


def check_pack(plan: Plan, report: Report, deadline: float) -> None:
    """The compiled images through the C++ launcher, and what a call costs the CPU."""
    launcher = plan.launcher
    if launcher is None:
        return
    _check("The kernel pack against float64", lambda case: launcher.attention(case.spec, case.inputs)(), plan, report, deadline)
    token = plan.decodes[-1]
    inputs = token.inputs(dtype=torch.float16, device=plan.device)
    rows = [
        (name, f"{enqueue_seconds(call, device=plan.device, repeats=max(plan.repeats, 3)) * 1e6:.1f}")
        for name, call in (("C++ launcher", ours(token, inputs, launcher=launcher)), ("PyTorch", ours(token, inputs)))
    ]
    report.table("One decoding step on the CPU that launches it", ("way", "µs"), rows)


def check_kernels(plan: Plan, report: Report, deadline: float) -> None:
    """The same kernels compiled by PyTorch's Triton, which takes seconds for each."""
    _check(
        "PyTorch's kernels against float64",
        lambda case: triton_attention.attention(case.spec, case.inputs)[0],
        plan,
        report,
        deadline,
    )


def _check(title: str, run: Callable[[Case], Any], plan: Plan, report: Report, deadline: float) -> None:
    rows: list[Row] = []
    sizes: dict[str, Any] = {"variants": plan.check_variants, "length": plan.check_length, "head_size": plan.head_size}
    for case in cases(**sizes, types=plan.check_types, device=plan.device):
        if time.monotonic() > deadline:
            report.notes.append(f"{title}: stopped after {len(rows)} cases, the time was over")
            break
        expected, allowed = case.truth()
        try:
            error = relative_error(run(case), expected)
        except Exception as problem:
            report.failures.append(f"{title}: {case.name} {case.type_name}: {problem}")
            rows.append((case.name, case.type_name, "-", f"{allowed:.2e}", "NO"))
            continue
        passed = error <= allowed
        rows.append((case.name, case.type_name, f"{error:.2e}", f"{allowed:.2e}", "yes" if passed else "NO"))
        if not passed:
            report.failures.append(f"{title}: {case.name} {case.type_name}: error {error:.2e}, allowed {allowed:.2e}")
    report.table(title, ("case", "type", "error", "allowed", "passed"), rows)


COLUMNS: Final = ("way", "µs", "G/s", "of the limit", "note")
Way = tuple[str, Callable[[], Any]]


def _row(name: str, call: Callable[[], Any], plan: Plan, work: float, limit: float, *, flush: bool) -> tuple[float, Row]:
    """Seconds, infinite where it does not run, and the cells of a row."""
    try:
        taken: Timing = timing(call, device=plan.device, repeats=plan.repeats, flush=flush)
    except Exception as error:
        return float("inf"), (name, "-", "-", "-", (str(error).strip() or type(error).__name__).splitlines()[0][:80])
    share = f"{work / taken.seconds / limit:.0%}" if limit else "-"
    note = "" if taken.captured or plan.device == "cpu" else "not captured in a CUDA graph"
    return taken.seconds, (name, f"{taken.seconds * 1e6:.1f}", f"{work / taken.seconds / 1e9:.1f}", share, note)


def _our_ways(shape: Shape, inputs: dict[str, Any], plan: Plan) -> Iterator[Way]:
    if plan.launcher is not None:
        yield "ours, kernel pack", ours(shape, inputs, launcher=plan.launcher)
    yield "ours", ours(shape, inputs)


def measure_prologue(plan: Plan, report: Report, deadline: float) -> None:
    """Norm and rotary of queries alone: all that it does is read and write."""
    del deadline
    shape = plan.prologue
    inputs = shape.inputs(dtype=torch.bfloat16, device=plan.device)
    spec = shape.spec.query_preparation
    given = {"x": inputs["query"], "weight": inputs["q_norm_weight"], "cos": inputs["cos"], "sin": inputs["sin"]}
    ways: list[Way] = [
        ("ours", lambda: triton_attention.rotary(spec, given)),
        ("torch, queries and keys", lambda: prepared(shape, inputs)),
    ]
    if plan.compiled:
        whole = torch.compile(prepared, dynamic=False)
        ways.append(("torch.compile, queries and keys", lambda: whole(shape, inputs)))
    per_head = 2.0 * 2 * shape.batch * shape.new * shape.head_size
    work = {"ours": per_head * shape.heads}
    timed = [
        _row(name, call, plan, work.get(name, per_head * (shape.heads + shape.kv_heads)), report.copy, flush=True)
        for name, call in ways
    ]
    report.table(f"Prologue, B = {shape.batch}, S = {shape.new}", COLUMNS, [row for _, row in timed])
    if report.copy:
        share = work["ours"] / timed[0][0] / report.copy
        report.bar("prologue, share of the copy bandwidth", share, LEAST_SHARE_OF_COPY)


def measure_prefills(plan: Plan, report: Report, deadline: float) -> None:
    """Causal prefill without a cache."""
    for shape in plan.prefills:
        name = f"prefill, S = {shape.new}"
        if time.monotonic() > deadline:
            report.notes.append(f"{name}: not run, the time was over")
            continue
        inputs = shape.inputs(dtype=torch.bfloat16, device=plan.device)
        work = shape.floating_operations
        alone: Way = ("ours, attention alone", ours(shape, inputs, plain=True))
        ways = [*_our_ways(shape, inputs, plan), alone, *torch_ways(shape, inputs, compiled=plan.compiled)]
        taken = _table(name, ways, plan, report, work=work, limit=report.matmul, flush=False)
        report.bar(
            f"{name}: time of norm and attention by attention alone",
            taken["ours"] / taken[alone[0]],
            MOST_COST_OF_NORM,
            at_most=True,
        )
        for way in (way for way in ("ours, kernel pack", "ours") if way in taken):
            report.bar(f"{name}: {way}, speed by PyTorch's best backend", _best_eager(taken) / taken[way], 1.0)
            if shape.new == BAR_LENGTH and report.matmul:
                report.bar(f"{name}: {way}, share of the matrix rate", work / taken[way] / report.matmul, LEAST_SHARE_OF_MATMUL)


def measure_decodes(plan: Plan, report: Report, deadline: float) -> None:
    """One new token for each row, cache in place."""
    for shape in plan.decodes:
        name = f"decode, B = {shape.batch}, {shape.cached} cached"
        if time.monotonic() > deadline:
            report.notes.append(f"{name}: not run, the time was over")
            continue
        inputs = shape.inputs(dtype=torch.bfloat16, device=plan.device)
        compiled = plan.compiled and shape.batch == BAR_BATCH  # compiling takes longer than all measurements
        ways = [*_our_ways(shape, inputs, plan), *torch_ways(shape, inputs, compiled=compiled)]
        taken = _table(name, ways, plan, report, work=shape.cache_bytes, limit=report.copy, flush=True)
        for way in (way for way in ("ours, kernel pack", "ours") if way in taken):
            report.bar(f"{name}: {way}, speed by PyTorch's best backend", _best_eager(taken) / taken[way], 1.0)
            if shape.batch == BAR_BATCH and report.copy:
                share = shape.cache_bytes / taken[way] / report.copy
                report.bar(f"{name}: {way}, share of the copy bandwidth", share, LEAST_SHARE_OF_COPY)


def _table(
    title: str, ways: list[Way], plan: Plan, report: Report, *, work: float, limit: float, flush: bool
) -> dict[str, float]:
    """Times of all ways in seconds, and their table."""
    taken, rows = {}, []
    for name, call in ways:
        taken[name], row = _row(name, call, plan, work, limit, flush=flush)
        rows.append(row)
    report.table(title[0].upper() + title[1:], COLUMNS, rows)
    return taken


def _best_eager(taken: dict[str, float]) -> float:
    return min((t for name, t in taken.items() if name.startswith("torch ")), default=float("nan"))
