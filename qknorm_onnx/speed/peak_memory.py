"""The peak of memory during one call of the native kernel, over its inputs and outputs.

Measured in a process of its own: `python -m qknorm_onnx.speed.peak_memory` reads a case's id and prints bytes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from qknorm_onnx.speed.cases import MemoryCase, full_cases, quick_cases
from qknorm_onnx.speed.contestant import LeftOutError
from qknorm_onnx.speed.onnx_contestants import native

# Linux: writing 5 to `clear_refs` makes the present size the peak (Documentation/filesystems/proc.rst).
_STATUS: Final = Path("/proc/self/status")
_CLEAR: Final = Path("/proc/self/clear_refs")
_TIMEOUT_SECONDS: Final = 300


def peak_memory_mb(case: MemoryCase, *, threads: int) -> float:
    """Megabytes (10^6 bytes) that one call takes beyond its inputs and outputs. Raises LeftOutError where Linux is missing."""
    if not _CLEAR.exists():
        raise LeftOutError("the peak of memory is measured on Linux only")
    command = [sys.executable, "-m", "qknorm_onnx.speed.peak_memory", case.id, str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS, env=environment)
    if done.returncode != 0:
        raise LeftOutError(f"the measuring process failed: {done.stderr.strip().splitlines()[-1]}")
    return int(done.stdout) * 1e-6


def measure(case: MemoryCase, *, threads: int) -> int:
    """Bytes of this process's peak during a call, over what it had before, less the output, which the call allocates."""
    inputs = case.problem.inputs()
    contestant = native(case.problem, inputs, threads)
    _CLEAR.write_text("5", encoding="ascii")
    before = _status_bytes("VmRSS")
    contestant.call()
    peak = _status_bytes("VmHWM")
    return max(0, peak - before - contestant.output().nbytes)


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LeftOutError(f"{_STATUS} has no {field}")


def main(arguments: list[str]) -> None:
    """Print the bytes of the memory case with the id `arguments[0]`, run in `arguments[1]` threads."""
    name, threads = arguments
    cases = {case.id: case for case in (*full_cases(), *quick_cases()) if isinstance(case, MemoryCase)}
    sys.stdout.write(str(measure(cases[name], threads=int(threads))))


if __name__ == "__main__":
    main(sys.argv[1:])
