"""Every kind of reported case has its row in docs/cases.md, and the tests that it names exist."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| ([BC]\d\d) \| ([^|]+) \| ([^|]+) \|$", flags=re.MULTILINE)
ROWS = {
    kind: set(re.findall(r"`([^`]+)`", tests)) for kind, _, tests in ROW.findall((ROOT / "docs" / "cases.md").read_text("utf-8"))
}
KIND = re.compile(r"\b([BC]\d\d)\b")


def test_all_kinds_are_listed():
    assert len([kind for kind in ROWS if kind[0] == "B"]) == 36
    assert [kind for kind in ROWS if kind[0] == "C"] == [f"C{number:02}" for number in range(1, 29)]


@pytest.mark.parametrize("kind", [kind for kind, tests in ROWS.items() if tests])
def test_the_named_tests_exist(kind):
    for name in ROWS[kind]:
        path, _, function = name.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert not function or function in names, name
