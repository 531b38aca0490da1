"""Builds a C++ test program with AddressSanitizer and UBSan, by the first compiler of a list."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def built(build: pathlib.Path, target: str, *, compilers: Sequence[str], options: Sequence[str], wanted: str) -> pathlib.Path:
    """The program `target`. Without a compiler a test is skipped, except in CI, where that is an error; `wanted` names it."""
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(f"CI needs {wanted}", pytrace=False)
        pytest.skip(f"there is no {wanted}")
    cmake = shutil.which("cmake", path=os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", "")]))
    assert cmake is not None, "cmake is in requirements/dev.txt"
    for command in (
        [cmake, "-S", str(ROOT), "-B", str(build), f"-DCMAKE_CXX_COMPILER={compiler}", "-DQKNORM_BUILD_TESTS=ON", *options],
        [cmake, "--build", str(build), "--target", target],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return build / "custom_ops" / "tests" / target
