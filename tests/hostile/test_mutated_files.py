"""Mutated files end in a pass or in one line of a check that foresaw them; a few in every run, many by `try_mutated_files`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import hypothesis
from hypothesis import strategies

from tests.hostile.mutation import write_mutated
from tests.hostile.probe import DOORS, outcome


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)  # the same files in every run: new ones are tried by hand
@hypothesis.given(number=strategies.integers(0, 10**9))
def test_mutated_files_end_in_a_pass_or_in_one_line(number):
    with tempfile.TemporaryDirectory() as folder:
        path = write_mutated(number, Path(folder))
        for door in DOORS:
            verdict, detail = outcome(door, path)
            assert verdict in ("passed", "refused"), (door, detail)
        assert {file.name for file in Path(folder).iterdir()} <= {"model.onnx", "weights.data"}
