"""Compiles one kernel image ahead of time: no GPU and no CUDA toolkit, only Triton's own compiler and assembler."""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from typing import Any, Final

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qknorm_onnx.custom_ops.kernels.cuda import decode, prefill, prologue
from qknorm_onnx.custom_ops.kernels.cuda.image_set import Image, triton_signature

KERNELS: Final[dict[str, Any]] = {
    "prepare": prologue.prepare,
    "row_statistics": prologue.row_statistics,
    "prefill": prefill.prefill,
    "decode": decode.decode,
    "combine": decode.combine,
}


class CompileError(RuntimeError):
    """An image cannot be compiled, or needs what the launcher does not do. The message names the image."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledImage:
    """A compiled image for one capability (80, 90, ...), with what a launch needs to know."""

    image: Image
    capability: int
    cubin: bytes
    ptx: str
    entry: str
    warps: int
    shared: int


def compile_image(image: Image, capability: int) -> CompiledImage:
    """Compiles `image` for sm_`capability`. Raises CompileError."""
    if triton.knobs.runtime.interpret:
        raise CompileError("TRITON_INTERPRET is set: Triton compiles nothing; unset it")
    fix_addresses()
    triton.knobs.compilation.disable_line_info = True  # no source paths in the images, and the same bytes every time
    signature, hints = triton_signature(image, capability)
    source = ASTSource(fn=KERNELS[image.kernel], signature=signature, constexprs=image.constants(capability), attrs=hints)
    tile = image.tile(capability)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    except Exception as error:
        raise CompileError(f"{image.name} for sm_{capability}: {error}") from error
    metadata = compiled.metadata
    if metadata.num_ctas != 1 or metadata.global_scratch_size or metadata.profile_scratch_size:
        raise CompileError(f"{image.name} for sm_{capability} needs clusters or scratch memory, which the launcher does not give")
    return CompiledImage(
        image=image,
        capability=capability,
        cubin=compiled.asm["cubin"],
        ptx=compiled.asm["ptx"],
        entry=metadata.name,
        warps=metadata.num_warps,
        shared=metadata.shared,
    )


def fix_addresses() -> None:
    """Lets the processes that this one starts have the same addresses each time.

    The assembler's register names for sm_100 depend on where its memory happens to lie. Where the system does not allow
    the change, images are still right, but two builds may differ.
    """
    if sys.platform == "linux":
        no_randomisation, ask = 0x0040000, 0xFFFFFFFF
        libc = ctypes.CDLL(None)
        libc.personality(libc.personality(ctypes.c_ulong(ask)) | no_randomisation)
