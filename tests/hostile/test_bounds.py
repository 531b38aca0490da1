"""Time and memory stay within bounds: small files hold the growth in every run, the full sizes are slow.

Counted is processor time, which other work on the machine does not change much.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time

import onnx
import pytest

import qknorm_onnx as qk
from qknorm_onnx.graph.model_file import load_model
from qknorm_onnx.inspection import inspect_model
from tests.hostile.large_files import KINDS, one_weight

DOORS = {"fuse": qk.fuse, "inspect": inspect_model, "create_session": qk.create_session}

# Linear work takes 4 times as long for 4 times the nodes, quadratic work 16 times.
GROWTH = 4
MOST_GROWTH = 8.0
TRIES = 3  # other work on the machine makes a run longer, never shorter

SECONDS = {10_000: 10.0, 100_000: 60.0}

PEAK = """
import re, sys
import onnx_ir, onnxruntime
import qknorm_onnx as qk
import qknorm_onnx.graph.passes.prepare, qknorm_onnx.runtime.session
from qknorm_onnx.inspection import inspect_model
doors = {
    "fuse": qk.fuse,
    "inspect": inspect_model,
    "create_session": qk.create_session,
    "onnxruntime": lambda path: onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]),
}
doors[sys.argv[2]](sys.argv[1])
print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read()).group(1))
"""


def seconds(call, model: onnx.ModelProto) -> float:
    """Processor time, without the collector: it looks through all that the test run holds, more often the more is made."""
    gc.collect()
    gc.disable()
    try:
        began = time.process_time()
        call(model)
        return time.process_time() - began
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nested_functions"])
def test_time_grows_with_the_nodes_and_not_with_their_square(kind):
    small, large = KINDS[kind](400), KINDS[kind](400 * GROWTH)
    seconds(qk.fuse, small)  # what is imported and built once
    limit = MOST_GROWTH * max(0.02, min(seconds(qk.fuse, small) for _ in range(2)))
    assert any(seconds(qk.fuse, large) < limit for _ in range(TRIES))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nested_functions"])
def test_reading_grows_with_the_nodes_and_not_with_their_square(kind):
    """Reading alone is a small part of all, in which growth would be hidden."""
    small, large = KINDS[kind](1500), KINDS[kind](1500 * GROWTH)
    limit = MOST_GROWTH * max(0.01, min(seconds(load_model, small) for _ in range(2)))
    assert any(seconds(load_model, large) < limit for _ in range(TRIES))


def test_functions_nested_twelve_deep_stay_within_their_time():
    assert seconds(qk.fuse, KINDS["nested_functions"](8190)) < SECONDS[10_000]


@pytest.mark.slow
@pytest.mark.parametrize("count", SECONDS)
@pytest.mark.parametrize("kind", KINDS)
def test_files_of_the_full_size_stay_within_their_time(kind, count):
    model = KINDS[kind](count)
    for door, call in DOORS.items():
        assert seconds(call, model) < SECONDS[count], door


def peak_bytes(path, door: str = "fuse") -> int:
    """The most memory of a process that opens the file; what its parent had does not count, as in ru_maxrss it would."""
    done = subprocess.run([sys.executable, "-c", PEAK, str(path), door], capture_output=True, text=True, check=True)
    return int(done.stdout) * 1024


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("rank", [1, 2])
def test_memory_is_a_gigabyte_and_three_times_the_file(tmp_path, rank):
    path = tmp_path / "model.onnx"
    onnx.save(one_weight(100, rank), path)
    # Libraries take some 130 MB of it; a weight is to be in memory three times at most.
    assert peak_bytes(path) < 200e6 + 3 * path.stat().st_size


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("kind", KINDS)
def test_memory_of_many_nodes(tmp_path, kind):
    path = tmp_path / "model.onnx"
    onnx.save(KINDS[kind](100_000), path)
    bound = 1e9 + 3 * path.stat().st_size
    assert peak_bytes(path, "fuse") < bound
    assert peak_bytes(path, "inspect") < bound
    # onnxruntime's own session takes what it takes: nothing of ours is to stand beside it.
    assert peak_bytes(path, "create_session") < max(bound, 1.05 * peak_bytes(path, "onnxruntime"))
