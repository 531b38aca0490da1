"""What was found of each file, as values and as JSON, and the table of docs/coverage.md."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from tools.foreign.catalogue import IMPLEMENTATIONS, NONE, TOOLS, Source, Tool, files_of

RESULTS: Final = pathlib.Path(__file__).with_name("results.json")
Verdict = Literal["ok", "wrong", "does not run", "not written", "error"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One file: how many of its attentions are fused, and whether it computes the same afterwards.

    "ok": all attentions are in the report, those that are fused are proven, and `difference` from the file and `error` against
    PyTorch (both over the largest value) are within bounds. "does not run": onnxruntime refuses the file itself. "not written":
    the tool does.
    """

    attentions: int
    verdict: Verdict
    fused: int = 0
    difference: float = 0.0
    error: float = 0.0
    reason: str = ""


def stored() -> dict[str, dict[str, Any]]:
    """What was measured before: tool, then file."""
    return json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}


def with_cell(results: Mapping[str, Mapping[str, Any]], tool: Tool, source: Source, cell: Cell) -> dict[str, Mapping[str, Any]]:
    """The results with this cell."""
    return {**results, tool.key: {**results.get(tool.key, {}), source.name: dataclasses.asdict(cell)}}


def cells_of(tool: Tool) -> Iterator[tuple[Source, Cell]]:
    """The files of a tool, each with what was found of it. KeyError for one that was not measured."""
    found = stored()[tool.key]
    for source in files_of(tool):
        yield source, Cell(**found[source.name])


def table() -> list[list[str]]:
    """A row for each tool; the exporter's own files have one for each model."""
    rows: list[list[str]] = []
    for model in IMPLEMENTATIONS:
        cells = [cell for source, cell in cells_of(NONE) if source.model == model]
        rows.append([NONE.label, f"`{model}`: {len(cells)}", *_counts(cells)])
    for tool in TOOLS:
        if tool is not NONE:
            cells = [cell for _, cell in cells_of(tool)]
            models = sorted({source.model for source, _ in cells_of(tool)})
            named = f"`{'`, `'.join(models)}`: {len(cells)}" if tool.given else f"{len(cells)}"
            rows.append([tool.label, named, *_counts(cells)])
    every = [cell for tool in TOOLS for _, cell in cells_of(tool)]
    lost = [cell for cell in every if cell.verdict in UNUSABLE]
    attentions = sum(cell.attentions for cell in lost)
    left = f"not counted: {attentions} attentions in {len(lost)} files that do not run or were not written"
    return [*rows, ["all of these", str(len(every)), *_counts(every)[:2], left]]


def _counts(cells: list[Cell]) -> tuple[str, str, str]:
    running = [cell for cell in cells if cell.verdict not in UNUSABLE]
    fused, attentions = sum(cell.fused for cell in running), sum(cell.attentions for cell in running)
    share = f" ({fused / attentions:.1%})" if attentions else ""
    right = f"{sum(cell.verdict == 'ok' for cell in running)} of {len(running)}"
    said = [
        f"{count} that {words}: {'; '.join(sorted({cell.reason for cell in cells if cell.verdict == verdict}))}"
        for verdict, words in UNUSABLE.items()
        if (count := sum(cell.verdict == verdict for cell in cells))
    ]
    said += sorted({cell.reason for cell in running if cell.reason})
    return f"{fused} of {attentions}{share}", right, "; ".join(said)


UNUSABLE: Final = {"does not run": "onnxruntime itself does not run", "not written": "the tool did not write"}
