"""Runs the cases: first every contestant's result is compared with float64, then they are timed in turns."""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import qknorm_onnx.custom_ops as custom_ops
from qknorm_onnx.errors import InputError, QKNormError
from qknorm_onnx.speed import contrib_contestants, onnx_contestants, torch_contestants
from qknorm_onnx.speed.benchmark_report import BenchmarkReport, CaseResult, Figure, TimedEntry
from qknorm_onnx.speed.cases import FASTEST_PEER, AnyCase, Bar, Case, Entry, MemoryCase
from qknorm_onnx.speed.contestant import Contestant, LeftOutError, Maker
from qknorm_onnx.speed.machine import MATMUL_SIZE, READ_BYTES, describe, load_average, measure_limits, read_gb_per_s
from qknorm_onnx.speed.peak_memory import peak_memory_mb
from qknorm_onnx.speed.problem import Problem, Tensor, Tensors, true_output
from qknorm_onnx.speed.timing import clock_for, interleaved, no_pause, ratio_of_pairs, wait_until_quiet
from qknorm_onnx.validation.measures.error_budget import budget, unit
from qknorm_onnx.validation.measures.metrics import relative_error

MAKERS: Final[Mapping[str, Maker]] = MappingProxyType(
    {
        "native": onnx_contestants.native,
        "torch eager": torch_contestants.eager,
        "torch compile": torch_contestants.compiled,
        "ORT primitive ops": onnx_contestants.primitive,
        "ORT standard ops": onnx_contestants.standard,
        "ORT GQA": contrib_contestants.grouped_query,
        "ORT GQA, shared cache": contrib_contestants.grouped_query_shared,
        "ORT MHA": contrib_contestants.multi_head,
    }
)
TORCH: Final = "torch eager"
COMPILED: Final = "torch compile"
# A peer may be less exact than PyTorch, but not as far off as something that computes another function would be.
PEER_UNITS: Final = 64
QUICK_MATMUL_SIZE: Final = 64
QUICK_READ_BYTES: Final = 1 << 20


class WrongResultError(QKNormError):
    """A contestant computed something else than the float64 reference: its times would mean nothing."""

    exit_code = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How to measure. `quick`: small sizes, no pauses between turns.

    `placements`: how often the contestants are made anew within the rounds. Which pages of memory a cache lies on can
    change the time of one token by a third and more, for as long as the buffer lives.
    """

    rounds: int
    threads: int
    placements: int = 1
    with_compile: bool = False
    quick: bool = False


def run_benchmark(
    cases: Sequence[AnyCase],
    settings: Settings,
    *,
    makers: Mapping[str, Maker] | None = None,
    progress: Callable[[str], None] = lambda _stage: None,
) -> BenchmarkReport:
    """Check and time all `cases` in one process.

    Args:
        cases: from `cases.full_cases()` or `quick_cases()`.
        settings: rounds, threads and what to leave out.
        makers: by the names that entries use; None is `MAKERS`.
        progress: called with the name of each stage as it begins.

    Raises:
        InputError: torch, onnxruntime or the native library is missing.
        WrongResultError: a result is wrong; the message says whose, and by how much.
    """
    torch_contestants.import_torch()
    _require_library()
    name, clock = clock_for(settings.threads)
    machine = describe(threads=settings.threads, clock=name)
    with torch_contestants.torch_threads(settings.threads):
        progress("limits of the machine")
        sizes = (QUICK_MATMUL_SIZE, QUICK_READ_BYTES) if settings.quick else (MATMUL_SIZE, READ_BYTES)
        limits = measure_limits(threads=settings.threads, clock=clock, matmul_size=sizes[0], read_bytes=sizes[1])
        results = []
        for case in cases:
            progress(case.id)
            results.append(run_case(case, settings, makers or MAKERS))
            gc.collect()
    machine = dataclasses.replace(machine, load_after=load_average())
    return BenchmarkReport(machine=machine, limits=limits, rounds=settings.rounds, quick=settings.quick, cases=tuple(results))


def run_case(case: AnyCase, settings: Settings, makers: Mapping[str, Maker]) -> CaseResult:
    """One case. Raises WrongResultError."""
    if isinstance(case, MemoryCase):
        return _run_memory(case, settings)
    entries = [entry for entry in case.entries if settings.with_compile or entry.maker != COMPILED]
    judges: dict[Problem, Judge] = {}
    for problem in dict.fromkeys(entry.problem for entry in entries):
        judges[problem] = Judge(problem, makers[TORCH], settings.threads)
    pause = no_pause if settings.quick else wait_until_quiet
    times: dict[str, list[float]] = {}
    field = Field()
    for rounds in _shares(settings.rounds, settings.placements):
        # While the ones before still hold their memory: the new buffers lie elsewhere.
        field = _make_field(case, entries, judges, makers, settings.threads)
        calls = {name: contestant.call for name, contestant in field.contestants.items()}
        found = interleaved(calls, rounds=rounds, clock=clock_for(settings.threads)[1], pause=pause)
        for name, seconds in found.items():
            times.setdefault(name, []).extend(seconds)
    timed = tuple(_timed(entry, times[entry.name], field.errors[entry.name]) for entry in entries if entry.name in times)
    figures = (*_ratios(case, times), *_read_share(case, timed, settings))
    return CaseResult(id=case.id, title=case.title, entries=timed, figures=figures, left_out=field.left_out)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """The contestants of a case by name, the error and the allowed error of each, and who is left out and why."""

    contestants: dict[str, Contestant] = dataclasses.field(default_factory=dict)
    errors: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)


def _make_field(
    case: Case, entries: Sequence[Entry], judges: Mapping[Problem, Judge], makers: Mapping[str, Maker], threads: int
) -> Field:
    """All contestants in memory of their own, each checked. Raises WrongResultError."""
    field = Field()
    for entry in entries:
        judge = judges[entry.problem]
        try:
            contestant = makers[entry.maker](entry.problem, judge.inputs, threads)
        except LeftOutError as reason:
            field.left_out[entry.name] = str(reason)
            continue
        field.contestants[entry.name] = contestant
        field.errors[entry.name] = judge.check(case, entry, contestant)
    return field


def _shares(rounds: int, parts: int) -> list[int]:
    """`rounds` in `parts` shares as equal as can be, without empty ones."""
    return [share for part in range(parts) if (share := (rounds + part) // parts) > 0]


class Judge:
    """Inputs and truth of one problem, and how far a result may be from it: as `qk.validate` judges, by PyTorch's own error."""

    def __init__(self, problem: Problem, torch_maker: Maker, threads: int) -> None:
        self.inputs: Tensors = problem.inputs()
        self._truth: Tensor = true_output(problem, self.inputs)
        self._dtype = problem.dtype
        torch = torch_maker(problem, self.inputs, threads)
        torch.call()
        self._torch_error = self._error(torch.output())

    def check(self, case: Case, entry: Entry, contestant: Contestant) -> tuple[float, float]:
        """Error and allowed error of a contestant's result. Raises WrongResultError."""
        contestant.call()
        error = self._error(contestant.output())
        allowed = PEER_UNITS * unit(self._dtype)
        if entry.is_native:
            allowed = min(allowed, budget(self._dtype, torch_error=self._torch_error, float32_error=self._torch_error).allowed)
        if not error <= allowed:
            raise WrongResultError(
                f"{entry.name} computes {case.id} wrongly: its largest error against float64 is {error:.2g} of the largest "
                f"value, {allowed:.2g} is allowed; nothing was timed"
            )
        return error, allowed

    def _error(self, y: Tensor) -> float:
        return relative_error(y, self._truth) if y.shape == self._truth.shape else float("inf")


def _run_memory(case: MemoryCase, settings: Settings) -> CaseResult:
    try:
        value = peak_memory_mb(case, threads=settings.threads)
    except LeftOutError as reason:
        return CaseResult(id=case.id, title=case.title, left_out={"native": str(reason)})
    figure = Figure(what="native, over inputs and outputs", value=value, unit="MB", bar=case.at_most_mb, at_most=True)
    return CaseResult(id=case.id, title=case.title, figures=(figure,))


def _timed(entry: Entry, seconds: list[float], error: tuple[float, float]) -> TimedEntry:
    median = statistics.median(seconds)
    problem = entry.problem
    return TimedEntry(
        name=entry.name,
        error=error[0],
        allowed=error[1],
        median_ms=1e3 * median,
        best_ms=1e3 * min(seconds),
        gflops=1e-9 * problem.floating_operations / median,
        cache_gb_per_s=1e-9 * problem.cache_bytes / median if problem.cached and entry.is_native else None,
    )


def _ratios(case: Case, times: Mapping[str, list[float]]) -> list[Figure]:
    peers = {entry.name for entry in case.entries if not entry.is_native} & times.keys()
    fastest = min(peers, key=lambda name: statistics.median(times[name]), default="")
    figures: dict[tuple[str, str], Figure] = {}  # the fastest peer may have a bar of its own before
    for bar in case.bars:
        against = fastest if bar.against == FASTEST_PEER else bar.against
        if bar.entry in times and against in times:
            figures.setdefault((bar.entry, against), _ratio(bar, against, times))
    return list(figures.values())


def _ratio(bar: Bar, against: str, times: Mapping[str, list[float]]) -> Figure:
    named = f"{against} ({FASTEST_PEER})" if bar.against == FASTEST_PEER else against
    value = ratio_of_pairs(times[bar.entry], times[against])
    return Figure(what=f"{bar.entry} against {named}", value=value, unit="x", bar=bar.at_least, stretch=bar.stretch)


def _read_share(case: Case, timed: Sequence[TimedEntry], settings: Settings) -> list[Figure]:
    """Beside a loop that reads as many bytes again and again, so from the same caches or from memory."""
    if case.read_share_stretch is None:
        return []
    num_bytes = next(entry.problem.cache_bytes for entry in case.entries if entry.is_native)
    limit = read_gb_per_s(num_bytes, threads=settings.threads, clock=clock_for(settings.threads)[1])
    shares = [entry.cache_gb_per_s / limit for entry in timed if entry.cache_gb_per_s is not None]
    what = f"native, of a loop reading {1e-6 * num_bytes:.0f} MB at {limit:.1f} GB/s"
    return [Figure(what=what, value=share, unit="share", stretch=case.read_share_stretch) for share in shares]


def _require_library() -> None:
    try:
        custom_ops.library_path()
    except FileNotFoundError as error:
        raise InputError(f"the benchmark measures the native kernels: {error}; build them with: pip install .") from error
