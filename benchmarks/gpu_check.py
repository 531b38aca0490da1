"""Checks and measures the CUDA kernels on one GPU, in about ten minutes.

    python benchmarks/gpu_check.py --out benchmarks/results/gpu.md

Needs a checkout, torch >= 2.11 and triton >= 3.6. First every kernel is compared with float64; then attention is timed
with CUDA events, each time the median of replays of a CUDA graph, beside PyTorch and beside what the device can do in
the same run. `--dry-run` does all of it in tiny sizes on a CPU with Triton's interpreter: it shows that the script works,
its times mean nothing. Exit code 1 where a check failed; a bar that was missed is in the table.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the steps, writes the table after each, and returns the exit code."""
    options = _parser().parse_args(arguments)
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    _make_importable()
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        print("gpu_check: PyTorch sees no CUDA device; --dry-run works without one", file=sys.stderr)
        return 2
    from benchmarks import gpu_steps

    plan = gpu_steps.dry_plan() if options.dry_run else gpu_steps.full_plan()
    deadline = time.monotonic() + options.seconds
    report = gpu_steps.new_report(plan)
    for name, step in gpu_steps.STEPS.items():
        if options.only and name not in options.only:
            continue
        if time.monotonic() > deadline:
            report.note(f"{name}: not run, the {options.seconds} seconds were over")
            continue
        print(f"gpu_check: {name}", flush=True)
        step(plan, report, deadline)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(report.markdown(), encoding="utf-8")
    print(report.markdown())
    return 1 if report.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU, in Triton's interpreter")
    parser.add_argument("--out", type=pathlib.Path, help="write the tables here (Markdown)")
    parser.add_argument("--seconds", type=float, default=570, help="start no further step or check after this time")
    parser.add_argument("--only", nargs="+", help="only these steps: checks, limits, prologue, prefill, decode")
    return parser


def _make_importable() -> None:
    """Imports the package from the checkout where it is not installed: its folders are put together by links."""
    sys.path.insert(0, str(ROOT))
    try:
        import qknorm_onnx.custom_ops
        import qknorm_onnx.torch_export  # noqa: F401
    except ImportError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "qknorm_onnx"]:
            del sys.modules[name]
        layout = pathlib.Path(tempfile.mkdtemp(prefix="qknorm-layout-")) / "qknorm_onnx"
        layout.mkdir()
        folders = {path.name: path for path in (ROOT / "qknorm_onnx").iterdir()}
        folders |= {"custom_ops": ROOT / "custom_ops", "torch_export": ROOT / "export" / "torch_export"}
        for name, target in folders.items():
            (layout / name).symlink_to(target)
        sys.path.insert(0, str(layout.parent))


if __name__ == "__main__":
    raise SystemExit(main())
