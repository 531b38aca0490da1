"""What a public repository needs: licence, one version, workflows that pass a linter, every test folder in a session."""

from __future__ import annotations

import ast
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
from typing import Any

import pytest

import qknorm_onnx as qk

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
IN_CI = os.environ.get("CI", "").lower() in ("1", "true")


def project() -> dict[str, Any]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return dict(settings["project"])


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_version_is_the_same_everywhere() -> None:
    cited = re.search(r"^version: (\S+)$", text_of("CITATION.cff"), flags=re.MULTILINE)
    assert cited is not None and cited.group(1) == project()["version"] == qk.__version__
    assert re.search(rf"^## {re.escape(qk.__version__)}\b", text_of("CHANGELOG.md"), flags=re.MULTILINE)


def test_the_licence_is_the_same_everywhere() -> None:
    assert project()["license"] == "Apache-2.0" and project()["license-files"] == ["LICENSE"]
    assert "license: Apache-2.0" in text_of("CITATION.cff")
    licence = text_of("LICENSE")
    assert "Version 2.0, January 2004" in licence and "END OF TERMS AND CONDITIONS" in licence
    assert [f"{number}. " for number in range(1, 10) if f"\n   {number}. " not in licence] == []


def test_python_is_the_same_everywhere() -> None:
    oldest = project()["requires-python"].removeprefix(">=")
    settings = tomllib.loads(text_of("pyproject.toml"))["tool"]
    assert settings["mypy"]["python_version"] == oldest
    assert settings["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
    named = [line.rpartition(" ")[2] for line in project()["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert named[0] == oldest
    for name in ("README.md", "CONTRIBUTING.md", "Makefile"):
        assert f"Python >= {oldest}" in text_of(name), name


def test_every_test_folder_is_in_a_session_of_nox() -> None:
    texts = {node.value for node in ast.walk(ast.parse(text_of("noxfile.py"))) if isinstance(node, ast.Constant)}
    folders = {f"tests/{path.parent.relative_to(ROOT / 'tests').parts[0]}" for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(folders) > 8
    assert folders <= texts, f"in no session of noxfile.py: {sorted(folders - texts)}"


def test_workflows_name_folders_that_exist() -> None:
    assert len(WORKFLOWS) == 2
    for path in WORKFLOWS:
        named = re.findall(r"\btests/\w+", path.read_text(encoding="utf-8"))
        assert named
        assert [folder for folder in named if not (ROOT / folder).is_dir()] == []


def test_workflows_pass_the_linter() -> None:
    """Script injection, permissions, pins: zizmor, without a network."""
    linter = shutil.which("zizmor", path=f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if linter is None:
        if IN_CI:
            pytest.fail("zizmor is not installed; it is pinned in requirements/dev.txt: make install", pytrace=False)
        pytest.skip("zizmor is not installed")
    command = [linter, "--offline", "--persona", "pedantic", "--quiet", "--no-progress", ".github/workflows"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
