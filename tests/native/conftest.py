"""The native library under test."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from kernel_call import NativeLibrary

from tests.native.installed_library import installed_file


@pytest.fixture(scope="session")
def library_file() -> pathlib.Path:
    return installed_file()


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
