"""README, documents and files as a whole: links lead somewhere, nothing names a machine."""

from __future__ import annotations

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("qknorm_onnx", "export", "custom_ops", "tests", "docs", "examples", "benchmarks", "tools", "requirements", ".ci")
TEXT = {".py", ".md", ".toml", ".txt", ".h", ".cc", ".cpp", ".cuh", ".json", ".lds", ".cmake", ""}

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# Folders of one machine; a path below one of them in a file means nothing to anybody else.
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home|Users|opt|mnt|scratch)/[\w.-]+")


def text_files() -> list[pathlib.Path]:
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix in TEXT]
    at_top = [path for path in ROOT.iterdir() if path.is_file() and path.suffix in TEXT and path.name != ".git"]  # of a worktree
    found = [path for path in (*at_top, *inside) if "__pycache__" not in path.parts]
    assert len(found) > 40
    return found


def documents() -> list[pathlib.Path]:
    return [path for path in text_files() if path.suffix == ".md"]


def name_of(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", documents(), ids=name_of)
def test_links_lead_somewhere(path: pathlib.Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in LINK.findall(text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked), target


def anchors(path: pathlib.Path) -> set[str]:
    """The anchors of a document's headings, as code forges make them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_no_file_names_a_machine() -> None:
    found = {name_of(path): MACHINE_PATH.findall(path.read_text(encoding="utf-8", errors="ignore")) for path in text_files()}
    assert not {name: paths for name, paths in found.items() if paths}


def test_the_readme_starts_with_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first_block = text[text.index("```") : text.index("```", text.index("```") + 3)]
    assert "make demo" in first_block
    assert "make test" in first_block


def test_pinned_requirements_are_exact() -> None:
    for path in (ROOT / "requirements").glob("*.txt"):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith(("#", "-r "))]
        assert lines
        assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[\w.]+", line) for line in lines), path.name
