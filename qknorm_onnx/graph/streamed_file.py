"""Writes a model with its weights in one file without a second copy of the weights in memory.

A protobuf message is the concatenation of its fields, each with its number and length. All but the weights is small and is
serialised as usual; the weights follow it as further fields of the graph, one after the other, straight from where they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

import onnx
import onnx_ir as ir

from qknorm_onnx.graph.wire_format import field_head

_GRAPH: Final = onnx.ModelProto.GRAPH_FIELD_NUMBER
_INITIALIZER: Final = onnx.GraphProto.INITIALIZER_FIELD_NUMBER
_RAW_DATA: Final = onnx.TensorProto.RAW_DATA_FIELD_NUMBER
_WHOLE_BYTES: Final = 8  # bits; what is packed more tightly is left to the ordinary serialisation


def write_streamed(model: ir.Model, path: Path) -> None:
    """Write `model` to `path`; its message must stay below protobuf's 2 GiB. Raises OSError."""
    with _without_weights(model) as weights:
        skeleton = ir.to_proto(model)
    graph = skeleton.graph.SerializeToString(deterministic=True)
    skeleton.ClearField("graph")
    heads = [_head(tensor, name) for name, tensor in weights]
    sizes = [len(head) + tensor.nbytes for head, (_, tensor) in zip(heads, weights, strict=True)]
    whole = len(graph) + sum(len(field_head(_INITIALIZER, size)) + size for size in sizes)
    with path.open("wb") as file:
        file.write(skeleton.SerializeToString(deterministic=True))
        file.write(field_head(_GRAPH, whole))
        file.write(graph)
        for head, size, (_, tensor) in zip(heads, sizes, weights, strict=True):
            file.write(field_head(_INITIALIZER, size))
            file.write(head)
            _write_numbers(tensor, file)


@contextmanager
def _without_weights(model: ir.Model) -> Iterator[list[tuple[str, ir.TensorProtocol]]]:
    """The weights of the main graph by name, which the model lacks inside this context."""
    initializers = model.graph.initializers
    before = dict(initializers)
    held = [(name, value.const_value) for name, value in before.items() if _is_streamed(value.const_value)]
    for name, _ in held:
        del initializers[name]
    try:
        yield [(name, tensor) for name, tensor in held if tensor is not None]
    finally:
        initializers.clear()
        initializers.update(before)


def _is_streamed(tensor: ir.TensorProtocol | None) -> bool:
    return tensor is not None and tensor.dtype != ir.DataType.STRING and tensor.dtype.bitwidth >= _WHOLE_BYTES


def _head(tensor: ir.TensorProtocol, name: str) -> bytes:
    """The fields of a TensorProto up to its numbers, and the beginning of these."""
    proto = onnx.TensorProto(name=name, data_type=int(tensor.dtype), dims=tensor.shape.numpy())
    if tensor.doc_string:
        proto.doc_string = tensor.doc_string
    for key, value in tensor.metadata_props.items():
        proto.metadata_props.add(key=key, value=value)
    return proto.SerializeToString(deterministic=True) + field_head(_RAW_DATA, tensor.nbytes)


def _write_numbers(tensor: ir.TensorProtocol, file: BinaryIO) -> None:
    before = file.tell()
    write = getattr(tensor, "tofile", None)  # not all of the protocol's tensors can write themselves
    if write is not None:
        write(file)
    else:
        file.write(tensor.tobytes())
    if file.tell() - before != tensor.nbytes:
        raise OSError(f"{tensor.name} was written with {file.tell() - before} bytes instead of {tensor.nbytes}")
