"""Files that are damaged, and tensors and weights that are not what they say."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.hostile import seeds
from tests.hostile.changes import (
    FLOAT,
    Change,
    Write,
    changed,
    external_entries,
    first_weight,
    sparse_weight,
    with_external,
    written,
)


def loading() -> Iterator[tuple[str, Write]]:
    whole = seeds.plain().SerializeToString()
    for name, content in {
        "empty": b"",
        "text": b"this is no model\n",
        "zeros": b"\0" * 64,
        "archive": b"PK\x03\x04" + b"\0" * 60,
        "json": b'{"nodes": []}',
        "endless varint": b"\xff" * 64,
        "length beyond the end": b"\x3a\xff\xff\xff\xff\x07",
        "group tags": b"\x0b\x0c" * 20,
        "cut in the middle": whole[: len(whole) // 2],
        "cut by one byte": whole[:-1],
        "cut after the header": whole[:3],
        "bytes behind the end": whole + b"\xff\xfe\xfd",
        "another message": helper.make_tensor("t", FLOAT, [2], [1.0, 2.0]).SerializeToString(),
    }.items():
        yield name, lambda folder, content=content: written(folder, content)
    for place, old in {"node name": b"first", "value name": b"w1", "operator": b"MatMul", "graph name": b"graph"}.items():

        def write(folder: Path, old: bytes = old) -> Path:
            return written(folder, whole.replace(old, b"\xff" + old[1:]))

        yield f"invalid UTF-8 in the {place}", write


def _set(**fields: object) -> Change:
    def change(model: onnx.ModelProto) -> None:
        for name, value in fields.items():
            setattr(first_weight(model), name, value)

    return change


def _dims(*dims: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        del first_weight(model).dims[:]
        first_weight(model).dims.extend(dims)

    return change


def _two_fields(model: onnx.ModelProto) -> None:
    first_weight(model).float_data.extend([1.0] * 24)


def _wrong_field(model: onnx.ModelProto) -> None:
    first_weight(model).ClearField("raw_data")
    first_weight(model).int64_data.extend([1] * 24)


def _no_data(model: onnx.ModelProto) -> None:
    first_weight(model).ClearField("raw_data")


def _constant(model: onnx.ModelProto) -> onnx.TensorProto:
    node = helper.make_node("Constant", [], ["k"], name="constant", value=numpy_helper.from_array(np.ones((2, 3), np.float32)))
    model.graph.node.insert(0, node)
    return model.graph.node[0].attribute[0].t


def _constant_without_data(model: onnx.ModelProto) -> None:
    _constant(model).ClearField("raw_data")


def _constant_of_unknown_type(model: onnx.ModelProto) -> None:
    _constant(model).data_type = 99


def _constant_outside(model: onnx.ModelProto) -> None:
    tensor = _constant(model)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL


def _segment(model: onnx.ModelProto) -> None:
    first_weight(model).segment.begin = 0
    first_weight(model).segment.end = 12


def _unnamed(model: onnx.ModelProto) -> None:
    first_weight(model).name = ""


def _twice(model: onnx.ModelProto) -> None:
    model.graph.initializer.add().CopyFrom(first_weight(model))


def _string_with_raw_data(model: onnx.ModelProto) -> None:
    first_weight(model).data_type = TensorProto.STRING


def _sparse_attribute(model: onnx.ModelProto) -> None:
    sparse = onnx.SparseTensorProto(dims=[4])
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(1, np.float32), "v"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array([9], np.int64), "i"))
    model.graph.node.append(helper.make_node("Constant", [], ["k"], sparse_value=sparse))


def _empty_raw_data(model: onnx.ModelProto) -> None:
    tensor = first_weight(model)
    array = numpy_helper.to_array(tensor)
    tensor.CopyFrom(helper.make_tensor(tensor.name, TensorProto.FLOAT, array.shape, array.ravel().tolist()))
    tensor.raw_data = b""


def tensors() -> Iterator[tuple[str, Write]]:
    changes = {
        "data type 0": _set(data_type=0),
        "data type 99": _set(data_type=99),
        "data type -1": _set(data_type=-1),
        "data type of another size": _set(data_type=TensorProto.DOUBLE),
        "initializer shorter than its shape": _dims(40, 6),
        "initializer longer than its shape": _dims(2, 6),
        "negative dimension": _dims(-4, -6),
        "dimensions whose product overflows": _dims(1 << 62, 1 << 62),
        "dimension of 2^62": _dims(1 << 62),
        "data in two fields": _two_fields,
        "data in a field, and raw data without bytes": _empty_raw_data,
        "data in the field of another type": _wrong_field,
        "no data": _no_data,
        "raw data of a string tensor": _string_with_raw_data,
        "constant without data": _constant_without_data,
        "constant of data type 99": _constant_of_unknown_type,
        "constant outside without a place": _constant_outside,
        "a segment of a tensor": _segment,
        "initializer without a name": _unnamed,
        "initializer given twice": _twice,
        "sparse initializer with an index outside": sparse_weight(indices=(0, 99)),
        "sparse initializer with a negative index": sparse_weight(indices=(-3, 5)),
        "sparse initializer with fewer indices": sparse_weight(indices=(0,)),
        "sparse initializer with three columns of indices": sparse_weight(indices=((0, 0, 0), (1, 1, 1))),
        "sparse initializer of 2^80 elements": sparse_weight(dims=(1 << 40, 1 << 40)),
        "sparse initializer of 2^40 elements": sparse_weight(dims=(1 << 20, 1 << 20)),
        "sparse initializer with a negative dimension": sparse_weight(dims=(-4, 6)),
        "sparse constant with an index outside": _sparse_attribute,
    }
    for name, change in changes.items():
        yield name, changed("plain", change)


def _located(location: str | Callable[[Path], str]) -> Callable[[Path, onnx.ModelProto], None]:
    def prepare(folder: Path, model: onnx.ModelProto) -> None:
        (folder.parent / "secret.data").write_bytes(b"\0" * 4096)
        external_entries(model, location=location if isinstance(location, str) else location(folder))

    return prepare


def _given(**wanted: str | None) -> Callable[[Path, onnx.ModelProto], None]:
    return lambda _folder, model: external_entries(model, **wanted)


def _through_a_link(folder: Path, model: onnx.ModelProto) -> None:
    (folder.parent / "secret.data").write_bytes(b"\0" * 4096)
    (folder / "link.data").symlink_to(folder.parent / "secret.data")
    external_entries(model, location="link.data")


def _through_a_linked_folder(folder: Path, model: onnx.ModelProto) -> None:
    (folder.parent / "secret.data").write_bytes(b"\0" * 4096)
    (folder / "sub").symlink_to(folder.parent)
    external_entries(model, location="sub/secret.data")


def _dangling(folder: Path, model: onnx.ModelProto) -> None:
    (folder / "link.data").symlink_to(folder / "nowhere.data")
    external_entries(model, location="link.data")


def _circle(folder: Path, model: onnx.ModelProto) -> None:
    (folder / "link.data").symlink_to(folder / "link.data")
    external_entries(model, location="link.data")


def _shortened(folder: Path, _model: onnx.ModelProto) -> None:
    data = folder / "weights.data"
    data.write_bytes(data.read_bytes()[:-8])


def _removed(folder: Path, _model: onnx.ModelProto) -> None:
    (folder / "weights.data").unlink()


def _a_folder(folder: Path, model: onnx.ModelProto) -> None:
    (folder / "sub").mkdir()
    external_entries(model, location="sub")


def _a_pipe(folder: Path, model: onnx.ModelProto) -> None:
    os.mkfifo(folder / "pipe")
    external_entries(model, location="pipe")


def external_data() -> Iterator[tuple[str, Write]]:
    preparations = {
        "weights at an absolute path": _located(lambda folder: str(folder.parent / "secret.data")),
        "weights at an absolute path into the folder": _located(lambda folder: str(folder / "weights.data")),
        "weights above the folder": _located("../secret.data"),
        "weights above the folder by a detour": _located("sub/../../secret.data"),
        "weights in a device": _located("/dev/zero"),
        "weights in a process file": _located("/proc/self/environ"),
        "weights nowhere": _located(""),
        "weights in the folder itself": _located("."),
        "weights at a name with a zero byte": _located("weights\0.data"),
        "weights at a name of 5000 letters": _located("w" * 5000),
        "weights through a link out of the folder": _through_a_link,
        "weights through a folder that is a link": _through_a_linked_folder,
        "weights through a broken link": _dangling,
        "weights through a link to itself": _circle,
        "weights missing": _removed,
        "weights cut": _shortened,
        "weights in a subfolder itself": _a_folder,
        "weights in a pipe": _a_pipe,
        "negative offset": _given(offset="-4"),
        "textual offset": _given(offset="four"),
        "fractional offset": _given(offset="0.5"),
        "offset behind the end": _given(offset="100000"),
        "offset of 2^70": _given(offset=str(1 << 70)),
        "empty offset": _given(offset=""),
        "negative length": _given(length="-96"),
        "textual length": _given(length="long"),
        "length too short": _given(length="8"),
        "length too long": _given(length="100"),
        "length of 2^70": _given(length=str(1 << 70)),
        "no location": _given(location=None),
    }
    for name, prepare in preparations.items():
        yield name, with_external(prepare)
