"""The stand-in libcuda from Python: every launch of the C++ launcher is recorded and, with Triton's interpreter, run.

The launcher's parameter block is unpacked as a GPU would read it, by the types in the manifest.
"""

from __future__ import annotations

import ctypes
import dataclasses
import pathlib
import struct
import subprocess
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from qknorm_onnx.custom_ops import library_path
from qknorm_onnx.custom_ops.kernels.cuda.compile_image import KERNELS
from qknorm_onnx.custom_ops.kernels.cuda.image_set import ARGUMENTS
from qknorm_onnx.spec.signature import ATTENTION_INPUT_NAMES, ROTARY_INPUT_NAMES
from tests.gpu.fake_pack import images_by_content
from tests.native import kernel_call

SOURCE = pathlib.Path(__file__).resolve().parents[2] / "custom_ops" / "tests" / "cuda_stand_in.cc"
POINTED = {"*fp32": tl.float32, "*fp16": tl.float16, "*bf16": tl.bfloat16, "*i64": tl.int64}
FORMATS = {"i32": "i", "i64": "q", "fp32": "f"}


class _Launch(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_char_p),
        ("image", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32),
        ("shared", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("arguments_size", ctypes.c_size_t),
    )


_ON_LAUNCH = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Launch))


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch: the image's content, its manifest entry, and the arguments by name."""

    image: str
    entry: Mapping[str, Any]
    grid: tuple[int, int, int]
    block: int
    shared: int
    stream: int
    arguments: dict[str, Any]
    scratch: tuple[int, int]


def build_stand_in(folder: pathlib.Path) -> pathlib.Path:
    """Compiles the stand-in with the SONAME of the driver's library."""
    library = folder / "libcuda.so.1"
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["c++", *flags, str(SOURCE), "-o", str(library)], check=True)
    return library


class StandInDriver:
    """The stand-in, the launcher on top of it, and what was launched. Device memory is host memory."""

    def __init__(self, library: pathlib.Path, *, pack: pathlib.Path, launcher: pathlib.Path | None = None) -> None:
        self.stand_in = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        for name in ("stand_in_make_context", "stand_in_make_stream"):
            getattr(self.stand_in, name).restype = ctypes.c_void_p
        self.stand_in.stand_in_context_depth.restype = ctypes.c_size_t
        self.launcher = ctypes.CDLL(str(launcher or library_path()))
        self.launches: list[Launch] = []
        self.runs_kernels = True
        self._images = images_by_content(pack)
        self._callback = _ON_LAUNCH(self._on_launch)
        self.errors: list[BaseException] = []
        self.use_pack(pack)
        self.reset()

    def use_pack(self, folder: pathlib.Path | None) -> None:
        """The launcher's pack; None is the one beside the library."""
        self.launcher.qknorm_cuda_use_kernel_pack(b"" if folder is None else str(folder).encode())

    def reset(self, *, capability: int = 90, shared_limit: int = 232448, multiprocessors: int = 132) -> None:
        """Another device with one current context; forgets launches and failures."""
        self.launches.clear()
        self.stand_in.stand_in_reset(capability, shared_limit, multiprocessors, self._callback)
        self.context = self.stand_in.stand_in_make_context()
        self.stand_in.stand_in_set_current(ctypes.c_void_p(self.context))

    def close(self) -> None:
        """Back to the library's own pack."""
        self.use_pack(None)

    def make_stream(self, context: int) -> int:
        """A stream of a context."""
        return int(self.stand_in.stand_in_make_stream(ctypes.c_void_p(context)))

    def fail(self, call: str, result: int) -> None:
        """Lets every further `call` return `result`."""
        self.stand_in.stand_in_fail(call.encode(), result)

    def attention(
        self, spec: Any, inputs: Mapping[str, Any], *, num_outputs: int = 1, in_place: bool = False, stream: int = 0
    ) -> list[Any]:
        """QKNormAttention through the C++ launcher; Y, present_key, present_value as far as asked for."""
        attributes = kernel_call.pack_attributes(spec)
        tensors, _alive = kernel_call.pack_tensors(ATTENTION_INPUT_NAMES, inputs)
        shapes, message = kernel_call.Shapes(), kernel_call.Message()
        zeroed = {**inputs, "cache_length": np.zeros_like(inputs["cache_length"])} if "cache_length" in inputs else inputs
        checked, _also = kernel_call.pack_tensors(ATTENTION_INPUT_NAMES, zeroed)
        code = self.launcher.qknorm_cpu_attention_shapes(
            ctypes.byref(attributes), checked, ctypes.byref(shapes), ctypes.byref(message)
        )
        kernel_call.raise_on(code, message)
        dtype = inputs["query"].dtype
        outputs = [kernel_call.poisoned(tuple(shape), dtype) for shape in (shapes.y, shapes.present_key, shapes.present_value)]
        if in_place:
            outputs[1:] = [inputs["past_key"], inputs["past_value"]]
        pointers = [ctypes.c_void_p(o.ctypes.data) if i < num_outputs else None for i, o in enumerate(outputs)]
        with kernel_call.PythonExecutor(1) as executor:
            code = self.launcher.qknorm_cuda_attention(
                ctypes.byref(attributes), tensors, *pointers, ctypes.c_void_p(stream), executor, ctypes.byref(message)
            )
        self._raise(code, message)
        return outputs[:num_outputs]

    def rotary(self, spec: Any, inputs: Mapping[str, Any]) -> Any:
        """QKNormRotary through the C++ launcher."""
        attributes = kernel_call.pack_attributes(spec)
        tensors, _alive = kernel_call.pack_tensors(ROTARY_INPUT_NAMES, inputs)
        message = kernel_call.Message()
        y = kernel_call.poisoned(inputs["x"].shape, inputs["x"].dtype)
        with kernel_call.PythonExecutor(1) as executor:
            code = self.launcher.qknorm_cuda_rotary(
                ctypes.byref(attributes), tensors, ctypes.c_void_p(y.ctypes.data), None, executor, ctypes.byref(message)
            )
        self._raise(code, message)
        return y

    def _raise(self, code: int, message: Any) -> None:
        if self.errors:
            raise self.errors.pop()
        kernel_call.raise_on(code, message)

    def _on_launch(self, pointer: Any) -> None:
        try:
            self._record_and_run(pointer.contents)
        except BaseException as error:  # an exception must not cross the C++ frames; it is raised after the call
            self.errors.append(error)

    def _record_and_run(self, raw: _Launch) -> None:
        content = raw.image.decode()
        entry = self._images[content]
        block = ctypes.string_at(raw.arguments, raw.arguments_size)
        values, scratch = unpack_block(block, entry["types"])
        arguments = dict(zip(entry["names"], values, strict=True))
        launch = Launch(content, entry, tuple(raw.grid), raw.block, raw.shared, raw.stream or 0, arguments, scratch)  # type: ignore[arg-type]
        self.launches.append(launch)
        if self.runs_kernels:
            run(launch)


def unpack_block(block: bytes, types: tuple[str, ...]) -> tuple[list[Any], tuple[int, int]]:
    """The values of a parameter block, each at its natural alignment, and the two scratch pointers behind them."""
    at, values = 0, []
    for kind in (*types, "i64", "i64"):
        code = FORMATS.get(kind, "Q")
        size = struct.calcsize(code)
        at = -(-at // size) * size
        values.append(struct.unpack_from(code, block, at)[0])
        at += size
    assert at == len(block), f"the block has {len(block)} bytes, the parameters need {at}"
    return values[:-2], (values[-2], values[-1])


def run(launch: Launch) -> None:
    """Interprets the kernel with the launch's arguments."""
    arguments = []
    types = dict(zip(launch.entry["names"], launch.entry["types"], strict=True))
    for name, declared in ARGUMENTS[launch.entry["kernel"]].items():
        if isinstance(declared[0], str):
            arguments.append(_argument(launch.arguments[name], types[name]))
            continue
        fields = [f"{name}.{field}" for field in declared._fields]
        arguments.append(type(declared)(*(_argument(launch.arguments[field], types[field]) for field in fields)))
    KERNELS[launch.entry["kernel"]][launch.grid](*arguments, **launch.entry["constants"])


_NOTHING = torch.zeros(16, dtype=torch.uint8)


def _argument(value: Any, kind: str) -> Any:
    if kind not in POINTED:
        return value
    if value == 0:
        return triton.reinterpret(_NOTHING, POINTED[kind])
    byte = np.frombuffer((ctypes.c_ubyte * 1).from_address(value), dtype=np.uint8)
    return triton.reinterpret(torch.from_numpy(byte), POINTED[kind])
