"""Sizes and names that keep the code readable; the numbers are in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ("qknorm_onnx", "export", "custom_ops")
FOLDERS = (*PACKAGE, "tests", "docs", "examples", "benchmarks", "tools")

MAX_PYTHON_LINES = 400
MAX_FUNCTION_LINES = 40
MAX_CPP_LINES = 500
FORBIDDEN_STEMS = {"utils", "util", "helpers", "helper", "common", "misc", "core", "base", "manager"}
UNFINISHED = re.compile(rf"\b({'|'.join(('TO' + 'DO', 'FIX' + 'ME', 'XX' + 'X'))})\b")


def sources(*suffixes: str, folders: tuple[str, ...] = FOLDERS) -> list[pathlib.Path]:
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    return [path for path in found if "__pycache__" not in path.parts and "generated" not in path.parts]


def name_of(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its decorators and its docstring."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    docstring = function.body[0]
    assert docstring.end_lineno is not None
    return lines - (docstring.end_lineno - docstring.lineno + 1)


def test_there_is_something_to_measure() -> None:
    assert len(sources(".py", folders=PACKAGE)) > 20
    assert len(sources(".py", folders=("tests",))) > 10


@pytest.mark.parametrize("path", sources(".py"), ids=name_of)
def test_python_files_are_short(path: pathlib.Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_PYTHON_LINES


@pytest.mark.parametrize("path", sources(".py", folders=PACKAGE), ids=name_of)
def test_functions_are_short(path: pathlib.Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    too_long = {function.name: code_lines(function) for function in functions if code_lines(function) > MAX_FUNCTION_LINES}
    assert not too_long


def test_cpp_files_are_short() -> None:
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in sources(".h", ".cc", ".cpp", ".cuh")}
    assert not {name: lines for name, lines in lengths.items() if lines > MAX_CPP_LINES}


def test_file_names_tell_what_is_in_them() -> None:
    assert not [name_of(path) for path in sources(".py", ".h", ".cc", ".cpp") if path.stem.lower() in FORBIDDEN_STEMS]


def test_nothing_is_left_unfinished() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in sources(".py", ".h", ".cc", ".cpp", ".md")}
    assert not [name_of(path) for path, text in texts.items() if UNFINISHED.search(text)]


def test_test_modules_have_names_of_their_own() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))
