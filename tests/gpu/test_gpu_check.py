"""The script for a GPU runs from end to end in small, so that it is ready when there is one."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch

from benchmarks.gpu_cases import relative_error
from benchmarks.gpu_launcher import Workspace
from benchmarks.gpu_report import Bar, Report
from benchmarks.gpu_session import copies

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"
ON_STAND_IN = ROOT / "tests" / "gpu" / "gpu_check_on_stand_in.py"


def run(script: pathlib.Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**settings, **environment})


def rows_of(report: dict, title: str) -> list[list[str]]:
    (table,) = [table for table in report["tables"] if table["title"] == title]
    return table["rows"]


def test_a_dry_run_does_everything_in_small(tmp_path):
    """With a pack over the stand-in driver: every step, both tables of comparisons, both ways of ours in each table of times."""
    out = tmp_path / "table.md"
    done = run(ON_STAND_IN, str(tmp_path), "", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    assert "the times mean nothing" in report["facts"]["device"]
    assert report["facts"]["kernel pack"].endswith("images, compiled by Triton 3.8.0")
    for title in ("The kernel pack against float64", "PyTorch's kernels against float64"):
        rows = rows_of(report, title)
        assert len(rows) == 8
        assert all(row[-1] == "yes" for row in rows)
    assert int(done.stdout.splitlines()[-1].removeprefix("launches: ")) >= 8 * 2  # of the comparisons alone
    for title in ("Prefill, S = 5", "Decode, B = 2, 9 cached"):
        times = {row[0]: row[1] for row in rows_of(report, title)}
        assert all(float(times[way]) > 0 for way in ("ours, kernel pack", "ours", "torch math"))
    assert [row[2] for row in rows_of(report, "Session: our nodes")] == ["CPUExecutionProvider"] * 2
    assert rows_of(report, "Session of two layers against float64")[0][-1] == "yes"
    assert report["failures"] == report["notes"] == []
    assert {bar["name"].partition(":")[0] for bar in report["bars"]} >= {"prefill, S = 5", "decode, B = 2, 9 cached"}
    text = out.read_text(encoding="utf-8")
    assert all(f"## {table['title']}" in text for table in report["tables"])
    assert "## Bars" in text


def test_a_pack_that_does_not_run_is_a_failure(tmp_path):
    done = run(ON_STAND_IN, str(tmp_path), "cuLaunchKernel", "--only", "pack", "--out", str(tmp_path / "table.md"))
    assert done.returncode == 1
    assert "cuLaunchKernel of prepare" in done.stdout
    report = json.loads((tmp_path / "table.json").read_text(encoding="utf-8"))
    assert len(report["failures"]) == 9  # the comparisons, and what comes after them
    assert all(row[-1] == "NO" for row in rows_of(report, "The kernel pack against float64"))


def test_a_pack_that_is_named_and_missing_is_a_failure(tmp_path):
    done = run(SCRIPT, "--dry-run", "--only", "limits", "--pack", str(tmp_path))
    assert done.returncode == 1
    assert "kernel pack: not checked" in done.stdout


def test_without_a_gpu_it_says_so():
    done = run(SCRIPT, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "PyTorch sees no CUDA device" in done.stderr


def test_the_time_is_kept(tmp_path):
    done = run(SCRIPT, "--dry-run", "--seconds", "-1", "--out", str(tmp_path / "table.md"))
    assert done.returncode == 0
    assert "limits: not run, the -1 seconds were over" in done.stdout


def test_wrong_results_do_not_pass():
    truth = np.array([1.0, 2.0])
    assert relative_error(torch.tensor([1.0, 2.2]), truth) == pytest.approx(0.1)
    assert not relative_error(torch.tensor([1.0, float("nan")]), truth) <= 1.0


def test_bars():
    assert Bar(name="speed", value=1.0, wanted=1.0).met
    assert not Bar(name="speed", value=0.99, wanted=1.0).met
    assert Bar(name="cost", value=1.02, wanted=1.03, at_most=True).met
    assert not Bar(name="cost", value=float("nan"), wanted=1.03, at_most=True).met
    report = Report(facts={})
    report.bar("share", 0.5, 0.55)
    assert "| share | 0.500 | >= 0.55 | NO |" in report.markdown()
    assert json.loads(report.json())["bars"] == [{"name": "share", "value": 0.5, "wanted": 0.55, "at_most": False, "met": False}]


def test_copies_between_host_and_device_are_counted():
    assert copies({"MatMul": 8, "MemcpyFromHost": 2, "MemcpyToHost": 1}) == 3
    assert copies({"MatMul": 8}) == 0


def test_workspace_is_given_back():
    workspace = Workspace("cpu")
    address = workspace.struct.allocate(None, 64)
    assert address
    workspace.struct.release(None, address)
    assert not workspace._blocks
    assert not workspace.struct.allocate(None, 1 << 62)
