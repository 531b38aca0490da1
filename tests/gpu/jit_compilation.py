"""Compiles what PyTorch's launcher would compile at run time, for a GPU that is not there; prints one line for each kernel.

Triton's own steps before a launch, without the launch: from the arguments to their types and hints, then the compiler.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import create_function_from_signature

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from benchmarks.gpu_cases import Shape, ours
from qknorm_onnx.custom_ops.kernels.cuda.machine_code import read_machine_code
from qknorm_onnx.custom_ops.kernels.cuda.tiles import Tile
from qknorm_onnx.torch_export import triton_attention

TARGET = GPUTarget("cuda", 90, 32)


def compile_instead_of_launching(kernel: Any, grid: tuple[int, ...], tile: Tile, *arguments: Any, **constants: Any) -> None:
    """Takes the place of the launcher's `_launch`."""
    backend = CUDABackend(TARGET)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    options = {**constants, "num_warps": tile.warps, "num_stages": tile.stages, "debug": False, "instrumentation_mode": ""}
    bound, specialisation, rest = bind(*arguments, **options)
    parsed, signature, constants_of_kernel, hints = kernel._pack_args(backend, options, bound, specialisation, rest)
    source = triton.compiler.ASTSource(kernel, signature, constants_of_kernel, hints)
    compiled = triton.compile(source, target=TARGET, options=parsed.__dict__)
    code = read_machine_code(compiled.asm["cubin"])
    sys.stdout.write(f"{kernel.__name__} {grid} {code.matrix_name or '-'} {code.loop_spills}\n")


if __name__ == "__main__":
    triton_attention._launch = compile_instead_of_launching
    for shape in (Shape(batch=1, new=300, cached=0), Shape(batch=2, new=1, cached=400)):
        inputs = shape.inputs(dtype=torch.bfloat16, device="cpu")
        ours(shape, inputs)()
