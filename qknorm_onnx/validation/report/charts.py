"""Figures of a validation on logarithmic axes, as places in an SVG: the page's template only draws them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Final

from qknorm_onnx.spec.signature import Dtype
from qknorm_onnx.validation.report.parity_row import ParityRow
from qknorm_onnx.validation.report.ranges import LIMITS, LogitRange, ValueRange

WIDTH: Final = 720.0
HEIGHT: Final = 240.0
LEFT: Final = 56.0
BOTTOM: Final = 24.0
TOP: Final = 10.0
RIGHT: Final = 8.0
_MOST_TICKS: Final = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tick:
    """A line across the chart at `y`, with its label."""

    y: float
    label: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
    """Something at `x` from `y` down to `base`: a dot where both are equal. `text` is its tooltip, `kind` its class in CSS."""

    x: float
    y: float
    base: float
    kind: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
    """Marks in order of x; `limits` are lines of their own, beside the ticks of the axis."""

    title: str
    caption: str
    ticks: tuple[Tick, ...]
    limits: tuple[Tick, ...]
    marks: tuple[Mark, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LogAxis:
    """From 10^low at the bottom to 10^high at the top."""

    low: int
    high: int

    @staticmethod
    def over(values: Iterable[float]) -> _LogAxis:
        finite = [math.log10(value) for value in values if 0 < value < math.inf]
        low, high = math.floor(min(finite, default=-8.0)), math.ceil(max(finite, default=0.0))
        return _LogAxis(low=low, high=max(high, low + 1))

    def y(self, value: float) -> float:
        if math.isinf(value):
            return TOP
        exponent = math.log10(value) if value > 0 else self.low
        share = (min(max(exponent, self.low), self.high) - self.low) / (self.high - self.low)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP), 1)

    def ticks(self) -> tuple[Tick, ...]:
        step = max(1, math.ceil((self.high - self.low) / _MOST_TICKS))
        return tuple(Tick(y=self.y(10.0**power), label=f"1e{power}") for power in range(self.low, self.high + 1, step))


def _x(place: int, count: int) -> float:
    return round(LEFT + (place + 0.5) * (WIDTH - LEFT - RIGHT) / max(count, 1), 1)


def error_chart(rows: Sequence[ParityRow], dtype: Dtype) -> Chart | None:
    """Each comparison of one type in the order of running: its error, PyTorch's own, and what is allowed."""
    shown = [row for row in rows if not math.isnan(row.error) and row.budget > 0]
    if not shown:
        return None
    axis = _LogAxis.over(value for row in shown for value in (row.error, row.budget, row.torch_error or 0.0))
    marks = []
    for place, row in enumerate(shown):
        x, text = _x(place, len(shown)), f"{row.case}, {row.output}: error {row.error:.2g}, allowed {row.budget:.2g}"
        marks.append(Mark(x=x, y=axis.y(row.budget), base=axis.y(row.budget), kind="budget", text=text))
        if row.torch_error:
            own = axis.y(row.torch_error)
            marks.append(Mark(x=x, y=own, base=own, kind="own", text=f"{row.case}: PyTorch's own error {row.torch_error:.2g}"))
        here = axis.y(row.error)
        marks.append(Mark(x=x, y=here, base=here, kind="bad" if row.is_bad else "good", text=text))
    caption = "A dot for each case and output in the order of running; the dash is what is allowed, the ring PyTorch's own error."
    return Chart(title=f"Errors in {dtype}", caption=caption, ticks=axis.ticks(), limits=(), marks=tuple(marks))


def depth_chart(ranges: Sequence[ValueRange], dtype: Dtype) -> Chart | None:
    """How the error of one type grows through the graph."""
    shown = [item for item in ranges if item.error > 0]
    if not shown:
        return None
    axis = _LogAxis.over(item.error for item in shown)
    marks = []
    for place, item in enumerate(shown):
        y, kind = axis.y(item.error), "bad" if item.lost else "attention" if item.is_attention else "own"
        text = f"{item.op_type} {item.node}: {item.error:.2g}"
        marks.append(Mark(x=_x(place, len(shown)), y=y, base=y, kind=kind, text=text))
    caption = "Each operator's result beside the same graph in float64, from the first to the last; attention is filled."
    return Chart(title=f"Error over depth in {dtype}", caption=caption, ticks=axis.ticks(), limits=(), marks=tuple(marks))


def range_chart(ranges: Sequence[ValueRange]) -> Chart | None:
    """How large the values of each operator are, beside the largest of float16."""
    shown = [item for item in ranges if item.largest > 0]
    if not shown:
        return None
    limit = LIMITS["float16"]
    axis = _LogAxis.over([limit, *(item.largest for item in shown), *(max(item.smallest, 1e-12) for item in shown)])
    marks = tuple(
        Mark(
            x=_x(place, len(shown)),
            y=axis.y(item.largest),
            base=axis.y(item.smallest),
            kind="bad" if item.largest > limit else "attention" if item.is_attention else "range",
            text=f"{item.op_type} {item.node}: {item.smallest:.2g} to {item.largest:.2g}",
        )
        for place, item in enumerate(shown)
    )
    caption = "From the smallest to the largest value of each operator's result on the example, without zeros."
    limits = (Tick(y=axis.y(limit), label="float16"),)
    return Chart(title="Values inside", caption=caption, ticks=axis.ticks(), limits=limits, marks=marks)


def logit_chart(logits: Sequence[LogitRange]) -> Chart | None:
    """How far apart the logits of each attention are: beyond 16 or so, its softmax is nearly one key."""
    shown = [item for item in logits if item.highest > item.lowest]
    if not shown:
        return None
    axis = _LogAxis.over(item.highest - item.lowest for item in shown)
    marks = []
    for place, item in enumerate(shown):
        y = axis.y(item.highest - item.lowest)
        text = f"{item.name}: logits from {item.lowest:.3g} to {item.highest:.3g}"
        marks.append(Mark(x=_x(place, len(shown)), y=y, base=y, kind="attention", text=text))
    caption = "The highest visible logit of each attention less its lowest, on the example."
    return Chart(title="Spread of logits", caption=caption, ticks=axis.ticks(), limits=(), marks=tuple(marks))
