"""Models from and to files: whatever the user has becomes an onnx_ir model, and a file is written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import google.protobuf.message
import onnx
import onnx_ir as ir

from qknorm_onnx.errors import InputError

# A protobuf message is limited to 2 GiB; weights go to a file beside the model well before that.
EXTERNAL_DATA_THRESHOLD_BYTES: Final = 1 << 30

ModelSource = str | os.PathLike[str] | onnx.ModelProto | ir.Model


def load_model(source: ModelSource) -> ir.Model:
    """An onnx_ir model of `source` that can be changed without changing `source`; weights stay shared or on disk.

    Raises:
        InputError: no such file, or it is not an ONNX model.
    """
    if isinstance(source, ir.Model):
        return source.clone()
    if isinstance(source, onnx.ModelProto):
        return ir.from_proto(source)
    path = Path(source)
    if not path.exists():
        raise InputError(f"{path}: no such file")
    if path.is_dir():
        raise InputError(f"{path} is a folder; give an ONNX file, or export a Hugging Face folder with 'qknorm-onnx export'")
    try:
        model = ir.load(path)
    except (google.protobuf.message.DecodeError, ValueError, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not a readable ONNX model ({_first_line(error)})") from error
    if not model.opset_imports and not len(model.graph):
        raise InputError(f"{path} is not an ONNX model: it has no operator set and no nodes")
    _require_external_data(model, path)
    return model


def save_model(model: ir.Model, path: str | os.PathLike[str]) -> None:
    """Write `model` to `path`; from 1 GiB on, the weights to `<path>.data` beside it. Written whole or not at all.

    Raises:
        InputError: the folder does not exist or cannot be written to.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise InputError(f"{target.parent} is no folder; create it first, or write elsewhere")
    with _staging_folder(target) as staging:
        if weight_bytes(model) < EXTERNAL_DATA_THRESHOLD_BYTES:
            ir.external_data.load_to_model(model)
            ir.save(model, staging / target.name)
        else:
            ir.save(model, staging / target.name, external_data=f"{target.name}.data")
        # The data file first: a model file is never there without its weights.
        for written in sorted(staging.iterdir(), key=lambda file: file.name == target.name):
            written.replace(target.parent / written.name)


def weight_bytes(model: ir.Model) -> int:
    """Bytes of all initializers of the main graph."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@contextmanager
def _staging_folder(target: Path) -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
            yield Path(folder)
    except PermissionError as error:
        raise InputError(f"{target.parent} cannot be written to ({_first_line(error)})") from error


def _require_external_data(model: ir.Model, path: Path) -> None:
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and not Path(tensor.path).exists():
            raise InputError(f"{path}: its weight file {tensor.location} is missing; keep both files in one folder")


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
