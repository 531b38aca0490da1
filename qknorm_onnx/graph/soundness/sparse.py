"""Sparse initializers and constants as dense ones: the graph library knows no others, and would drop them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np
import onnx
from onnx import numpy_helper

from qknorm_onnx.errors import InputError

LARGEST_DENSE_BYTES: Final = 1 << 29


def has_sparse(model: onnx.ModelProto) -> bool:
    """Whether the model has sparse initializers or sparse constants anywhere."""
    return any(graph.sparse_initializer for graph in _graphs(model)) or any(True for _ in _sparse_constants(model))


def make_dense(model: onnx.ModelProto, label: str) -> None:
    """Replace what is sparse in `model`. Raises InputError where it is damaged or too large to be dense."""
    for graph in _graphs(model):
        for sparse in graph.sparse_initializer:
            graph.initializer.append(_dense(sparse, label))
        graph.ClearField("sparse_initializer")
    for attribute in list(_sparse_constants(model)):
        tensor = _dense(attribute.sparse_tensor, label)
        attribute.Clear()
        attribute.name, attribute.type = "value", onnx.AttributeProto.TENSOR
        attribute.t.CopyFrom(tensor)


def _dense(sparse: onnx.SparseTensorProto, label: str) -> onnx.TensorProto:
    name = sparse.values.name
    what = f"{label}: sparse tensor {name!r}"
    shape = tuple(sparse.dims)
    try:
        values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{what} cannot be read ({error}): the file is damaged") from error
    if any(dim < 0 for dim in shape) or math.prod(shape) * values.itemsize > LARGEST_DENSE_BYTES:
        raise InputError(f"{what} has the shape {list(shape)}, which is too large to be made dense")
    if not _fits(values, indices, shape):
        raise InputError(f"{what} of shape {list(shape)} has indices that do not fit: the file is damaged")
    dense = np.zeros(shape, values.dtype)
    if indices.ndim == 2:
        dense[tuple(indices.T)] = values
    else:
        dense.reshape(-1)[indices] = values
    return numpy_helper.from_array(dense, name)


def _fits(values: np.ndarray, indices: np.ndarray, shape: tuple[int, ...]) -> bool:
    """Values (n) of indices (n), into the flat tensor, or (n, rank)."""
    if values.ndim != 1 or indices.dtype != np.int64 or indices.shape not in ((len(values),), (len(values), len(shape))):
        return False
    limits = np.array(shape if indices.ndim == 2 else [math.prod(shape)])
    return bool(np.all(indices >= 0) and np.all(indices < limits))


def _graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    yield model.graph
    for attribute in _attributes(model):
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _attributes(model: onnx.ModelProto) -> Iterator[onnx.AttributeProto]:
    waiting: list[onnx.GraphProto | onnx.FunctionProto] = [model.graph, *model.functions]
    while waiting:
        for node in waiting.pop().node:
            for attribute in node.attribute:
                yield attribute
                if attribute.HasField("g"):
                    waiting.append(attribute.g)
                waiting.extend(attribute.graphs)


def _sparse_constants(model: onnx.ModelProto) -> Iterator[onnx.AttributeProto]:
    return (item for item in _attributes(model) if item.name == "sparse_value" and item.HasField("sparse_tensor"))
