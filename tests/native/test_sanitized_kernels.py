"""Random calls of the kernels' C door, built with AddressSanitizer and UBSan by any compiler: the fixed budget of every run.

`test_fuzz_bytes.py` goes further where there is clang: its libFuzzer looks for the calls by coverage.
"""

from __future__ import annotations

import pathlib
import subprocess

import pytest

from tests.native.sanitized_build import built

CALLS = 4000
COMPILERS = ("c++", "g++", "clang++")


@pytest.fixture(scope="module")
def random_calls(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    build = tmp_path_factory.mktemp("sanitized")
    return built(build, "fuzz_kernels", compilers=COMPILERS, options=["-DQKNORM_SANITIZE=ON"], wanted="C++ compiler")


def test_random_calls_stay_within_their_buffers(random_calls: pathlib.Path) -> None:
    done = subprocess.run([str(random_calls), str(CALLS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert f"{CALLS} passed, 0 failed" in done.stdout
