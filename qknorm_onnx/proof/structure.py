"""What a subgraph computes apart from the values of its weights: layers of one model share it, and with it a session."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import onnx_ir as ir

from qknorm_onnx.runtime.value_types import FLOAT_TYPES, subgraphs


@dataclasses.dataclass(frozen=True)
class Structure:
    """`key` is equal for equal structures; `weights` are the float initializers in the order in which nodes read them."""

    key: Hashable
    weights: tuple[ir.Value, ...]


def structure_of(flat: ir.Model) -> Structure:
    """The structure of a model that `value_types.flattened` made. Names of values and nodes do not matter."""
    numbers: dict[ir.Value | None, int] = {None: -1}
    parts: list[Hashable] = [tuple(sorted(flat.opset_imports.items()))]
    weights: dict[ir.Value, None] = {}
    for graph_input in flat.graph.inputs:
        numbers[graph_input] = len(numbers)
        parts.append((graph_input.dtype, str(graph_input.shape)))
    for node in flat.graph:
        for value in node.inputs:
            if value is not None and value not in numbers:
                numbers[value] = len(numbers)
                parts.append(_constant(value))
                if value.const_value is not None and value.dtype in FLOAT_TYPES:
                    weights[value] = None
        parts.append((node.domain, node.op_type, _attributes(node), tuple(numbers[value] for value in node.inputs)))
        for output in node.outputs:
            numbers[output] = len(numbers)
    parts.append(tuple(numbers.get(value, -2) for value in flat.graph.outputs))
    return Structure(tuple(parts), tuple(weights))


def _constant(value: ir.Value) -> Hashable:
    tensor = value.const_value
    if tensor is None:
        return ("outer value", id(value))
    content = b"" if tensor.dtype in FLOAT_TYPES else tensor.tobytes()
    return (tensor.dtype, tuple(tensor.shape), content)


def _attributes(node: ir.Node) -> Hashable:
    if next(subgraphs(node), None) is not None:
        return id(node)  # control flow is never taken for equal
    rows = []
    for name, attribute in sorted(node.attributes.items()):
        is_tensor = attribute.type == ir.AttributeType.TENSOR
        rows.append((name, attribute.as_tensor().tobytes() if is_tensor else str(attribute.value)))
    return tuple(rows)
