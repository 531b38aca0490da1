"""The native library under test."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Iterator

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from kernel_call import NativeLibrary

from qknorm_onnx import custom_ops


@pytest.fixture(scope="session")
def library_file() -> pathlib.Path:
    """The shared library. Without it a test is skipped, except in CI, where that is an error."""
    try:
        return custom_ops.library_path()
    except FileNotFoundError as error:
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(f"CI needs the native library: {error}", pytrace=False)
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def library(library_file: pathlib.Path) -> NativeLibrary:
    """The library behind its plain C door."""
    return NativeLibrary(library_file)


@pytest.fixture(params=["portable", "avx2", "avx512"])
def kernels(request: pytest.FixtureRequest, library: NativeLibrary) -> Iterator[NativeLibrary]:
    """The kernels of each instruction set that this processor has."""
    before = library.instruction_set
    if not library.select(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield library
    library.select(before)
