"""Compiles the CUDA kernel pack, without a GPU: `python -m qknorm_onnx.custom_ops.compile_kernels --out DIR`.

Needs the version of Triton that `requirements/gpu.txt` names; other versions compile other code under the same names.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Final

ARCHITECTURES: Final = ("sm_80", "sm_90", "sm_100", "sm_120")
TRITON_VERSION: Final = "3.8.0"
LARGEST_PACK: Final = 30_000_000  # bytes of all architectures in a wheel, which is a zip file


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 where an image cannot be compiled or lost its matrix instructions, 2 for wrong usage."""
    options = _parser().parse_args(arguments)
    try:
        import triton
    except ImportError:
        return _fail(f"the kernels are compiled by Triton: pip install triton=={TRITON_VERSION}")
    if triton.__version__ != TRITON_VERSION and not options.any_triton:
        return _fail(f"this is Triton {triton.__version__}; the pack is pinned to {TRITON_VERSION} (--any-triton takes this one)")
    from qknorm_onnx.custom_ops.kernels.cuda.compile_image import CompileError

    try:
        return _compile(options)
    except CompileError as error:
        print(f"compile_kernels: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m qknorm_onnx.custom_ops.compile_kernels", description=__doc__)
    parser.add_argument("--arch", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES), help="architectures")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the pack")
    parser.add_argument("--only", default="", help="compile only images whose name matches this regular expression")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compiler processes")
    parser.add_argument("--report", type=pathlib.Path, help="write the table of registers and matrix instructions here")
    parser.add_argument("--any-triton", action="store_true", help="take whatever version of Triton is installed")
    return parser


def _fail(message: str) -> int:
    print(f"compile_kernels: {message}", file=sys.stderr)
    return 2


def _compile(options: argparse.Namespace) -> int:
    from qknorm_onnx.custom_ops import pack_identity
    from qknorm_onnx.custom_ops.kernels.cuda.image_report import markdown_table, report
    from qknorm_onnx.custom_ops.kernels.cuda.image_set import all_images
    from qknorm_onnx.custom_ops.kernels.cuda.kernel_pack import compile_images, write_pack

    images = [image for image in all_images() if re.search(options.only, image.name)]
    if not images:
        return _fail(f"no image has a name like {options.only!r}; names are {', '.join(i.name for i in all_images())}")
    capabilities = [int(name.removeprefix("sm_")) for name in options.arch]
    compiled = list(compile_images(images, capabilities, jobs=options.jobs))
    if options.out:
        size = write_pack(options.out, compiled, identity=pack_identity())
        print(f"{len(compiled)} images, {size / 1e6:.1f} MB in {options.out}")
    if not options.report:
        return 0
    reports = list(report(compiled))
    options.report.write_text(markdown_table(reports), encoding="utf-8")
    complaints = [complaint for each in reports for complaint in each.complaints]
    for complaint in complaints:
        print(f"compile_kernels: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    raise SystemExit(main())
