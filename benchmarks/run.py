"""The native CPU kernels beside PyTorch and ONNX Runtime, as `qknorm-onnx bench`; `make bench` runs it.

    python benchmarks/run.py --cases prefill,decode --json build/benchmark.json

The sizes, contestants and bars are in `qknorm_onnx/speed/cases.py`.
"""

from __future__ import annotations

import sys

from qknorm_onnx.cli.main import run

if __name__ == "__main__":
    sys.exit(run(["bench", *sys.argv[1:]]))
