"""English text that every Python installation brings along, split into training and held-out text.

Sources, all distributed with CPython under the PSF licence: the language reference's topics (`pydoc_data/topics.py`),
the docstrings of the standard library (read with `ast`; nothing is imported), and `LICENSE.txt` where it is installed.
The text depends on the Python version alone; `Corpus.sha256` tells two of them apart.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from byte_text import DOCUMENT_MARK, encode

HELD_OUT_SHARE = 1 / 20
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "turtledemo"}
)


@dataclass(frozen=True)
class Corpus:
    """Token ids (bytes, documents opened by the document mark) and the digest of both parts."""

    training: bytes
    held_out: bytes
    sha256: str


def read_corpus() -> Corpus:
    """Read the text of the running Python; whole documents are held out, and no paragraph occurs in both parts.

    Raises FileNotFoundError if this Python was installed without its library sources or without `pydoc_data`.
    """
    parts: dict[bool, bytearray] = {True: bytearray(), False: bytearray()}
    seen: set[str] = set()
    for name, text in _documents(Path(sysconfig.get_path("stdlib"))):
        paragraphs = [p for p in _paragraphs(text) if p not in seen]
        if paragraphs:
            seen.update(paragraphs)
            parts[_is_held_out(name)] += bytes([DOCUMENT_MARK, *encode("\n\n".join(paragraphs) + "\n")])
    training, held_out = bytes(parts[False]), bytes(parts[True])
    return Corpus(training, held_out, hashlib.sha256(training + held_out).hexdigest())


def _documents(library: Path) -> Iterator[tuple[str, str]]:
    topics = library / "pydoc_data" / "topics.py"
    if not topics.is_file():
        raise FileNotFoundError(f"{topics} is missing; install Python with its standard library's sources")
    yield from sorted(_topics(topics).items())
    licence = library / "LICENSE.txt"
    if licence.is_file():
        yield "LICENSE.txt", licence.read_text(encoding="utf-8")
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if not _SKIPPED_FOLDERS.intersection(relative.parts):
            yield relative.as_posix(), "\n\n".join(_docstrings(path))


def _topics(path: Path) -> dict[str, str]:
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "topics":
            found: dict[str, str] = ast.literal_eval(statement.value)
            return found
    raise FileNotFoundError(f"{path} holds no `topics` dictionary; this Python version is not known to the example")


def _docstrings(path: Path) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old library files are not our business
        tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield text


def _paragraphs(text: str) -> list[str]:
    lines = [line.expandtabs().rstrip() for line in text.replace("\0", "").splitlines()]
    return [p.strip("\n") for p in re.split(r"\n{2,}", "\n".join(lines)) if p.strip()]


def _is_held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] < 256 * HELD_OUT_SHARE
