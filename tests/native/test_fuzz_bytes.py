"""libFuzzer against the plain C door of the kernels, with AddressSanitizer and UBSan: a fixed budget, from nothing."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
RUNS = 20_000
NAMES = ("clang++", *(f"clang++-{version}" for version in range(22, 13, -1)))


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The fuzzer, built by clang. Without one a test is skipped, except in CI, where that is an error."""
    compiler = next(filter(None, map(shutil.which, NAMES)), None)
    if compiler is None:
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail("CI needs clang++ with libFuzzer (Debian: clang, libclang-rt-dev)", pytrace=False)
        pytest.skip("no clang++, and only clang has libFuzzer")
    build = tmp_path_factory.mktemp("fuzz")
    cmake = shutil.which("cmake", path=os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", "")]))
    assert cmake is not None, "cmake is in requirements/dev.txt"
    options = [f"-DCMAKE_CXX_COMPILER={compiler}", "-DQKNORM_BUILD_TESTS=ON", "-DQKNORM_FUZZ=ON"]
    for command in (
        [cmake, "-S", str(ROOT), "-B", str(build), *options],
        [cmake, "--build", str(build), "--target", "fuzz_bytes"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return build / "custom_ops" / "tests" / "fuzz_bytes"


@pytest.mark.slow
def test_no_call_reads_or_writes_beyond_its_buffers(fuzzer, tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    limits = [f"-runs={RUNS}", "-seed=1", "-max_len=256", "-timeout=20", "-rss_limit_mb=2048"]
    command = [str(fuzzer), *limits, f"-artifact_prefix={tmp_path}/", str(corpus)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"Done {RUNS} runs" in done.stderr
    covered = [int(count) for count in re.findall(r" cov: (\d+)", done.stderr)]
    assert covered[-1] > 2 * covered[0], "the bytes do not decide what is called"
