"""Random calls of the kernels' C door, built with AddressSanitizer and UBSan by any compiler: the fixed budget of every run.

`test_fuzz_bytes.py` goes further where there is clang: its libFuzzer looks for the calls by coverage.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
CALLS = 4000


@pytest.fixture(scope="module")
def random_calls(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The program, built. Without a compiler a test is skipped, except in CI, where that is an error."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail("CI needs a C++ compiler", pytrace=False)
        pytest.skip("there is no C++ compiler")
    build = tmp_path_factory.mktemp("sanitized")
    cmake = shutil.which("cmake", path=os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", "")]))
    assert cmake is not None, "cmake is in requirements/dev.txt"
    options = [f"-DCMAKE_CXX_COMPILER={compiler}", "-DQKNORM_BUILD_TESTS=ON", "-DQKNORM_SANITIZE=ON"]
    for command in (
        [cmake, "-S", str(ROOT), "-B", str(build), *options],
        [cmake, "--build", str(build), "--target", "fuzz_kernels"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return build / "custom_ops" / "tests" / "fuzz_kernels"


def test_random_calls_stay_within_their_buffers(random_calls: pathlib.Path) -> None:
    done = subprocess.run([str(random_calls), str(CALLS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert f"{CALLS} passed, 0 failed" in done.stdout
