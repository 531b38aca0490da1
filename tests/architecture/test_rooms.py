"""Folders of the package as rooms: few files side by side, a sentence at each door, and no circle between them."""

from __future__ import annotations

import ast
import pathlib
import tomllib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MAX_FILES = 15


def package_files() -> dict[str, pathlib.Path]:
    """Module name -> file, as installed."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found = {}
    for installed, folder in settings["tool"]["scikit-build"]["wheel"]["packages"].items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = pathlib.PurePosixPath(installed, path.relative_to(ROOT / folder).as_posix()).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


FILES = package_files()


def room_of(module: str) -> str:
    """The folder of a module, by its installed name."""
    return module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]


def imports_of(module: str) -> Iterator[str]:
    """Modules of the package that `module` imports, wherever in the file."""
    for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in FILES else node.module for name in inside if name in FILES or node.module in FILES)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)


def arrows() -> dict[str, set[str]]:
    """Room -> rooms that its files import. The root re-exports everything, so that it is no room of its own."""
    found: dict[str, set[str]] = {}
    for module in FILES:
        here = room_of(module)
        targets = {room_of(target) for target in imports_of(module)} - {here, "qknorm_onnx"}
        if here != "qknorm_onnx":
            found.setdefault(here, set()).update(targets)
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Rooms that import each other in a circle, the first one that a walk meets; empty if there is none."""
    done: set[str] = set()

    def walk(room: str, path: list[str]) -> list[str]:
        if room in path:
            return [*path[path.index(room) :], room]
        if room in done:
            return []
        for target in sorted(graph.get(room, ())):
            if found := walk(target, [*path, room]):
                return found
        done.add(room)
        return []

    return next((found for room in sorted(graph) if (found := walk(room, []))), [])


def rooms() -> list[str]:
    """All folders of the package that hold Python files."""
    return sorted({room_of(module) for module in FILES})


@pytest.mark.parametrize("room", rooms())
def test_few_files_side_by_side(room: str) -> None:
    files = [FILES[module].name for module in FILES if room_of(module) == room]
    assert len(files) <= MAX_FILES, "split the folder by meaning"


@pytest.mark.parametrize("room", rooms())
def test_each_room_says_what_lives_there(room: str) -> None:
    document = ast.get_docstring(ast.parse(FILES[room].read_text(encoding="utf-8")))
    assert document
    assert document.splitlines()[0].endswith((".", ":")) or "\n" in document


def test_there_is_no_circle_between_rooms() -> None:
    graph = arrows()
    assert len(graph) > 15
    assert sum(map(len, graph.values())) > 30
    assert not circle(graph)


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c", "b"]
