"""Many models judged side by side, each in a process of its own: a list in YAML, and what became of each entry."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from qknorm_onnx.errors import InputError

# As options of `qknorm-onnx validate`, and what their values may be.
_OPTIONS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "dtypes": str,
    "seeds": int,
    "tolerance": (int, float),
    "inputs": str,
    "with-past": bool,
    "fail-fast": bool,
}
_PATHS: Final = ("model", "inputs")
_EXAMPLE: Final = "- {model: model.onnx, source: folder-or-module:factory, dtypes: float32}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListedModel:
    """One entry of a list: what `qknorm-onnx validate` is called with."""

    model: str
    source: str
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """The file's name, which reports are named by; `model.onnx` by its folder."""
        path = Path(self.model)
        return path.parent.name if path.stem == "model" and path.parent.name else path.stem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """`exit_code`: 0 passed, 1 failed, 2 could not be judged. `summary` says why in one line for each type."""

    entry: ListedModel
    exit_code: int
    summary: str


def read_list(path: Path) -> tuple[ListedModel, ...]:
    """The entries of a YAML file: a list of mappings with `model`, `source` and options of `qknorm-onnx validate` by name.

    Paths are relative to the file. `source` is one where it exists there, else the `package.module:factory` that it says.

    Raises:
        InputError: PyYAML is missing, the file is no such list, or an entry has a key or a value that is not known.
    """
    try:
        import yaml
    except ImportError as error:
        raise InputError("a list of models needs PyYAML; run: pip install pyyaml") from error
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as YAML ({error})") from error
    if not isinstance(found, list) or not found:
        raise InputError(f"{path}: holds no list of models; write one entry a line: {_EXAMPLE}")
    return tuple(_entry(item, f"{path}, entry {number}", path.parent) for number, item in enumerate(found, start=1))


def _entry(item: Any, where: str, folder: Path) -> ListedModel:
    if not isinstance(item, dict):
        raise InputError(f"{where}: is {item!r}; write it as {_EXAMPLE}")
    unknown = sorted(str(key) for key in item.keys() - {"model", "source", *_OPTIONS})
    if unknown:
        raise InputError(f"{where}: unknown {', '.join(unknown)}; known are model, source, {', '.join(_OPTIONS)}")
    for key in ("model", "source"):
        if not isinstance(item.get(key), str) or not item[key]:
            raise InputError(f"{where}: has no {key}; write it as {_EXAMPLE}")
    placed = {key: str(folder / item[key]) for key in _PATHS if isinstance(item.get(key), str)}
    source = str(folder / item["source"]) if (folder / item["source"]).exists() else item["source"]
    return ListedModel(model=placed["model"], source=source, arguments=tuple(_arguments({**item, **placed}, where)))


def _arguments(item: Mapping[str, Any], where: str) -> Iterator[str]:
    for key, kind in _OPTIONS.items():
        value = item.get(key)
        if value is None:
            continue
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise InputError(f"{where}: {key} is {value!r}; give what --{key} of `qknorm-onnx validate` takes")
        if value is True:
            yield f"--{key}"
        elif value is not False:
            yield from (f"--{key}", str(value))


def judge_many(
    entries: Sequence[ListedModel], *, jobs: int, html: Path | None = None, junit: Path | None = None
) -> Iterator[Judged]:
    """Each entry's outcome in the order in which they end, `jobs` at a time. Pages and JUnit files go to the folders given."""
    names = _distinct([entry.name for entry in entries])
    with concurrent.futures.ThreadPoolExecutor(max_workers=jobs) as pool:
        waiting = [pool.submit(_judge, entry, name, html, junit) for entry, name in zip(entries, names, strict=True)]
        for done in concurrent.futures.as_completed(waiting):
            yield done.result()


def _judge(entry: ListedModel, name: str, html: Path | None, junit: Path | None) -> Judged:
    files = [
        f"--{option}={folder / name}{ending}"
        for option, folder, ending in (("html", html, ".html"), ("junit-xml", junit, ".xml"))
        if folder is not None
    ]
    command = [sys.executable, "-m", "qknorm_onnx", "validate", entry.model, entry.source, *entry.arguments, *files, "--json"]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, encoding="utf-8")
    if ended.returncode in (0, 1):
        try:
            return Judged(entry=entry, exit_code=ended.returncode, summary=str(json.loads(ended.stdout)["summary"]))
        except (json.JSONDecodeError, KeyError):
            pass  # a process that died, or printed something else: what it said last is the best that is known
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    return Judged(entry=entry, exit_code=2, summary=lines[-1] if lines else f"ended with exit code {ended.returncode}")


def _distinct(names: Sequence[str]) -> list[str]:
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return found
