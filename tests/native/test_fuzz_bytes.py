"""libFuzzer against the plain C door of the kernels, with AddressSanitizer and UBSan: a fixed budget, from nothing."""

from __future__ import annotations

import pathlib
import re
import subprocess

import pytest

from tests.native.sanitized_build import built

RUNS = 20_000
NAMES = ("clang++", *(f"clang++-{version}" for version in range(22, 13, -1)))


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    wanted = "clang++ with libFuzzer (Debian: clang, libclang-rt-dev)"
    return built(tmp_path_factory.mktemp("fuzz"), "fuzz_bytes", compilers=NAMES, options=["-DQKNORM_FUZZ=ON"], wanted=wanted)


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
