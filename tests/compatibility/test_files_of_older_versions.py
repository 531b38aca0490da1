"""Files that older versions wrote stay readable: they load, are inspected, fused again, and compute what they computed."""

from __future__ import annotations

import pathlib
from typing import Any, Final

import numpy as np
import pytest

import qknorm_onnx as qk
from qknorm_onnx.custom_ops import library_path
from qknorm_onnx.inspection import inspect_model

FOLDER: Final = pathlib.Path(__file__).parent
VERSIONS: Final = ("0.1.0",)
MODELS: Final = ("sliding_and_full", "two_streams", "with_cache")
TARGETS: Final = ("custom-op", "ort", "onnx", "primitive")
ATTENTIONS: Final = {"sliding_and_full": 2, "two_streams": 1, "with_cache": 2}
FILES: Final = [f"version-{version}/{model}.{target}.onnx" for version in VERSIONS for model in MODELS for target in TARGETS]


def stored(file: str, part: str) -> dict[str, Any]:
    """The arrays of one part, `in`, `float64` or `float32`, by the names of the graph."""
    path = FOLDER / file
    with np.load(path.with_name(f"{path.name.split('.')[0]}.npz")) as arrays:
        return {name.partition("/")[2]: arrays[name] for name in arrays.files if name.startswith(f"{part}/")}


def assert_as_stored(session: Any, file: str) -> None:
    """The error against PyTorch in float64 is at most twice PyTorch's own in float32, and 4 eps."""
    exact, own = stored(file, "float64"), stored(file, "float32")
    assert [output.name for output in session.get_outputs()] == list(exact)
    outputs = session.run(None, stored(file, "in"))
    for (name, truth), output in zip(exact.items(), outputs, strict=True):
        assert output.shape == truth.shape and output.dtype == np.float32
        size = np.abs(truth).max()
        allowed = 2 * np.abs(own[name] - truth).max() / size + 4 * np.finfo(np.float32).eps
        assert np.abs(output - truth).max() / size <= allowed, name


def test_every_file_is_read() -> None:
    assert sorted(FILES) == sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.onnx"))


@pytest.mark.parametrize("file", FILES)
def test_an_older_file_runs(file: str) -> None:
    assert_as_stored(qk.create_session(FOLDER / file, native_kernels=False), file)
    assert library_path() is not None, "the native kernels are not built: make install"
    assert_as_stored(qk.create_session(FOLDER / file, native_kernels=True), file)


@pytest.mark.parametrize("file", FILES)
def test_an_older_file_is_inspected(file: str) -> None:
    found = inspect_model(FOLDER / file)
    assert len(found.present.fused) == ATTENTIONS[file.split("/")[1].split(".")[0]]
    assert not found.present.declined and not found.present.refused and not found.recognised.fused
    # Another target is another spelling of the same meaning.
    canonical = inspect_model(FOLDER / f"{file.rsplit('.', 2)[0]}.custom-op.onnx")
    assert {item.spec for item in found.present.fused} == {item.spec for item in canonical.present.fused}


@pytest.mark.parametrize("file", FILES)
def test_an_older_file_is_fused_again(file: str) -> None:
    target = file.rsplit(".", 2)[1]
    program = qk.fuse(FOLDER / file, target=target, require_fusion=True)
    assert len(program.report.fused) == ATTENTIONS[file.split("/")[1].split(".")[0]]
    assert_as_stored(qk.create_session(program), file)
