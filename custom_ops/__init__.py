"""The native custom-op library for ONNX Runtime: where it lies, what it was built from and which kernels it registers.

Only the standard library is used here, and nothing is loaded at import.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, Final

__all__ = ["KernelPack", "build_info", "kernel_pack", "kernel_pack_path", "kernel_source_hash", "library_path", "pack_identity"]

if __name__ != "qknorm_onnx.custom_ops":
    raise ImportError(f"import qknorm_onnx.custom_ops, not {__name__}: the folder is not a package of its own")

_SUFFIX: Final = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
LIBRARY_NAME: Final = ("" if sys.platform == "win32" else "lib") + "qknorm_custom_ops" + _SUFFIX

PACK_FORMAT: Final = 1
KERNEL_SOURCES: Final = (
    "arguments", "compile_image", "decode", "image_set", "prefill", "preparation", "prologue", "softmax_tile", "tiles",
)  # fmt: skip

# ONNX's element types by their number (TensorProto.DataType).
_ELEMENT_TYPES: Final = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}


def library_path() -> pathlib.Path:
    """The shared library that ONNX Runtime's `register_custom_ops_library` takes.

    Looked for where `pip install` puts it, then in `build/native` of a source checkout.

    Raises:
        FileNotFoundError: the package was installed without its native library.
    """
    candidates = list(dict.fromkeys(_candidates()))
    for path in candidates:
        if path.is_file():
            return path
    looked = ", ".join(str(path.parent) for path in candidates)
    raise FileNotFoundError(f"the native library {LIBRARY_NAME} is not in {looked}")


def kernel_pack_path() -> pathlib.Path:
    """The folder of the compiled CUDA kernels: `cuda_kernels` beside the native library.

    Raises:
        FileNotFoundError: there is no library, or no pack beside it.
    """
    folder = library_path().parent / "cuda_kernels"
    if not (folder / "manifest.json").is_file():
        raise FileNotFoundError(
            f"there is no CUDA kernel pack in {folder}; make one with "
            f"python -m qknorm_onnx.custom_ops.compile_kernels --out {folder}"
        )
    return folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelPack:
    """What a kernel pack says of itself; `is_current`: its kernels are those of this package."""

    path: pathlib.Path
    images: int
    architectures: tuple[str, ...]
    triton: str
    is_current: bool


def kernel_pack() -> KernelPack:
    """The pack of `kernel_pack_path`.

    Raises:
        FileNotFoundError: there is no library, or no pack beside it.
        ValueError: its manifest is damaged or of another format.
    """
    path = kernel_pack_path()
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        if manifest["format"] != PACK_FORMAT:
            raise ValueError(f"{path} is a kernel pack of format {manifest['format']}; this package reads {PACK_FORMAT}")
        capabilities = sorted({image["capability"] for image in manifest["images"]})
        return KernelPack(
            path=path,
            images=len(manifest["images"]),
            architectures=tuple(f"sm_{capability}" for capability in capabilities),
            triton=manifest["triton"],
            is_current=manifest["sources"] == kernel_source_hash(),
        )
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}/manifest.json is damaged: {error!r}") from error


def pack_identity() -> dict[str, object]:
    """What the manifest of a pack says of the package that made it: the format, and the sources of its kernels."""
    return {"format": PACK_FORMAT, "sources": kernel_source_hash()}


def kernel_source_hash() -> str:
    """Hash of the sources that the CUDA images are compiled from."""
    digest = hashlib.sha256()
    for name in KERNEL_SOURCES:
        path = pathlib.Path(__file__).parent / "kernels" / "cuda" / f"{name}.py"
        digest.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()


def _candidates() -> Iterator[pathlib.Path]:
    here = pathlib.Path(__file__).resolve().parent
    yield here / LIBRARY_NAME
    try:
        installed = importlib.metadata.distribution("qknorm-onnx").locate_file("qknorm_onnx/custom_ops")
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        yield pathlib.Path(str(installed)) / LIBRARY_NAME
    yield here.parent / "build" / "native" / LIBRARY_NAME


@functools.cache
def build_info() -> dict[str, Any]:
    """What the library was built with and what it does on this processor.

    Returns:
        `version` (of the package), `compiler`, `minimum_onnxruntime`, `instruction_set` (chosen for this processor),
        `operator_version` (of `ai.qknorm`), `names_per_operator` and `kernels`, a list of `{"op", "provider", "dtype"}` with
        one entry for each registered kernel, under its operator's own name.

    Raises:
        FileNotFoundError: there is no library.
    """
    library = ctypes.CDLL(str(library_path()))
    library.qknorm_build_info.restype = ctypes.c_char_p
    library.qknorm_cpu_instruction_set.restype = ctypes.c_char_p
    info: dict[str, Any] = json.loads(library.qknorm_build_info())
    info["instruction_set"] = library.qknorm_cpu_instruction_set().decode()
    for kernel in info["kernels"]:
        kernel["dtype"] = _ELEMENT_TYPES[kernel.pop("onnx_element_type")]
    return info
