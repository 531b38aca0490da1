"""What was measured of files from other tools: every file of the catalogue, nothing wrong, and nearly all attentions fused."""

from __future__ import annotations

from tools.foreign.catalogue import TOOLS
from tools.foreign.results import cells_of, table

LEAST_FUSED = 0.95


def test_every_file_is_measured_and_none_is_wrong() -> None:
    cells = [(tool.key, source.name, cell) for tool in TOOLS for source, cell in cells_of(tool)]
    assert not [(tool, name, cell.reason) for tool, name, cell in cells if cell.verdict in ("wrong", "error")]


def test_nearly_all_attentions_of_files_that_run_are_fused() -> None:
    running = [cell for tool in TOOLS for _, cell in cells_of(tool) if cell.verdict == "ok"]
    assert sum(cell.fused for cell in running) >= LEAST_FUSED * sum(cell.attentions for cell in running)


def test_what_is_not_fused_has_a_cause() -> None:
    cells = [cell for tool in TOOLS for _, cell in cells_of(tool)]
    assert all(cell.reason for cell in cells if cell.fused < cell.attentions)
    assert all(row[-1] for row in table()[:-1] if "(100.0%)" not in row[2])
