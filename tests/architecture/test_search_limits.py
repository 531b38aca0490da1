"""The bounds of searches stand in one file, each below its reason, and every one of them bounds something."""

from __future__ import annotations

import pathlib
import re

GRAPH = pathlib.Path(__file__).resolve().parents[2] / "qknorm_onnx" / "graph"
LIMITS = GRAPH / "walk" / "limits.py"
ELSEWHERE = re.compile(r"^(?:MAX|SEARCH)_[A-Z_]+\b.*= *\d+", re.MULTILINE)


def limits() -> list[str]:
    return re.findall(r"^([A-Z_]+): Final = \d+(?:  # zoo \d+)?$", LIMITS.read_text(encoding="utf-8"), re.MULTILINE)


def test_there_are_no_others() -> None:
    found = {path.name: ELSEWHERE.findall(path.read_text(encoding="utf-8")) for path in GRAPH.rglob("*.py")}
    assert not {name: items for name, items in found.items() if items}, "put it into graph/walk/limits.py, with its reason"


def test_each_is_used() -> None:
    names = limits()
    assert len(names) > 15
    users = "\n".join(path.read_text(encoding="utf-8") for path in GRAPH.rglob("*.py") if path != LIMITS)
    assert not [name for name in names if not re.search(rf"\b{name}\b", users)]


def test_each_has_a_reason() -> None:
    paragraphs = LIMITS.read_text(encoding="utf-8").split("\n\n")
    without = [text for text in paragraphs if re.search(r"^[A-Z_]+: Final", text, re.MULTILINE) and not text.startswith("#")]
    assert not without, "say in a comment why a search ends there"
