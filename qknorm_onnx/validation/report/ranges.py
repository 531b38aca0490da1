"""How large values inside a model are on its example, beside what their types hold: where a half type will overflow first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from qknorm_onnx.spec.signature import Dtype

LIMITS: Final[dict[Dtype, float]] = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}
NEAR: Final = 0.1  # of the limit: one more doubling of a few layers away
_SHOWN: Final = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueRange:
    """The result of one operator: sizes of its exact values, zeros left out (`smallest` is infinite where all are), and its error
    max|y - r| / max|r|, with r the same graph in float64. `lost` values are not finite though the exact ones are.
    """

    dtype: Dtype
    node: str
    op_type: str
    is_attention: bool
    largest: float
    smallest: float
    error: float
    lost: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitRange:
    """The logits of one attention on the example, of visible keys only: scaled, capped, with its bias."""

    name: str
    lowest: float
    highest: float


def first_beyond(ranges: Sequence[ValueRange], dtype: Dtype) -> ValueRange | None:
    """The first operator whose exact result has values that `dtype` does not hold."""
    return next((item for item in ranges if item.largest > LIMITS[dtype]), None)


def range_table(ranges: Sequence[ValueRange], logits: Sequence[LogitRange]) -> RenderableType:
    """Attention and the values nearest to the limit of float16, in graph order, and a sentence on each half type."""
    largest = sorted((item for item in ranges if not item.is_attention), key=lambda item: -item.largest)[:_SHOWN]
    shown = [item for item in ranges if item.is_attention or item in largest]
    by_name = {item.name: item for item in logits}
    table = Table(
        Column("result of", overflow="fold", ratio=1),
        *(Column(name, justify="right", no_wrap=True) for name in ("largest", "of float16", "logits", "error")),
        title="\nvalues inside, on the example",
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    for item in shown:
        share = item.largest / LIMITS["float16"]
        found = by_name.get(item.node) if item.is_attention else None
        seen = f"{found.lowest:.3g} to {found.highest:.3g}" if found is not None else ""
        style = "bold red" if share > 1 else "yellow" if share > NEAR else ""
        cells = (f"{item.largest:.2e}", Text(f"{share:.1%}", style), seen, "" if math.isnan(item.error) else f"{item.error:.1e}")
        table.add_row(Text(f"{item.op_type} {item.node}"), *cells)
    return Group(table, *(Text(line) for line in _sentences(ranges)))


def _sentences(ranges: Sequence[ValueRange]) -> list[str]:
    first = first_beyond(ranges, "float16")
    limit = LIMITS["float16"]
    if first is not None:
        return [f"float16 overflows first in {first.op_type} {first.node}: {first.largest:.3g}, where it holds {limit:.0f}"]
    top = max(ranges, key=lambda item: item.largest, default=None)
    if top is None:
        return ["no float value inside could be watched"]
    return [f"float16 holds every value: the largest is {top.largest:.3g}, of {limit:.0f}, in {top.op_type} {top.node}"]
