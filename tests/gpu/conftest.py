"""Makes Triton interpret kernels before a test module imports it, and offers the stand-in driver."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from tests.gpu import interpreter

interpreter.start()

from tests.gpu.fake_pack import write_fake_pack  # noqa: E402
from tests.gpu.stand_in_driver import StandInDriver, build_stand_in  # noqa: E402


@pytest.fixture(scope="session")
def fake_pack(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A pack of every image for sm_80, 90 and 100 whose files hold names instead of code."""
    folder = tmp_path_factory.mktemp("cuda_kernels")
    write_fake_pack(folder, capabilities=(80, 90, 100))
    return folder


@pytest.fixture(scope="session")
def stand_in_library(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The stand-in libcuda, compiled."""
    return build_stand_in(tmp_path_factory.mktemp("stand_in"))


@pytest.fixture
def driver(fake_pack: pathlib.Path, stand_in_library: pathlib.Path) -> Iterator[StandInDriver]:
    """A stand-in for an H200 with the fake pack, and one current context."""
    stand_in = StandInDriver(stand_in_library, pack=fake_pack)
    yield stand_in
    stand_in.close()
