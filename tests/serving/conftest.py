"""Folders of tiny decoders, each exported once."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import qknorm_onnx as qk
from tests.serving.tiny_models import DOCUMENT, SECOND_END, write_folder


@dataclasses.dataclass(frozen=True)
class Exported:
    """`source` is the Hugging Face folder, `folder` ours."""

    model: Any
    source: Path
    folder: Path
    program: qk.Program


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """(family, further options of export_folder) -> what it became, made once."""
    made = {}

    def export(family, **options):
        key = (family, *sorted(options.items()))
        if key not in made:
            place = tmp_path_factory.mktemp(f"{family} served")  # a path with a space
            model = write_folder(family, place / "hf", ends=[DOCUMENT, SECOND_END], shard="60KB")
            program = qk.export_folder(place / "hf", place / "out", **options)
            made[key] = Exported(model, place / "hf", place / "out", program)
        return made[key]

    return export
