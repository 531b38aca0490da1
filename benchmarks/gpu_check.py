"""Checks and measures the CUDA kernels on one GPU, in about ten minutes.

    python benchmarks/gpu_check.py --out benchmarks/results/gpu.md

Needs a checkout, torch >= 2.11 and triton >= 3.6. The kernel pack (`make kernels`) is called through the C++ launcher and
compared with float64; then attention is timed with CUDA events, each time the median of replays of a CUDA graph, beside
PyTorch and beside what the device can do in the same run; then the kernels that PyTorch's Triton compiles are compared with
float64; with onnxruntime-gpu a whole session follows. `--dry-run` does all of it in tiny sizes on a CPU with Triton's
interpreter: it shows that the script works, its times mean nothing. Exit code 1 where a result was wrong; a bar that was
missed is in the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from benchmarks.gpu_report import Report
    from benchmarks.gpu_steps import Plan

ROOT: Final = pathlib.Path(__file__).resolve().parents[1]
PACK_IN_CHECKOUT: Final = ROOT / "build" / "cuda_kernels"

# In this order, each with the share of the time that is left at most when it ends. What needs no compiler comes first.
STEPS: Final = {"limits": 1.0, "pack": 0.25, "prefill": 0.55, "decode": 0.75, "prologue": 1.0, "checks": 1.0, "session": 1.0}


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
    plan, report = _prepare(options)
    start = time.monotonic()
    for name, step in _steps().items():
        if options.only and name not in options.only:
            continue
        if time.monotonic() > start + options.seconds:
            report.notes.append(f"{name}: not run, the {options.seconds:.0f} seconds were over")
            continue
        print(f"gpu_check: {name}, after {time.monotonic() - start:.0f} s", flush=True)
        try:
            step(plan, report, start + options.seconds * STEPS[name])
        except Exception as error:  # of one step: the tables of the others are still wanted
            report.failures.append(f"{name}: {type(error).__name__}: {error}")
        if options.out:
            report.write(options.out)
    print(report.markdown())
    return 1 if report.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU, in Triton's interpreter")
    parser.add_argument("--out", type=pathlib.Path, help="write the tables here (Markdown), and beside it as JSON")
    parser.add_argument("--seconds", type=float, default=570, help="start no further step or case after this time")
    parser.add_argument("--only", nargs="+", choices=list(STEPS), help="only these steps")
    parser.add_argument("--pack", type=pathlib.Path, help="kernel pack; else that of the package or of build/cuda_kernels")
    return parser


def _steps() -> dict[str, Callable[[Plan, Report, float], None]]:
    from benchmarks import gpu_session, gpu_steps

    return {
        "limits": gpu_steps.measure_limits,
        "pack": gpu_steps.check_pack,
        "prefill": gpu_steps.measure_prefills,
        "decode": gpu_steps.measure_decodes,
        "prologue": gpu_steps.measure_prologue,
        "checks": gpu_steps.check_kernels,
        "session": gpu_session.check_session,
    }


def _prepare(options: argparse.Namespace) -> tuple[Plan, Report]:
    """The plan with the launcher, if there is a pack, and a report that says where it is made."""
    import torch
    import triton

    from benchmarks import gpu_launcher, gpu_report, gpu_steps

    plan = gpu_steps.dry_plan() if options.dry_run else gpu_steps.full_plan()
    report = gpu_report.Report(facts={"torch": torch.__version__, "Triton of PyTorch": triton.__version__})
    if options.dry_run:
        report.facts["device"] = f"dry run in Triton's interpreter on {platform.machine()}: the times mean nothing"
    else:
        facts = torch.cuda.get_device_properties(0)
        report.facts["device"] = f"{facts.name}, {facts.multi_processor_count} multiprocessors, CUDA {torch.version.cuda}"
        torch.zeros(1, device="cuda")  # makes the context that the launcher's driver calls need
    try:
        launcher = gpu_launcher.Launcher(pack=_pack(options), device=plan.device)
    except (FileNotFoundError, gpu_launcher.LauncherError) as error:
        (report.notes if options.pack is None else report.failures).append(f"kernel pack: not checked, {error}")
        return plan, report
    report.facts["kernel pack"] = f"{launcher.images} images, compiled by Triton {launcher.triton_version}"
    return dataclasses.replace(plan, launcher=launcher), report


def _pack(options: argparse.Namespace) -> pathlib.Path | None:
    """The pack that was named, else that of the checkout, else None for the package's own."""
    from qknorm_onnx import custom_ops

    if options.pack is not None:
        return options.pack
    try:
        return custom_ops.kernel_pack_path()
    except FileNotFoundError:
        return PACK_IN_CHECKOUT if (PACK_IN_CHECKOUT / "manifest.json").is_file() else None


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
