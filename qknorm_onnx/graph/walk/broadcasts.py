"""Back through what only copies a tensor along axes that it lacks."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.match.located import Array, Layout, Located, Parameter
from qknorm_onnx.graph.walk.constants import constant, producer
from qknorm_onnx.graph.walk.layout import dims_of, same_size, step_back


def before_broadcast(located: Located) -> Located:
    """The tensor from before it was expanded to its size."""
    while True:
        node = producer(located.value, "Expand")
        before = _before_expand(located, node) if node is not None else step_back(located)
        if before is None:
            return located
        located = before


def _before_expand(located: Located, node: ir.Node) -> Located | None:
    source = node.inputs[0]
    before, after = dims_of(source) if source is not None else None, dims_of(located.value)
    if source is None or before is None or after is None or len(before) > len(after):
        return None
    own = located.layout[len(after) - len(before) :]
    sizes = zip(before, after[len(after) - len(before) :], strict=True)
    return located.at(source, tuple(name if same_size(*pair) else "" for name, pair in zip(own, sizes, strict=True)))


def unrepeated(operand: ir.Value, layout: Layout) -> Parameter:
    """`operand`, which is broadcast against a tensor of `layout`, with the meaning of its axes, without rows that only repeat.

    Exporters write a gain as a tensor of full size: a small one that is expanded, one number in a shape (ConstantOfShape), or
    a constant that holds the same row for each token.
    """
    own = _aligned(operand, layout)
    while (node := producer(operand, "Expand")) is not None and (source := node.inputs[0]) is not None:
        before, after = dims_of(source), dims_of(operand)
        if before is None or after is None or len(before) > len(after):
            break
        pairs = zip(before, after[len(after) - len(before) :], strict=True)
        if not all(old == 1 or same_size(old, new) for old, new in pairs):
            break
        operand, own = source, _aligned(source, layout)
    array = _of_equal_rows(operand, own)
    if array is None:
        return Parameter(operand, own)
    row = _value(array, operand)
    return Parameter(row, _aligned(row, layout))


def _aligned(operand: ir.Value, layout: Layout) -> Layout:
    dims = dims_of(operand) or ()
    return tuple("" if dim == 1 else letters for dim, letters in zip(dims, layout[len(layout) - len(dims) :], strict=True))


def _of_equal_rows(operand: ir.Value, own: Layout) -> Array | None:
    """The contents of a constant that is as large as a batch of heads, cut to what differs; None for all others."""
    node = producer(operand, "ConstantOfShape")
    if node is not None:
        fill = node.attributes["value"].as_tensor().numpy() if "value" in node.attributes else np.zeros(1, np.float32)
        return np.asarray(fill).reshape(())
    array = constant(operand) if {"B", "S"} & set(own) else None
    if array is None:
        return None
    found = array
    if not array.size:
        return None
    for axis in [place for place, letters in enumerate(own) if letters in ("B", "S", "H")]:
        first = found.take([0], axis=axis)
        found = first if np.array_equal(np.broadcast_to(first, found.shape), found) else found
    return found if found.shape != array.shape else None


def _value(array: Array, like: ir.Value) -> ir.Value:
    tensor = ir.tensor(np.ascontiguousarray(array).reshape(array.shape), name=f"{like.name}/row")
    return ir.Value(name=tensor.name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
