"""Calls the CPU kernels through their plain C door with ctypes and NumPy arrays: no ONNX Runtime in between.

The structs are laid out from the same spec fields as the generated C++ header.
"""

from __future__ import annotations

import ctypes
import pathlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np

from qknorm_onnx.spec import signature
from qknorm_onnx.spec.attributes import attribute_fields, to_attributes
from qknorm_onnx.spec.cpp_header import choices_of
from qknorm_onnx.spec.qk_norm_spec import QKNormRotarySpec, QKNormSpec

Tensor = Any

NUMPY_TYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
ELEMENT_CODES = {
    np.dtype(np.float32): 1,
    np.dtype(np.int64): 7,
    np.dtype(np.bool_): 9,
    np.dtype(np.float16): 10,
    np.dtype(np.float64): 11,
    np.dtype(ml_dtypes.bfloat16): 16,
}


class KernelError(ValueError):
    """The kernel refused the call; the text is its message."""


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
        ("rank", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    )


class Message(ctypes.Structure):
    _fields_ = (("text", ctypes.c_char * 512),)


class Shapes(ctypes.Structure):
    _fields_ = (("y", ctypes.c_int64 * 3), ("present_key", ctypes.c_int64 * 4), ("present_value", ctypes.c_int64 * 4))


_TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
_PARALLEL_FOR = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


class _Executor(ctypes.Structure):
    _fields_ = (
        ("context", ctypes.c_void_p),
        ("parallel_for", _PARALLEL_FOR),
        ("allocate", _ALLOCATE),
        ("release", _RELEASE),
        ("threads", ctypes.c_int64),
    )


def attribute_struct(spec_type: Any) -> type[ctypes.Structure]:
    """The C struct of an operator's attributes."""
    fields = [(f.onnx_name, ctypes.c_double if f.type is float else ctypes.c_int64) for f in attribute_fields(spec_type)]
    return type(f"{spec_type.__name__}Struct", (ctypes.Structure,), {"_fields_": fields})


def pack_attributes(spec: QKNormSpec | QKNormRotarySpec) -> ctypes.Structure:
    """The spec as the C struct of its operator."""
    packed = attribute_struct(type(spec))()
    values = to_attributes(spec)
    for field in attribute_fields(type(spec)):
        choices = choices_of(type(spec), field)
        value = values[field.onnx_name]
        setattr(packed, field.onnx_name, choices.index(str(value)) if choices else value)
    return packed


def pack_tensors(names: tuple[str, ...], inputs: Mapping[str, Tensor | None]) -> tuple[Any, list[Any]]:
    packed = (_Tensor * len(names))()
    alive: list[Any] = []
    for index, name in enumerate(names):
        array = inputs.get(name)
        if array is None:
            continue
        array = np.asarray(array, order="C")
        dims = (ctypes.c_int64 * max(array.ndim, 1))(*array.shape)
        alive += [array, dims]
        packed[index] = _Tensor(
            array.ctypes.data, ctypes.cast(dims, ctypes.POINTER(ctypes.c_int64)), array.ndim, ELEMENT_CODES[array.dtype]
        )
    return packed, alive


class NativeLibrary:
    """The loaded library."""

    def __init__(self, path: pathlib.Path) -> None:
        self.door = ctypes.CDLL(str(path))
        self.door.qknorm_cpu_instruction_set.restype = ctypes.c_char_p

    @property
    def instruction_set(self) -> str:
        return str(self.door.qknorm_cpu_instruction_set().decode())

    def select(self, name: str) -> bool:
        """Switches to the kernels of another instruction set; False where the processor lacks it."""
        return bool(self.door.qknorm_cpu_select_instruction_set(name.encode()) == 0)

    def attention(
        self,
        spec: QKNormSpec,
        inputs: Mapping[str, Tensor | None],
        *,
        outputs: Mapping[str, Tensor] | None = None,
        with_present: bool = True,
        threads: int = 0,
    ) -> dict[str, Tensor]:
        """QKNormAttention. `outputs` gives buffers to write to (a cache in place); `threads` 0 runs without an executor."""
        attributes = pack_attributes(spec)
        tensors, _alive = pack_tensors(signature.ATTENTION_INPUT_NAMES, inputs)
        message, shapes = Message(), Shapes()
        code = self.door.qknorm_cpu_attention_shapes(
            ctypes.byref(attributes), tensors, ctypes.byref(shapes), ctypes.byref(message)
        )
        raise_on(code, message)
        given = dict(outputs or {})
        dtype = inputs["query"].dtype  # type: ignore[union-attr]
        result = {"Y": given.get("Y", poisoned(tuple(shapes.y), dtype))}
        if with_present:
            for name in ("present_key", "present_value"):
                result[name] = given.get(name, poisoned(tuple(getattr(shapes, name)), dtype))
        pointers = [
            ctypes.c_void_p(result[name].ctypes.data) if name in result else None
            for name in ("Y", "present_key", "present_value")
        ]
        with PythonExecutor(threads) as executor:
            code = self.door.qknorm_cpu_attention(ctypes.byref(attributes), tensors, *pointers, executor, ctypes.byref(message))
        raise_on(code, message)
        return result

    def rotary(self, spec: QKNormRotarySpec, inputs: Mapping[str, Tensor | None], *, threads: int = 0) -> dict[str, Tensor]:
        """QKNormRotary."""
        attributes = pack_attributes(spec)
        tensors, _alive = pack_tensors(signature.ROTARY_INPUT_NAMES, inputs)
        message = Message()
        y = poisoned(inputs["x"].shape, inputs["x"].dtype)  # type: ignore[union-attr]
        with PythonExecutor(threads) as executor:
            code = self.door.qknorm_cpu_rotary(
                ctypes.byref(attributes), tensors, ctypes.c_void_p(y.ctypes.data), executor, ctypes.byref(message)
            )
        raise_on(code, message)
        return {"Y": y}


def poisoned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
    """An output buffer full of NaN: what the kernel does not write shows."""
    return np.full(shape, np.nan, dtype=dtype)


def raise_on(code: int, message: Message) -> None:
    if code:
        raise KernelError(message.text.decode())


class PythonExecutor:
    """An executor on Python threads; None for 0 threads."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._memory: dict[int, Any] = {}

    def __enter__(self) -> Any:
        if self._threads == 0:
            return None
        self._pool = ThreadPoolExecutor(self._threads)
        self._struct = _Executor(
            None, _PARALLEL_FOR(self._run), _ALLOCATE(self._allocate), _RELEASE(self._release), self._threads
        )
        return ctypes.byref(self._struct)

    def __exit__(self, *_: object) -> None:
        if self._threads:
            self._pool.shutdown()
            assert not self._memory, "the kernel kept scratch memory"

    def _run(self, _context: object, count: int, task: int, argument: int) -> None:
        call: Callable[..., None] = _TASK(task)
        list(self._pool.map(lambda index: call(argument, index), range(count)))

    def _allocate(self, _context: object, size: int) -> int:
        block = ctypes.create_string_buffer(b"\xff" * size, size)
        self._memory[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def _release(self, _context: object, address: int) -> None:
        del self._memory[address]
