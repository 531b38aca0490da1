"""Models from and to files: whatever the user has becomes an onnx_ir model, and a file is written whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

import onnx
import onnx_ir as ir

from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.soundness.guard import make_sound, one_line, parse, read_proto
from qknorm_onnx.graph.split_file import split_file
from qknorm_onnx.graph.streamed_file import write_streamed

# A protobuf message is limited to 2 GiB; weights go to a file beside the model well before that.
EXTERNAL_DATA_THRESHOLD_BYTES: Final = 1 << 30

# Shapes, axes and exponents, which recognisers must read, are no larger.
SMALL_TENSOR_BYTES: Final = 1 << 16

THE_MODEL: Final = "the model"

ModelSource = str | os.PathLike[str] | onnx.ModelProto | ir.Model


def load_model(source: ModelSource) -> ir.Model:
    """An onnx_ir model of `source` that can be changed without changing `source`.

    Weights in files beside the model are read into memory up to 1 GiB, so that nothing depends on where it is used;
    larger models keep all but their small tensors on disk.

    Raises:
        InputError: no such file, it is not a sound ONNX model, or its weight files are missing or too short.
    """
    if isinstance(source, ir.Model):
        model = copy_model(source)
        make_sound(model, THE_MODEL)
        return model
    if isinstance(source, onnx.ModelProto):
        model = read_proto(source, THE_MODEL, (Path(),))
        _read_weights(model, THE_MODEL)
        make_sound(model, THE_MODEL, structure=False)
        return model
    if not isinstance(source, (str, os.PathLike)):
        kind = type(source).__name__
        raise InputError(f"a model of type {kind} is given; give a path, an onnx.ModelProto or an onnx_ir.Model")
    return _load_file(Path(source))


def label_of(source: object) -> str:
    """What messages call `source`: its path, or "the model"."""
    return str(source) if isinstance(source, (str, os.PathLike)) else THE_MODEL


def copy_model(model: ir.Model) -> ir.Model:
    """A copy of `model` that can be changed, with its weights as `load_model` has them; nothing is checked but these."""
    copy = model.clone()
    _read_weights(copy, THE_MODEL)
    return copy


def _load_file(path: Path) -> ir.Model:
    label = str(path)
    try:
        if not path.exists():
            raise InputError(f"{label}: no such file")
        if path.is_dir():
            raise InputError(f"{label} is a folder; give an ONNX file, or export a Hugging Face folder with 'qknorm-onnx export'")
        if not path.is_file():
            raise InputError(f"{label} is not a file; give an ONNX file")
        with path.open("rb") as file:
            roots = (path.parent, Path(os.path.realpath(path)).parent)
            model = _read(file, label, roots)
    except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
        raise InputError(f"{label} is not a readable ONNX model ({_first_line(error)})") from error
    _set_place(model, roots)
    _read_weights(model, label)
    make_sound(model, label, structure=False)
    return model


def _read(file: BinaryIO, label: str, roots: tuple[Path, ...]) -> ir.Model:
    """The model of an open file, whose weights are read once and straight to their place."""
    split = split_file(file)
    proto = parse(split.content, label)
    if not proto.opset_import and not proto.graph.node:
        raise InputError(f"{label} is not an ONNX model: it has no operator set and no nodes")
    model = read_proto(proto, label, roots, left_out=split.token)
    split.put_back(model, file, label)
    return model


def _set_place(model: ir.Model, roots: tuple[Path, ...]) -> None:
    """Let tensors outside of the file find their data; a link, as in a download cache, is followed to its file."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        ir.external_data.set_base_dir(graph, roots[0])
    folder = roots[0].resolve()
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if not isinstance(tensor, ir.ExternalTensor):
                continue
            real = Path(tensor.path).resolve()
            if not real.is_relative_to(folder):
                value.const_value = ir.ExternalTensor(
                    real.name,
                    tensor.offset,
                    tensor.length,
                    tensor.dtype,
                    shape=tensor.shape,
                    name=tensor.name,
                    base_dir=real.parent,
                )


def save_model(model: ir.Model, path: str | os.PathLike[str]) -> None:
    """Write `model` to `path`; from 1 GiB on, the weights to `<path>.data` beside it. Written whole or not at all.

    A symbolic link stays one: the file that it points to is written.

    Raises:
        InputError: `path` is a folder or a device, its folder does not exist, or it cannot be written.
    """
    target = Path(os.path.realpath(path)) if os.fspath(path) else Path()
    if target.is_dir() or (target.exists() and not target.is_file()):
        raise InputError(f"{str(path)!r} is not a file; name the ONNX file to write")
    if not target.parent.is_dir():
        raise InputError(f"{target.parent} is no folder; create it first, or write elsewhere")
    with _staging_folder(target) as staging:
        if is_small(model):
            write_streamed(model, staging / target.name)
        else:
            ir.save(model, staging / target.name, external_data=f"{target.name}.data")
        # The data file first: a model file is never there without its weights.
        for written in sorted(staging.iterdir(), key=lambda file: file.name == target.name):
            place = target.parent / written.name
            if place.exists():
                shutil.copymode(place, written)
            written.replace(place)


def model_as_proto(model: ir.Model) -> onnx.ModelProto:
    """The model with all its weights as one protobuf message.

    Raises:
        InputError: it is too large for one message.
    """
    if not is_small(model):
        raise InputError("the model's weights are too large for one protobuf message; save it to a file instead")
    whole = model.clone()
    ir.external_data.load_to_model(whole)
    return ir.to_proto(whole)


def is_small(model: ir.Model) -> bool:
    """Whether the model's weights fit into one protobuf message with its graph."""
    return weight_bytes(model) < EXTERNAL_DATA_THRESHOLD_BYTES


def weight_bytes(model: ir.Model) -> int:
    """Bytes of all initializers, those of subgraphs included."""
    return sum(_bytes(tensor) for tensor in _weights(model))


def _bytes(tensor: ir.TensorProtocol) -> int:
    """Texts have no size of their own."""
    return sum(map(len, tensor.string_data())) if isinstance(tensor, ir.StringTensor) else tensor.nbytes


def _weights(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value.const_value


def _read_weights(model: ir.Model, label: str) -> None:
    """Bring weights from beside the model into memory, all of them or the small ones that decide about shapes."""
    outside = [tensor for tensor in _weights(model) if isinstance(tensor, ir.ExternalTensor)]
    for tensor in outside:  # those of a file were checked before; a model in memory may name any
        file = Path(tensor.path)
        if not file.is_file():
            raise InputError(f"{label}: its weight file {tensor.location} is missing; keep both files in one folder")
        if file.stat().st_size < (tensor.offset or 0) + tensor.nbytes:
            raise InputError(f"{label}: its weight file {tensor.location} is too short for {tensor.name}; copy it again")
    if not outside:
        return
    with one_line(label):
        _load(model)


def _load(model: ir.Model) -> None:
    if is_small(model):
        ir.external_data.load_to_model(model)
        return
    for graph in model.graphs():
        for value in graph.initializers.values():
            small = value.const_value
            if isinstance(small, ir.ExternalTensor) and small.nbytes <= SMALL_TENSOR_BYTES:
                value.const_value = ir.Tensor(small.numpy().copy(), dtype=small.dtype, name=small.name)


@contextmanager
def _staging_folder(target: Path) -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
            yield Path(folder)
    except OSError as error:
        raise InputError(f"{target} cannot be written ({_first_line(error)})") from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
