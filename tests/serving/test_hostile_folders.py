"""Folders that are wrong in one way each: one line, exit 2, and nothing is left of what was to be written."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from qknorm_onnx.cli.main import run
from tests.hostile import seeds

CONFIG = "genai_config.json"
FILENAME = ("model", "decoder", "filename")
OPTIONS = ("model", "decoder", "session_options")
Damage = Callable[[Path], None]


def contents(*path: str, value: Any = None) -> dict[str, Any]:
    """A sound configuration; with what stands at `path` set to `value`."""
    decoder = {"filename": "model.onnx", "session_options": {}}
    model = {"context_length": 64, "eos_token_id": [1], "pad_token_id": 0, "decoder": decoder}
    whole: dict[str, Any] = {"model": model, "search": {}}
    place = whole
    for name in path[:-1]:
        place = place[name]
    if path:
        place[path[-1]] = value
    return whole


def holds(written: str, name: str = CONFIG) -> Damage:
    def write(folder: Path) -> None:
        (folder / name).write_text(written, encoding="utf-8")

    return write


def said(*path: str, value: Any) -> Damage:
    return holds(json.dumps(contents(*path, value=value)))


def nested(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "model.onnx").rename(folder / "sub" / "model.onnx")
    said(*FILENAME, value="sub/model.onnx")(folder)


def circle(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "up").symlink_to("..")


def pipe(folder: Path) -> None:
    (folder / "sub").mkdir()
    os.mkfifo(folder / "sub" / "pipe")


# what every door that opens a folder refuses
DAMAGED: dict[str, tuple[Damage, str]] = {
    "cut off": (holds(json.dumps(contents())[:40]), "is damaged"),
    "empty": (holds(""), "is damaged"),
    "a list": (holds("[]"), "holds no object but a list"),
    "nested 100,000 deep": (holds("[" * 100_000), "is damaged"),
    "an infinite context": (said("model", "context_length", value=float("inf")), "is damaged"),
    "an infinite end": (said("model", "eos_token_id", value=float("inf")), "is damaged"),
    "a list for the model": (said("model", value=[1]), "is damaged"),
    "a file of the folder above": (said(*FILENAME, value="../outside.onnx"), "leads out of the folder"),
    "an absolute file": (said(*FILENAME, value="/etc/hostname"), "leads out of the folder"),
    "a number for a file": (said(*FILENAME, value=5), "is damaged"),
    "a name of 5,000 letters": (said(*FILENAME, value="x" * 5000), "is damaged|is not there"),
    "a name with control characters": (said(*FILENAME, value="\x1b[31m\nm.onnx"), "is not there"),
    "a name with a zero": (said(*FILENAME, value="a\0b"), "is damaged|is not there"),
    "a list for config.json": (holds("[1]", "config.json"), r"config\.json is damaged"),
    "config.json cut off": (holds("{", "config.json"), r"config\.json is damaged"),
    "a number for text_config": (holds('{"text_config": 5}', "config.json"), "text_config is no object"),
}
# what only a copy of the folder meets
NOT_COPIED: dict[str, tuple[Damage, str]] = {
    "options are a list": (said(*OPTIONS, value=[]), "session_options is no object"),
    "options are null": (said(*OPTIONS, value=None), "session_options is no object"),
    "the model in a folder below": (nested, "put the model beside"),
    "links that lead in a circle": (circle, "is a link to a folder"),
    "a link to nothing": (lambda folder: (folder / "vocab.json").symlink_to("nowhere"), "a link to nothing"),
    "a pipe": (pipe, "is no file that can be copied"),
}


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "given"
    made.mkdir()
    onnx.save(seeds.spelled(), made / "model.onnx")
    onnx.save(seeds.spelled(), tmp_path / "outside.onnx")
    holds(json.dumps(contents()))(made)
    return made


def refused(capsys, arguments: list[str]) -> str:
    assert run(arguments) == 2
    message = capsys.readouterr().err.removesuffix("\n")
    assert message and message.isprintable(), f"not one line: {message!r}"
    return message


@pytest.mark.parametrize("door", ["fuse", "generate", "validate"])
@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_folder_is_refused_at_every_door(folder, kind, door, capsys):
    damage, expected = DAMAGED[kind]
    damage(folder)
    before = set(folder.parent.iterdir())
    rest = {"fuse": [str(folder.parent / "out")], "generate": ["hi"], "validate": [str(folder)]}[door]
    assert re.search(expected, refused(capsys, [door, str(folder), *rest]))
    assert set(folder.parent.iterdir()) == before, "nothing is written"


@pytest.mark.parametrize("kind", NOT_COPIED)
def test_what_cannot_be_copied_is_refused(folder, kind, capsys):
    damage, expected = NOT_COPIED[kind]
    damage(folder)
    before = set(folder.parent.iterdir())
    assert expected in refused(capsys, ["fuse", str(folder), str(folder.parent / "out")])
    assert set(folder.parent.iterdir()) == before, "nothing is written"


def test_a_folder_is_not_written_into_itself(folder, capsys):
    before = set(folder.iterdir())
    assert "lies inside" in refused(capsys, ["fuse", str(folder), str(folder / "sub" / "out")])
    assert set(folder.iterdir()) == before


def test_links_to_files_are_followed(folder, capsys):
    (folder.parent / "blob").write_text("{}")
    (folder / "tokenizer.json").symlink_to("../blob")
    assert run(["fuse", str(folder), str(folder.parent / "out")]) == 0, capsys.readouterr().err
    copied = folder.parent / "out" / "tokenizer.json"
    assert copied.read_text() == "{}" and not copied.is_symlink()


@pytest.mark.parametrize("written", ["{", "[]", "[" * 100_000])
def test_a_damaged_tokenizer_is_refused(folder, written, capsys):
    (folder / "tokenizer.json").write_text(written)
    assert "tokenizer.json cannot be read" in refused(capsys, ["generate", str(folder), "hi"])
