"""Sizes inside the bodies of If, Loop and Scan, where ONNX's inference does not follow what shapes are computed from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.match.located import Dim
from qknorm_onnx.graph.symbolic.expression import IndexReader
from qknorm_onnx.graph.symbolic.terms import Dimension, Linear
from qknorm_onnx.graph.walk.constants import constant
from qknorm_onnx.graph.walk.layout import is_named

MOST_ROUNDS = 4
LARGEST_COPIED = 8


def infer_body_shapes(model: ir.Model, infer_shapes: Callable[[ir.Model], None]) -> None:
    """Give values in bodies the sizes that follow from the shapes that are computed there.

    Names that ONNX's inference made up for sizes that it cannot tell give way to sizes in the model's own names and in
    numbers. `infer_shapes` carries them on through operators that are not read here.
    """
    if not list(_body_nodes(model)):
        return
    if _copy_small_constants(model):
        infer_shapes(model)
    for _ in range(MOST_ROUNDS):
        if not _fill(model):
            return
        infer_shapes(model)


def _body_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """The nodes of all bodies; those of a body in a body come after the nodes around it."""
    for graph in model.graph.subgraphs():
        yield from graph


def _copy_small_constants(model: ir.Model) -> bool:
    """Give bodies their own copies of axes, bounds and shapes that lie around them: inference reads no others."""
    copies: dict[tuple[ir.Graph, ir.Value], ir.Value] = {}
    taken = {name for graph in model.graphs() for name in graph.initializers}
    for node in _body_nodes(model):
        graph = node.graph
        assert isinstance(graph, ir.Graph), "nodes of bodies are in graphs"
        for index, value in enumerate(node.inputs):
            if value is None or value.graph is graph or not _is_small(value):
                continue
            if (graph, value) not in copies:
                names = (f"{value.name}/inside_{number}" for number in itertools.count())
                copies[graph, value] = _copy(graph, value, next(name for name in names if name not in taken))
                taken.add(str(copies[graph, value].name))
            node.replace_input_with(index, copies[graph, value])
    return bool(copies)


def _is_small(value: ir.Value) -> bool:
    array = constant(value)
    return array is not None and array.size <= LARGEST_COPIED and np.issubdtype(array.dtype, np.integer)


def _copy(graph: ir.Graph, value: ir.Value, name: str) -> ir.Value:
    array = np.array(constant(value))
    tensor = ir.tensor(array, name=name)
    copy = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(copy)
    return copy


def _fill(model: ir.Model) -> bool:
    """Whether any size became known."""
    unknown = [value for node in _body_nodes(model) for value in node.outputs if not _is_known(value)]
    before = {value: value.shape for value in unknown}
    for value in unknown:
        if value.shape is not None:
            value.shape = ir.Shape([dim if is_named(dim) else None for dim in value.shape])
    reader, found = IndexReader(), False
    for value in unknown:
        dims = _dims(reader, value)
        old = before[value]
        if dims is None:
            value.shape = old
            continue
        if old is not None and len(old) == len(dims):
            dims = [dim if dim is not None else other for dim, other in zip(dims, old, strict=True)]
        value.shape = ir.Shape(dims)
        found = (
            found or old is None or any(is_named(new) and not is_named(dim) for new, dim in zip(value.shape, old, strict=False))
        )
    return found


def _is_known(value: ir.Value) -> bool:
    return value.shape is not None and all(map(is_named, value.shape))


def _dims(reader: IndexReader, value: ir.Value) -> list[Dim | str | None] | None:
    extents = reader.extents(value)
    return [_dim(extent) for extent in extents] if extents is not None else None


def _dim(extent: Linear) -> int | str | None:
    """A number or a name of the model; None where the size is anything else."""
    if extent.number is not None:
        return extent.number if extent.number >= 0 else None
    ((atom, factor), *rest) = extent.terms
    if rest or factor != 1 or extent.constant or not isinstance(atom, Dimension) or atom.owner is not None:
        return None
    return atom.name
