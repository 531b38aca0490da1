"""The script for a GPU runs from end to end in small, so that it is ready when there is one."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**settings, **environment})


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu_check") / "table.md"
    done = run("--dry-run", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    return out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "heading", ["## Against float64", "## Limits", "## Prologue", "## Prefill, S = 5", "## Decode, B = 2, 9 cached", "## Notes"]
)
def test_every_step_has_a_table(dry_run, heading):
    assert heading in dry_run


def test_every_check_passes_and_says_so(dry_run):
    table = dry_run[dry_run.index("## Against float64") : dry_run.index("## Limits")]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    assert all(row.endswith("| yes |") for row in rows)


def test_ours_and_torch_are_timed(dry_run):
    table = dry_run[dry_run.index("## Prefill") : dry_run.index("## Decode")]
    rows = {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in table.splitlines() if line.startswith("| ")}
    assert {"ours", "ours, attention alone", "torch math"} <= set(rows)
    assert all(float(rows[name][1]) > 0 for name in ("ours", "ours, attention alone", "torch math"))


def test_a_dry_run_says_that_its_times_mean_nothing(dry_run):
    assert "the times mean nothing" in dry_run


def test_without_a_gpu_it_says_so():
    done = run(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "PyTorch sees no CUDA device" in done.stderr
