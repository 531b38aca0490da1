"""Constants of a graph as Python and NumPy values, and the producers that a walk may step back to."""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.match.located import Array

ONNX_DOMAINS: Final = ("", "ai.onnx")
MICROSOFT_DOMAIN: Final = "com.microsoft"

# Larger tensors are weights of projections: nothing that is read here is one.
LARGEST_CONSTANT: Final = 1 << 22


def producer(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The standard node that makes `value`, if it is one of `op_types` (any, if none are given)."""
    node = value.producer() if value is not None else None
    if node is None or node.domain not in ONNX_DOMAINS:
        return None
    return node if not op_types or node.op_type in op_types else None


def input_of(node: ir.Node, index: int) -> ir.Value | None:
    """Input `index` of `node`, None where it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def constant(value: ir.Value | None) -> Array | None:
    """The value of a constant, None for what is computed, can be fed, or is too large to be looked at.

    An initializer that is also a graph input can be overridden by the caller: it is no constant.
    """
    if value is None or value.is_graph_input():
        return None
    tensor = value.const_value
    if tensor is None:
        node = producer(value, "Constant")
        tensor = node.attributes["value"].as_tensor() if node is not None and "value" in node.attributes else None
    if tensor is None or tensor.size > LARGEST_CONSTANT:
        return None
    return np.asarray(tensor.numpy())


def number(value: ir.Value | None) -> float | None:
    """The value of a constant of one element."""
    array = constant(value)
    return float(array.reshape(())) if array is not None and array.size == 1 else None


def integers(value: ir.Value | None) -> tuple[int, ...] | None:
    """The values of a constant of integers."""
    array = constant(value)
    if array is None or not np.issubdtype(array.dtype, np.integer):
        return None
    return tuple(int(item) for item in array.reshape(-1))


def attribute_int(node: ir.Node, name: str, default: int) -> int:
    """An integer attribute."""
    return node.attributes[name].as_int() if name in node.attributes else default


def attribute_float(node: ir.Node, name: str, default: float) -> float:
    """A float attribute."""
    return node.attributes[name].as_float() if name in node.attributes else default


def attribute_or_input(node: ir.Node, name: str, index: int) -> tuple[int, ...] | None:
    """Axes and the like: an attribute in older operator sets, an input in newer ones; None where absent or not constant."""
    if name in node.attributes:
        return tuple(node.attributes[name].as_ints())
    return integers(input_of(node, index))


def rank_of(value: ir.Value) -> int | None:
    """The number of axes of `value`, if known."""
    return len(value.shape) if value.shape is not None else None


def unconverted(value: ir.Value) -> ir.Value:
    """`value` without the casts and identities that made it."""
    while (node := producer(value, "Cast", "Identity")) is not None and node.inputs[0] is not None:
        value = node.inputs[0]
    return value
