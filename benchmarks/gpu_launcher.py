"""The compiled kernel pack from Python: the C++ launcher of ONNX Runtime's operators, called on PyTorch's tensors.

Its plain C door (`custom_ops/ort/cuda_c_api.cc`) takes device pointers, a stream and a source of workspace; here they are
PyTorch's. So the images, the launcher's choice among them and its parameter blocks are checked and timed without ONNX
Runtime.
"""

from __future__ import annotations

import ctypes
import json
import pathlib
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from qknorm_onnx import custom_ops
from qknorm_onnx.spec.attributes import attribute_fields, to_attributes
from qknorm_onnx.spec.cpp_header import choices_of
from qknorm_onnx.spec.qk_norm_spec import QKNormSpec
from qknorm_onnx.spec.signature import ATTENTION_INPUT_NAMES

ELEMENT_TYPES: Final = {torch.float32: 1, torch.int64: 7, torch.bool: 9, torch.float16: 10, torch.bfloat16: 16}

Present = tuple[Tensor, Tensor]


class LauncherError(RuntimeError):
    """The launcher refused a call or the driver failed; the text is its message."""


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
        ("rank", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    )


class _Message(ctypes.Structure):
    _fields_ = (("text", ctypes.c_char * 512),)


_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


class _Executor(ctypes.Structure):
    _fields_ = (
        ("context", ctypes.c_void_p),
        ("parallel_for", ctypes.c_void_p),
        ("allocate", _ALLOCATE),
        ("release", _RELEASE),
        ("threads", ctypes.c_int64),
    )


class Workspace:
    """PyTorch's allocator as the launcher's: memory of the current stream, also while a CUDA graph is captured."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._blocks: dict[int, Tensor] = {}
        self.struct = _Executor(None, None, _ALLOCATE(self._allocate), _RELEASE(self._release), 1)

    def _allocate(self, _context: object, size: int) -> int | None:
        try:
            block = torch.empty(size, dtype=torch.uint8, device=self._device)
        except RuntimeError:  # no memory: the launcher says how much it asked for
            return None
        self._blocks[block.data_ptr()] = block
        return block.data_ptr()

    def _release(self, _context: object, address: int) -> None:
        del self._blocks[address]


class Launcher:
    """The native library with a kernel pack. Raises FileNotFoundError, or LauncherError where driver or pack are not fit."""

    def __init__(self, *, pack: pathlib.Path | None, device: str, library: pathlib.Path | None = None) -> None:
        self.pack = pack if pack is not None else custom_ops.kernel_pack_path()
        self._library = ctypes.CDLL(str(library if library is not None else custom_ops.library_path()))
        self._library.qknorm_cuda_use_kernel_pack(str(self.pack).encode())
        self._device = device
        self._workspace = Workspace(device)
        message = _Message()
        self._raise(self._library.qknorm_cuda_check(ctypes.byref(message)), message)

        manifest = json.loads((self.pack / "manifest.json").read_text(encoding="utf-8"))
        self.triton_version = str(manifest["triton"])
        self.images = len(manifest["images"])

    def attention(self, spec: QKNormSpec, inputs: Mapping[str, Tensor], *, present: Present | None = None) -> PackedAttention:
        """A call of the operator. `present`: buffers of the cache after it; with `cache_length` the past ones themselves."""
        return PackedAttention(self, spec, inputs, present)

    def enqueue(self, attributes: ctypes.Structure, tensors: Any, outputs: tuple[ctypes.c_void_p, ...]) -> None:
        """Calls the launcher on PyTorch's current stream. Raises LauncherError."""
        stream = torch.cuda.current_stream().cuda_stream if self._device == "cuda" else 0
        message = _Message()
        code = self._library.qknorm_cuda_attention(
            ctypes.byref(attributes),
            tensors,
            *outputs,
            ctypes.c_void_p(stream),
            ctypes.byref(self._workspace.struct),
            ctypes.byref(message),
        )
        self._raise(code, message)

    @staticmethod
    def _raise(code: int, message: _Message) -> None:
        if code:
            raise LauncherError(message.text.decode(errors="replace"))


class PackedAttention:
    """One call with its arguments packed once, so that calling it again costs what it costs in a session.

    Each call enqueues the operator and returns Y, the same memory every time.
    """

    def __init__(self, launcher: Launcher, spec: QKNormSpec, inputs: Mapping[str, Tensor], present: Present | None) -> None:
        self._launcher = launcher
        self._attributes = _packed_attributes(spec)
        self._inputs = {name: value.contiguous() for name, value in inputs.items()}
        self._tensors, self._dims = _packed_tensors(self._inputs)
        self._present = present
        query, value = self._inputs["query"], self._inputs["value"]
        width = value.shape[2] // spec.attention.kv_num_heads * spec.attention.q_num_heads
        self._y = torch.full((*query.shape[:2], width), float("nan"), dtype=query.dtype, device=query.device)
        buffers = (self._y, *(present or (None, None)))
        self._outputs = tuple(ctypes.c_void_p(None if each is None else each.data_ptr()) for each in buffers)

    def __call__(self) -> Tensor:
        """Y (B, S, Hq*Dv)."""
        self._launcher.enqueue(self._attributes, self._tensors, self._outputs)
        return self._y


def _packed_attributes(spec: QKNormSpec) -> ctypes.Structure:
    """The spec as `qknorm::spec::AttentionAttributes`, which is generated from the same fields."""
    declared = attribute_fields(QKNormSpec)
    fields = [(field.onnx_name, ctypes.c_double if field.type is float else ctypes.c_int64) for field in declared]
    packed = type("AttentionAttributes", (ctypes.Structure,), {"_fields_": fields})()
    values = to_attributes(spec)
    for field in declared:
        choices, value = choices_of(QKNormSpec, field), values[field.onnx_name]
        setattr(packed, field.onnx_name, choices.index(str(value)) if choices else value)
    return packed


def _packed_tensors(inputs: Mapping[str, Tensor]) -> tuple[Any, list[Any]]:
    """The operator's inputs in their order, and the memory of their dimensions."""
    packed = (_Tensor * len(ATTENTION_INPUT_NAMES))()
    alive = []
    for index, name in enumerate(ATTENTION_INPUT_NAMES):
        tensor = inputs.get(name)
        if tensor is None:
            continue
        dims = (ctypes.c_int64 * max(tensor.ndim, 1))(*tensor.shape)
        alive.append(dims)
        pointer = ctypes.cast(dims, ctypes.POINTER(ctypes.c_int64))
        packed[index] = _Tensor(tensor.data_ptr(), pointer, tensor.ndim, ELEMENT_TYPES[tensor.dtype])
    return packed, alive
