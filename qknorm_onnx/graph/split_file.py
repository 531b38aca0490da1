"""Reads a model file with its large weights apart from its graph, each once and straight into its place in memory.

Parsed as one message, a file is in memory twice while it is read. A protobuf message is a row of fields, each with its number
and length: here the fields of the graph are walked, the bytes of large weights are left out, and what is left is parsed as usual.
The tensors that lost their bytes point to a file that cannot exist, until `put_back` reads them.
"""

from __future__ import annotations

import dataclasses
import mmap
import secrets
import sys
from collections.abc import Iterator
from typing import BinaryIO, Final

import numpy as np
import onnx
import onnx_ir as ir

from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.soundness.tensors import KNOWN_TYPES, tensor_bytes
from qknorm_onnx.graph.wire_format import EIGHT_BYTES, FOUR_BYTES, LENGTH, VARINT, field_head

# Smaller weights are parsed with the graph, as are files that hold no more.
LARGE_TENSOR_BYTES: Final = 1 << 16
_LARGE_FILE_BYTES: Final = 1 << 20

_GRAPH: Final = onnx.ModelProto.GRAPH_FIELD_NUMBER
_INITIALIZER: Final = onnx.GraphProto.INITIALIZER_FIELD_NUMBER
_RAW_DATA: Final = onnx.TensorProto.RAW_DATA_FIELD_NUMBER
_LONGEST_VARINT: Final = 10
_BYTE: Final = 8  # bits


class _UnusualError(Exception):
    """The message is damaged, or written in a way that needs a parser's rules (fields that are to be merged)."""


@dataclasses.dataclass(frozen=True)
class SplitFile:
    """`content` is the message without large weights; each of them is external data of the file `token`, at its own offset."""

    content: bytes
    token: str

    def put_back(self, model: ir.Model, file: BinaryIO, label: str) -> None:
        """Read the weights of the main graph that were left out. Raises InputError where the file has become shorter."""
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor) and tensor.location == self.token:
                value.const_value = _read(tensor, file, label)


def split_file(file: BinaryIO) -> SplitFile:
    """What is at `file`, whole where it is small or unusual."""
    size = file.seek(0, 2)
    file.seek(0)
    token = secrets.token_hex(16)  # a file cannot name it
    if size >= _LARGE_FILE_BYTES and sys.byteorder == "little":  # as the numbers in a file are
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return SplitFile(b"".join(_model_without_weights(data, token)), token)
            except _UnusualError:
                pass
    return SplitFile(file.read(), token)


@dataclasses.dataclass(frozen=True)
class _Field:
    """One field: its number and wire type, where it begins, and where its content begins and ends."""

    number: int
    wire: int
    start: int
    begin: int
    end: int


def _fields(data: mmap.mmap, begin: int, end: int) -> Iterator[_Field]:
    place = begin
    while place < end:
        start = place
        key, place = _varint(data, place, end)
        wire = key & 7
        if wire == VARINT:
            _, stop = _varint(data, place, end)
        elif wire == LENGTH:
            length, place = _varint(data, place, end)
            stop = place + length
        elif wire in (EIGHT_BYTES, FOUR_BYTES):
            stop = place + (8 if wire == EIGHT_BYTES else 4)
        else:
            raise _UnusualError
        if stop > end:
            raise _UnusualError
        yield _Field(key >> 3, wire, start, place, stop)
        place = stop


def _varint(data: mmap.mmap, place: int, end: int) -> tuple[int, int]:
    """The number at `place`, and where it ends."""
    number = 0
    for index in range(_LONGEST_VARINT):
        if place + index >= end:
            break
        byte = data[place + index]
        number |= (byte & 0x7F) << (7 * index)
        if not byte & 0x80:
            return number, place + index + 1
    raise _UnusualError


def _model_without_weights(data: mmap.mmap, token: str) -> list[bytes]:
    fields = list(_fields(data, 0, len(data)))
    graphs = [field for field in fields if field.number == _GRAPH]
    if len(graphs) != 1 or graphs[0].wire != LENGTH:
        raise _UnusualError  # graphs that stand twice are merged by a parser
    (graph,) = graphs
    parts = list(_graph_without_weights(data, graph, token))
    head = field_head(_GRAPH, sum(map(len, parts)))
    return [data[: graph.start], head, *parts, data[graph.end :]]


def _graph_without_weights(data: mmap.mmap, graph: _Field, token: str) -> Iterator[bytes]:
    kept_from = graph.begin
    for field in _fields(data, graph.begin, graph.end):
        if field.number != _INITIALIZER or field.wire != LENGTH or field.end - field.begin < LARGE_TENSOR_BYTES:
            continue
        tensor = _tensor_without_numbers(data, field, token)
        if tensor is not None:
            yield data[kept_from : field.start]
            yield field_head(_INITIALIZER, len(tensor)) + tensor
            kept_from = field.end
    yield data[kept_from : graph.end]


def _tensor_without_numbers(data: mmap.mmap, place: _Field, token: str) -> bytes | None:
    """The tensor's message, its numbers named as external data; None where it is to be parsed, and maybe refused, as it is."""
    fields = list(_fields(data, place.begin, place.end))
    numbers = [field for field in fields if field.number == _RAW_DATA]
    if len(numbers) != 1 or numbers[0].wire != LENGTH:
        return None
    (raw,) = numbers
    rest = data[place.begin : raw.start] + data[raw.end : place.end]
    if len(rest) >= LARGE_TENSOR_BYTES:
        return None
    try:
        tensor = onnx.TensorProto.FromString(rest)
    except Exception as error:
        raise _UnusualError from error  # a parser says it in its own words
    set_fields = {field.name for field, _ in tensor.ListFields()}
    if not set_fields <= {"dims", "data_type", "name", "doc_string", "metadata_props"} or tensor.data_type not in KNOWN_TYPES:
        return None
    kind = ir.DataType(tensor.data_type)
    if kind == ir.DataType.STRING or kind.bitwidth < _BYTE or any(dim < 0 for dim in tensor.dims):
        return None
    count = int(np.prod([int(dim) for dim in tensor.dims], dtype=object)) if tensor.dims else 1
    if tensor_bytes(tensor.data_type, count) != raw.end - raw.begin:
        return None
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, entry in (("location", token), ("offset", str(raw.begin)), ("length", str(raw.end - raw.begin))):
        tensor.external_data.add(key=key, value=entry)
    content: bytes = tensor.SerializeToString()
    return content


def _read(tensor: ir.ExternalTensor, file: BinaryIO, label: str) -> ir.TensorProtocol:
    assert tensor.shape is not None and tensor.offset is not None, "both were written by `_tensor_without_numbers`"
    array = np.empty(tensor.shape.numpy(), dtype=tensor.dtype.numpy())
    file.seek(tensor.offset)
    # The buffer of a file may give less than is asked for at once; 0 bytes are its end.
    numbers, filled = array.reshape(-1).view(np.uint8), 0
    while filled < array.nbytes:
        given = file.readinto(numbers[filled:])  # type: ignore[attr-defined]  # every file opened for reading bytes has it
        if not given:
            raise InputError(f"{label} became shorter while it was read: copy it again, and give it when it is whole")
        filled += given
    metadata = dict(tensor.metadata_props)
    return ir.Tensor(array, dtype=tensor.dtype, name=tensor.name, doc_string=tensor.doc_string, metadata_props=metadata)
