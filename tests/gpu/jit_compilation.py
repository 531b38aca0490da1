"""Compiles what PyTorch's launcher would compile at run time, for a GPU that is not there; prints one line for each kernel.

Triton's own steps before a launch, without the launch: from the arguments to their types and hints, then the compiler.
"""

from __future__ import annotations

import dataclasses
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
from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormSpec, RotarySpec
from qknorm_onnx.torch_export.operators import triton_attention

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


def compile_awkward_ones() -> None:
    """Arguments of 1, which Triton turns into constants of another Python type: flags, lengths, strides."""
    tensors = {
        "query": torch.zeros(1, 2, 2 * 16), "key": torch.zeros(1, 2, 16), "value": torch.zeros(1, 2, 16),
        "head_sink": torch.zeros(2), "attention_bias": torch.ones(1, 1, 2, 3, dtype=torch.bool),
        "past_key": torch.zeros(1, 1, 1, 16), "past_value": torch.zeros(1, 1, 1, 16),
        "q_norm_weight": torch.ones(1 * 32), "cos": torch.ones(2, 1), "sin": torch.ones(2, 1),
    }  # fmt: skip
    spec = QKNormSpec(
        attention=AttentionSpec(q_num_heads=2, kv_num_heads=1, scale=1.0, softcap=1.0, left_window_size=1),
        norm=NormSpec(q_kind="layer", axis="hidden", groups=32),
        rotary=RotarySpec(order="after_norm", interleaved=True, embedding_dim=2),
    )
    for count in (2, 1):
        inputs = {name: value[:, :count] if name in ("query", "key", "value") else value for name, value in tensors.items()}
        inputs["attention_bias"] = inputs["attention_bias"][:, :, :count, : 1 + count]
        inputs |= {name: inputs[name][:count] for name in ("cos", "sin")}
        triton_attention.attention(spec, inputs)
    plain = dataclasses.replace(spec, norm=NormSpec(q_kind="rms"))
    triton_attention.attention(plain, inputs, choices=triton_attention.Choices(splits=2))


if __name__ == "__main__":
    triton_attention._launch = compile_instead_of_launching
    for shape in (Shape(batch=1, new=300, cached=0), Shape(batch=2, new=1, cached=400)):
        ours(shape, shape.inputs(dtype=torch.bfloat16, device="cpu"))()
    compile_awkward_ones()
