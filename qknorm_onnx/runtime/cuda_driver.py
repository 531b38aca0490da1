"""What the NVIDIA driver of this machine says of itself and its devices, asked through ctypes: no CUDA toolkit, no PyTorch."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Final

LIBRARY: Final = "libcuda.so.1"
OLDEST_VERSION: Final = (12, 0)  # what the launcher of the kernels calls is there from this version of CUDA on
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_...


class CudaDriverError(RuntimeError):
    """A call of the driver failed; the message names it and the driver's error."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CudaDevice:
    """A device; `capability` is 90 for 9.0."""

    name: str
    capability: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CudaDriver:
    """The newest version of CUDA that the driver serves, as (12, 9), and its devices."""

    version: tuple[int, int]
    devices: tuple[CudaDevice, ...]


def find_cuda_driver() -> CudaDriver | None:
    """The driver, or None where there is none. Raises CudaDriverError where it is there and does not work."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    _call(library, "cuInit", ctypes.c_uint(0))
    version = _number(library, "cuDriverGetVersion")
    devices = tuple(_device(library, ordinal) for ordinal in range(_number(library, "cuDeviceGetCount")))
    return CudaDriver(version=(version // 1000, version % 1000 // 10), devices=devices)


def _device(library: ctypes.CDLL, ordinal: int) -> CudaDevice:
    device = _number(library, "cuDeviceGet", ctypes.c_int(ordinal))
    name = ctypes.create_string_buffer(256)
    _call(library, "cuDeviceGetName", name, ctypes.c_int(len(name)), ctypes.c_int(device))
    major, minor = (
        _number(library, "cuDeviceGetAttribute", ctypes.c_int(which), ctypes.c_int(device))
        for which in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR)
    )
    return CudaDevice(name=name.value.decode(errors="replace"), capability=10 * major + minor)


def _number(library: ctypes.CDLL, function: str, *arguments: object) -> int:
    out = ctypes.c_int()
    _call(library, function, ctypes.byref(out), *arguments)
    return out.value


def _call(library: ctypes.CDLL, function: str, *arguments: object) -> None:
    try:
        code = getattr(library, function)(*arguments)
    except AttributeError as error:
        raise CudaDriverError(f"{LIBRARY} lacks {function}") from error
    if code:
        text = ctypes.c_char_p()
        named = library.cuGetErrorName(code, ctypes.byref(text)) == 0 and text.value
        raise CudaDriverError(f"{function} failed: {text.value.decode() if named and text.value else f'CUDA error {code}'}")
