"""What goes into the bodies of If, Loop and Scan, and what comes out of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import onnx_ir as ir

from qknorm_onnx.graph.shapes.contrib import Results
from qknorm_onnx.graph.symbolic.dimensions import Dim, Dims, plain_dims
from qknorm_onnx.graph.walk.constants import attribute_int, input_of

BODIES: Final = frozenset({"If", "Loop", "Scan"})
FIRST_STATE: Final = {"Loop": 2, "Scan": 0}  # inputs of the node in front of what is carried from one turn to the next
FIRST_CARRIED: Final = {"Loop": 1, "Scan": 0}  # outputs of the body in front of it


# What was found to change from turn to turn: of each carried value of a body, the sizes that do not, None without its rank.
Loosened = dict[ir.Value, Dims | None]


def enter_body(node: ir.Node, body: ir.Graph, known: Loosened) -> None:
    """Give the inputs of a body types, and shapes: those of what is carried are taken to stay as they begin, unless `known`."""
    if node.op_type == "If":
        return
    if node.op_type == "Loop":
        for value, dtype in zip(body.inputs, (ir.DataType.INT64, ir.DataType.BOOL), strict=False):
            _set(value, dtype, [])
    for inner, outer in _carried(node, body):
        if outer is not None and inner.shape is None:
            _set(inner, outer.dtype, plain_dims(outer.shape))
        if inner in known:
            _keep(inner, _common([plain_dims(inner.shape), known[inner]]))
    if node.op_type == "Scan":
        count = attribute_int(node, "num_scan_inputs", 0)
        axes = node.attributes["scan_input_axes"].as_ints() if "scan_input_axes" in node.attributes else [0] * count
        for inner, outer, axis in zip(body.inputs[-count:], node.inputs[-count:], axes, strict=False):
            dims = plain_dims(outer.shape) if outer is not None else None
            if dims is not None and outer is not None:
                del dims[axis]
                _set(inner, outer.dtype, dims)


def loosened(node: ir.Node, body: ir.Graph) -> Loosened:
    """Which carried values did not keep the sizes that they began with, so that the body must be derived anew without these."""
    if node.op_type == "If":
        return {}
    found: Loosened = {}
    for place, (inner, _) in enumerate(_carried(node, body)):
        after = plain_dims(body.outputs[FIRST_CARRIED[node.op_type] + place].shape)
        before = plain_dims(inner.shape)
        kept = _common([before, after])
        if kept != before:
            _keep(inner, kept)
            found[inner] = kept
    return found


def loosen_all(node: ir.Node, body: ir.Graph) -> Loosened:
    """Forget all that is known of the carried values."""
    for inner, _ in _carried(node, body):
        inner.shape = None
    return dict.fromkeys((inner for inner, _ in _carried(node, body)), None)


def _keep(value: ir.Value, dims: Dims | None) -> None:
    value.shape = ir.Shape(dims) if dims is not None else None


def body_results(node: ir.Node, bodies: Sequence[ir.Graph]) -> Results:
    """Type and dimensions of each output of the node."""
    results: Results = []
    for place in range(len(node.outputs)):
        if node.op_type == "If":
            both = [body.outputs[place] for body in bodies]
            results.append((both[0].dtype, _common([plain_dims(value.shape) for value in both])))
            continue
        value = bodies[0].outputs[FIRST_CARRIED[node.op_type] + place]
        dims = plain_dims(value.shape)
        if place >= len(_carried(node, bodies[0])) and dims is not None:
            dims = _stacked(node, dims, place - len(_carried(node, bodies[0])))
        results.append((value.dtype, dims))
    return results


def _stacked(node: ir.Node, dims: Dims, place: int) -> Dims:
    """What the turns of a loop gave, beside each other."""
    if node.op_type == "Loop":
        return [None, *dims]
    count = attribute_int(node, "num_scan_inputs", 0)
    axes = node.attributes["scan_output_axes"].as_ints() if "scan_output_axes" in node.attributes else ()
    first = input_of(node, len(node.inputs) - count)
    read = node.attributes["scan_input_axes"].as_ints()[0] if "scan_input_axes" in node.attributes else 0
    length: Dim = plain_dims(first.shape)[read] if first is not None and first.shape is not None else None  # type: ignore[index]
    axis = axes[place] if place < len(axes) else 0
    axis %= len(dims) + 1
    return [*dims[:axis], length, *dims[axis:]]


def _carried(node: ir.Node, body: ir.Graph) -> list[tuple[ir.Value, ir.Value | None]]:
    """What is carried from turn to turn: its value inside, and what it begins as."""
    if node.op_type == "Loop":
        return list(zip(body.inputs[2:], node.inputs[2:], strict=False))
    count = len(body.inputs) - attribute_int(node, "num_scan_inputs", 0)
    return list(zip(body.inputs[:count], node.inputs[:count], strict=False))


def _common(shapes: Sequence[Dims | None]) -> Dims | None:
    first, *others = shapes
    if first is None or any(not _fit(first, other) for other in others):
        return None
    return [dim if all(other is not None and other[axis] == dim for other in others) else None for axis, dim in enumerate(first)]


def _fit(first: Dims, second: Dims | None) -> bool:
    return second is not None and len(first) == len(second)


def _set(value: ir.Value, dtype: ir.DataType | None, dims: Dims | None) -> None:
    if dtype is not None:
        value.type = ir.TensorType(dtype)
    if dims is not None:
        value.shape = ir.Shape(dims)
