"""What a benchmark found, as values and as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Final, Literal

from qknorm_onnx.speed.machine import Limits, Machine

FORMAT_VERSION: Final = 1
Verdict = Literal["stretch", "reached", "missed", ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """One number and the bar for it. `unit`: "x" (times as fast), "share" or "MB". None: no bar."""

    what: str
    value: float
    unit: str
    bar: float | None = None
    stretch: float | None = None
    at_most: bool = False

    @property
    def verdict(self) -> Verdict:
        """Whether the stretch goal or the bar is reached; "" without either."""
        if self.bar is None and self.stretch is None:
            return ""
        if self.stretch is not None and self._reaches(self.stretch):
            return "stretch"
        if self.bar is None:
            return ""
        return "reached" if self._reaches(self.bar) else "missed"

    def _reaches(self, goal: float) -> bool:
        return self.value <= goal if self.at_most else self.value >= goal


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedEntry:
    """Times of one contestant. `error` is max|y - r| / max|r| against float64, `allowed` the most that was accepted."""

    name: str
    error: float
    allowed: float
    median_ms: float
    best_ms: float
    gflops: float
    cache_gb_per_s: float | None = None  # keys and values read in a second: of native entries with a cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseResult:
    """One case: its contestants, its figures, and who could not take part and why."""

    id: str
    title: str
    entries: tuple[TimedEntry, ...] = ()
    figures: tuple[Figure, ...] = ()
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkReport:
    """All cases of one run on one machine."""

    machine: Machine
    limits: Limits
    rounds: int
    quick: bool
    cases: tuple[CaseResult, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know about the numbers."""
        out = []
        if self.quick:
            out.append("small sizes: they show that everything runs and is right, their times mean nothing")
        if self.machine.was_busy:
            load = f"{self.machine.load_before:.1f} before, {self.machine.load_after:.1f} after"
            out.append(f"other programs were running (load {load}, {self.machine.logical_cores} cores): the times are noisy")
        return tuple(out)

    def as_data(self) -> dict[str, Any]:
        """JSON-ready values."""
        found = dataclasses.asdict(self)
        for case, data in zip(self.cases, found["cases"], strict=True):
            for figure, figure_data in zip(case.figures, data["figures"], strict=True):
                figure_data["verdict"] = figure.verdict
        return {"format_version": FORMAT_VERSION, **found, "notes": list(self.notes)}

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(self.as_data(), indent=1)
