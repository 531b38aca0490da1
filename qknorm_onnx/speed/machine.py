"""What the machine is and the most that it can do: the rate of a large matrix product, and of reading memory."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import onnx_ir as ir

import qknorm_onnx.custom_ops as custom_ops
from qknorm_onnx.runtime.session import import_onnxruntime
from qknorm_onnx.speed.onnx_contestants import OPSET, BoundSession
from qknorm_onnx.speed.timing import Clock, seconds_of
from qknorm_onnx.speed.torch_contestants import import_torch

MATMUL_SIZE: Final = 2048
READ_BYTES: Final = 512 << 20  # more than any cache
REPEATS: Final = 7
_CPU_INFO: Final = Path("/proc/cpuinfo")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Processor, versions and settings of one run. Load: processes that wanted to run in the minute before (its average)."""

    processor: str
    logical_cores: int
    instruction_set: str
    threads: int
    clock: str
    torch: str
    onnxruntime: str
    compiler: str
    load_before: float
    load_after: float = 0.0

    @property
    def was_busy(self) -> bool:
        """Whether other programs were running when it began."""
        return self.load_before > 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """`matmul_gflops`: float32 MatMul of three square matrices in ONNX Runtime. `read_gb_per_s`: reading a large array."""

    matmul_gflops: float
    read_gb_per_s: float
    matmul_size: int = MATMUL_SIZE


def describe(*, threads: int, clock: str) -> Machine:
    """The machine that runs this. Raises FileNotFoundError without a native library, InputError without torch or onnxruntime."""
    build = custom_ops.build_info()
    return Machine(
        processor=_processor(),
        logical_cores=os.cpu_count() or 1,
        instruction_set=build["instruction_set"],
        threads=threads,
        clock=clock,
        torch=import_torch().__version__,
        onnxruntime=import_onnxruntime().__version__,
        compiler=build["compiler"],
        load_before=load_average(),
    )


def load_average() -> float:
    """The load average of the last minute; 0 where the system has none."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def measure_limits(*, threads: int, clock: Clock, matmul_size: int = MATMUL_SIZE, read_bytes: int = READ_BYTES) -> Limits:
    """Both limits, each the best of several measurements."""
    return Limits(
        matmul_gflops=_matmul_gflops(matmul_size, threads, clock),
        read_gb_per_s=read_gb_per_s(read_bytes, threads=threads, clock=clock),
        matmul_size=matmul_size,
    )


def _matmul_gflops(size: int, threads: int, clock: Clock) -> float:
    header = f'<ir_version: 10, opset_import: ["" : {OPSET}]>'
    text = f"{header} product (float[n, k] A, float[k, m] B) => (float[n, m] Y) {{ Y = MatMul(A, B) }}"
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((size, size), dtype=np.float32) for name in ("A", "B")}
    session = BoundSession(ir.from_proto(onnx.parser.parse_model(text)), feeds, threads=threads)
    return 2e-9 * size**3 / _best_seconds(session.call, clock)


def read_gb_per_s(num_bytes: int, *, threads: int, clock: Clock) -> float:
    """The rate of reading an array again and again: one that fits into a cache is read from there.

    The faster of two loops: NumPy's maximum, a part of the array in each thread, and PyTorch's own.
    """
    array = np.zeros(num_bytes // 4, dtype=np.float32)
    array += 1  # writes every page: untouched ones all lie on the same page of zeros
    tensor = import_torch().from_numpy(array)
    if threads == 1:  # in this thread, whose processor time is what the clock shows
        best = min(_best_seconds(array.max, clock), _best_seconds(tensor.amax, clock))
    else:
        with ThreadPoolExecutor(threads) as pool:
            parts = np.array_split(array, threads)
            best = min(_best_seconds(lambda: list(pool.map(np.max, parts)), clock), _best_seconds(tensor.amax, clock))
    return 1e-9 * array.nbytes / best


def _best_seconds(call: Callable[[], object], clock: Clock) -> float:
    call()
    best = float("inf")
    for _ in range(REPEATS):
        best = min(best, seconds_of(call, clock))
    return best


def _processor() -> str:
    if _CPU_INFO.is_file():
        for line in _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
