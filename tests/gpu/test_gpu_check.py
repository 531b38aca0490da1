"""The script for a GPU runs from end to end in small, so that it is ready when there is one."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**settings, **environment})


def rows_of(text, heading):
    """The rows of the table below a heading, by their first cell."""
    table = text[text.index(heading) :].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    return {f"{row[0]} {row[1]}" if "float64" in heading else row[0]: row for row in rows}


def test_a_dry_run_does_everything_in_small(tmp_path):
    out = tmp_path / "table.md"
    done = run("--dry-run", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    text = out.read_text(encoding="utf-8")
    assert "the times mean nothing" in text
    checks = rows_of(text, "## Against float64")
    assert len(checks) == 8
    assert all(row[-1] == "yes" for row in checks.values())
    for heading in ("## Limits", "## Prologue", "## Prefill, S = 5", "## Decode, B = 2, 9 cached", "## Notes"):
        assert heading in text
    prefill = rows_of(text, "## Prefill")
    assert {"ours", "ours, attention alone", "torch math"} <= set(prefill)
    assert all(float(prefill[name][1]) > 0 for name in ("ours", "ours, attention alone", "torch math"))


def test_without_a_gpu_it_says_so():
    done = run(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "PyTorch sees no CUDA device" in done.stderr
