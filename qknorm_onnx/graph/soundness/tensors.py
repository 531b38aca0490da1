"""Tensors of a model message: their type, their shape, whether the data fits, and where data outside of the file lies."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Final

import onnx
import onnx_ir as ir
from onnx import TensorProto

from qknorm_onnx.errors import InputError

KNOWN_TYPES: Final = frozenset(kind.value for kind in ir.DataType if kind != ir.DataType.UNDEFINED)

_DATA_FIELDS: Final = ("raw_data", "float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
_MOST_BYTES: Final = 1 << 60
_COMPLEX: Final = (TensorProto.COMPLEX64, TensorProto.COMPLEX128)


def check_tensor(tensor: onnx.TensorProto, owner: str, label: str, roots: tuple[Path, ...]) -> None:
    """Raises InputError unless type, shape and data of `tensor` agree.

    Files of weights are looked at, not read. They are named from the first of `roots`, the model's folder; a link may lead
    into another one, the folder of the file behind a model that is a link itself.
    """
    what = f"{label}: tensor {owner}"
    if tensor.data_type not in KNOWN_TYPES:
        raise InputError(f"{what} has the unknown data type {tensor.data_type}: the file is damaged, or newer than this onnx")
    count = _element_count(tensor, what)
    if tensor.data_location == TensorProto.EXTERNAL:
        external_place(tensor, what, roots)
        return
    if tensor.external_data:
        raise InputError(f"{what} names a place outside of the file, but is not marked as lying there")
    filled = [name for name in _DATA_FIELDS if len(getattr(tensor, name))]
    if not filled:
        if count:
            raise InputError(f"{what} has {count} elements and no data: the file is damaged")
        return
    if tensor.HasField("raw_data") and "raw_data" not in filled:  # readers take that one, and find nothing
        filled.append("raw_data")
    if len(filled) > 1:
        raise InputError(f"{what} has data in two places, {' and '.join(filled)}")
    _check_data(tensor, filled[0], count, what)


def location_of(tensor: onnx.TensorProto) -> str:
    """The file that `tensor` says its data lies in; "" for none."""
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def external_place(tensor: onnx.TensorProto, what: str, roots: tuple[Path, ...]) -> Path:
    """The file in which the data of `tensor` lies, links followed: beside the model, long enough. Raises InputError."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    file = _inside(entries.get("location", ""), what, roots)
    size = tensor_bytes(tensor.data_type, _element_count(tensor, what))
    offset = _number(entries, "offset", what)
    length = _number(entries, "length", what)
    if tensor.data_type == TensorProto.STRING:
        raise InputError(f"{what} holds texts, which cannot lie outside of the model file")
    if "length" in entries and length != size:
        raise InputError(f"{what} needs {size} bytes of {file.name}, but its length is given as {length}")
    if offset + size > file.stat().st_size:
        needs = f"its {size} bytes at {offset}" if offset else f"its {size} bytes"
        raise InputError(f"{what}: its weight file {file.name} is too short for {needs}; copy it again")
    return file


def tensor_bytes(data_type: int, count: int) -> int:
    """Bytes that `count` elements take outside of a message."""
    return math.ceil(count * ir.DataType(data_type).bitwidth / 8) if data_type != TensorProto.STRING else 0


def _element_count(tensor: onnx.TensorProto, what: str) -> int:
    shape = list(tensor.dims)
    if any(dim < 0 for dim in shape):
        raise InputError(f"{what} has the shape {shape}: no dimension can be negative")
    count = math.prod(shape)
    if max([count, *shape]) > _MOST_BYTES:
        raise InputError(f"{what} has the shape {shape}: no memory holds so much")
    return count


def _check_data(tensor: onnx.TensorProto, field: str, count: int, what: str) -> None:
    given = len(getattr(tensor, field))
    if field == "raw_data":
        if tensor.data_type == TensorProto.STRING:
            raise InputError(f"{what} holds texts, which cannot be raw data")
        expected, unit = tensor_bytes(tensor.data_type, count), "bytes"
    else:
        wanted = onnx.helper.tensor_dtype_to_field(tensor.data_type)
        if field != wanted:
            raise InputError(f"{what} is of type {TensorProto.DataType.Name(tensor.data_type)}, but has its data in {field}")
        expected, unit = count, "elements"
        if tensor.data_type in _COMPLEX:
            expected = 2 * count
        elif (width := ir.DataType(tensor.data_type).bitwidth if field == "int32_data" else 8) < 8:
            # Several share a byte, and each entry of the field is a byte of theirs.
            expected = math.ceil(count * width / 8)
    if given != expected:
        raise InputError(
            f"{what} has the shape {list(tensor.dims)}, {expected} {unit}, but {given} are there: the file is damaged"
        )


def _inside(location: str, what: str, roots: tuple[Path, ...]) -> Path:
    """The regular file at `location`, links followed, which must lie below one of `roots`."""
    base = roots[0].absolute()
    place = Path(os.path.normpath(base / location)) if "\0" not in location else base
    if not location or place == base:
        raise InputError(f"{what} lies outside of the model file, but no file is named")
    if Path(location).is_absolute() or ".." in Path(location).parts:
        raise InputError(f"{what}: the weight file {location} is not named from the model's folder; put it there")
    try:
        real = place.resolve()
        is_file, links = real.is_file(), real.stat().st_nlink if real.exists() else 1
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"{what}: its weight file {location[:80]} cannot be looked at ({type(error).__name__})") from error
    if not any(real.is_relative_to(root.resolve()) for root in roots):
        raise InputError(f"{what}: the weight file {location} is a link out of the model's folder; copy the file there")
    if not is_file:
        exists = "is not a file" if real.exists() else "is missing; keep both files in one folder"
        raise InputError(f"{what}: its weight file {location} {exists}")
    if links > 1:
        raise InputError(f"{what}: its weight file {location} has several hard links; copy it, so that it has one name only")
    return real


def _number(entries: dict[str, str], key: str, what: str) -> int:
    text = entries.get(key)
    if text is None:
        return 0
    if not (text.isascii() and text.isdigit()) or len(text) > 19:
        raise InputError(f"{what}: its {key} {text!r} in the weight file is not a number of bytes")
    return int(text)
