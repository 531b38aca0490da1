"""`examples/ci`: a repository whose own tests are green, and red where the model or the way to the file drops a norm."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

# Where each test of the repository is reported, and the reports of pytest are read.
PARITY = "test_the_file_computes_what_the_model_computes"
NORMS = "test_every_attention_has_both_norms"


@pytest.fixture
def repository(repo_root, tmp_path):
    """A copy of it, which a test may damage."""
    return shutil.copytree(repo_root / "examples" / "ci", tmp_path / "repository", ignore=shutil.ignore_patterns("__pycache__"))


def run_tests(repository, *options):
    """Its pytest, in a process of its own as its CI runs it; the outcome of each test by name, and all that was printed."""
    own = {"PYTEST_CURRENT_TEST", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"}
    environment = {name: value for name, value in os.environ.items() if name not in own}
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:randomly", *options]
    done = subprocess.run(
        command, cwd=repository, env=environment | {"COLUMNS": "80"}, capture_output=True, text=True, timeout=900, check=False
    )
    outcomes = dict(re.findall(r"::(\w+) (PASSED|FAILED|ERROR)", done.stdout))
    return done.returncode, outcomes, done.stdout + done.stderr


def change(path, before, after):
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, f"{before!r} is {text.count(before)} times in {path.name}"
    path.write_text(text.replace(before, after), encoding="utf-8")


def report_in(folder):
    (path,) = folder.glob("*.json")
    assert path.stem == f"tests-test_export-{PARITY}"
    assert path.with_suffix(".txt").read_text(encoding="utf-8").strip()
    return json.loads(path.read_text(encoding="utf-8"))


def test_it_is_green_as_it_is(repository):
    code, outcomes, printed = run_tests(repository, "--qknorm-report", "reports")
    assert (code, outcomes) == (0, {PARITY: "PASSED", NORMS: "PASSED"}), printed
    report = report_in(repository / "reports")
    assert report["passed"]
    assert report["dtypes"] == ["float32", "float16"]


def test_it_is_red_where_the_export_drops_a_norm(repository):
    dropped = "    copy = deepcopy(model).eval()\n    copy.blocks[1].key_norm = torch.nn.Identity()\n    return copy\n"
    change(repository / "export.py", "    return deepcopy(model).eval()\n", dropped)
    code, outcomes, printed = run_tests(repository, "--qknorm-report", "reports")
    assert (code, outcomes) == (1, {PARITY: "FAILED", NORMS: "FAILED"}), printed
    report = report_in(repository / "reports")
    assert not report["passed"]
    failure = printed[printed.index(f"_ {PARITY} _") : printed.index(f"_ {NORMS} _")]
    assert "float32: " in failure
    assert "everything is in reports" in failure
    assert len(failure.splitlines()) < 15  # quiet: not a line for each case
    assert "where" in failure and "is allowed" in failure


@pytest.mark.slow
def test_it_is_red_where_the_model_drops_a_norm(repository):
    """File and model agree then; who asks for the norms by name sees it."""
    change(repository / "model.py", "        k = self.key_norm(k)\n", "")
    code, outcomes, printed = run_tests(repository)
    assert (code, outcomes) == (1, {PARITY: "PASSED", NORMS: "FAILED"}), printed


def test_a_file_in_the_place_of_the_folder_is_refused_before_anything_runs(repository):
    code, outcomes, printed = run_tests(repository, "--qknorm-report", "README.md")
    assert (code, outcomes) == (4, {})
    assert "--qknorm-report README.md: this is a file; give a folder" in printed
