"""Which axis of an operator's input becomes which axis of its output, for walks that must not confuse keys with features."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from qknorm_onnx.graph.match.located import Dim
from qknorm_onnx.graph.walk.constants import attribute_int, attribute_or_input, input_of
from qknorm_onnx.graph.walk.layout import dims_of, same_size
from qknorm_onnx.graph.walk.limits import AXIS_STEPS

# For each axis of a value, the tracked axes that it becomes; none where it is summed over or new.
Axes = tuple[frozenset[int], ...]
NOTHING: frozenset[int] = frozenset()
MULTIPLIERS = frozenset({"MatMul", "Gemm", "Einsum", "Conv"})


def tracked(rank: int) -> Axes:
    """Each axis as itself."""
    return tuple(frozenset([axis]) for axis in range(rank))


def axes_before(node: ir.Node, index: int, axes: Axes) -> Axes | None:
    """`axes` of the first output of `node`, as axes of its input `index`; None where that is not known."""
    value = input_of(node, index)
    dims = dims_of(value) if value is not None else None
    if dims is None:
        return None
    if node.op_type == "Transpose":
        return _transposed(node, axes) if len(axes) == len(dims) else None
    if node.op_type in MULTIPLIERS:
        return _multiplied(node, index, axes, len(dims))
    if node.op_type in ("Reshape", "Flatten"):
        after = dims_of(node.outputs[0])
        return _regrouped(dims, after, axes) if index == 0 and after is not None else None
    if node.op_type in ("Squeeze", "Unsqueeze"):
        return _resized(node, dims, axes) if index == 0 else None
    if node.op_type.startswith("Reduce"):
        return _reduced(node, len(dims), axes) if index == 0 else None
    return _aligned(node, dims, axes)


def _aligned(node: ir.Node, dims: Sequence[Dim], axes: Axes) -> Axes | None:
    """Operators on single elements, which repeat operands of size 1; all operators that keep the rank count as such."""
    after = dims_of(node.outputs[0])
    if after is None or len(after) != len(axes) or len(dims) > len(axes):
        return None
    cut = len(axes) - len(dims)
    pairs = zip(dims, after[cut:], axes[cut:], strict=True)
    return tuple(NOTHING if before == 1 and size != 1 else axis for before, size, axis in pairs)


def _transposed(node: ir.Node, axes: Axes) -> Axes | None:
    perm = list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else list(range(len(axes)))[::-1]
    if sorted(perm) != list(range(len(axes))):  # of another rank: shapes and operator contradict each other
        return None
    return tuple(axes[perm.index(axis)] for axis in range(len(axes)))


def _multiplied(node: ir.Node, index: int, axes: Axes, rank: int) -> Axes | None:
    if node.op_type == "Einsum":
        return _einsum(node, index, axes)
    if index > 1 or rank < 2 or len(axes) < 2:
        return None
    if node.op_type == "Conv":
        return (axes[0], NOTHING, *axes[2:]) if index == 0 else None
    batch = (NOTHING,) * max(0, rank - len(axes)) + axes[max(0, len(axes) - rank) : -2]
    rows_and_sum = (axes[-2], NOTHING) if index == 0 else (NOTHING, axes[-1])
    if node.op_type == "Gemm" and attribute_int(node, ("transA", "transB")[index], 0):
        rows_and_sum = rows_and_sum[::-1]
    return (*batch, *rows_and_sum)


def _einsum(node: ir.Node, index: int, axes: Axes) -> Axes | None:
    equation = node.attributes["equation"].as_string().replace(" ", "")
    terms, arrow, output = equation.partition("->")
    if not arrow or "." in equation or len(output) != len(axes) or index >= len(terms.split(",")):
        return None
    places = dict(zip(output, axes, strict=True))
    return tuple(places.get(letter, NOTHING) for letter in terms.split(",")[index])


def _regrouped(before: Sequence[Dim], after: Sequence[Dim], axes: Axes) -> Axes | None:
    """A reshape: equal axes on both ends stay, those between are one group."""
    if len(after) != len(axes):
        return None
    limit = min(len(before), len(after))
    first = next((i for i in range(limit) if not same_size(before[i], after[i])), limit)
    last = next((i for i in range(limit - first) if not same_size(before[-1 - i], after[-1 - i])), limit - first)
    inner = list(zip(axes, after, strict=True))[first : len(axes) - last]
    group = [axis for axis, size in inner if size != 1]
    merged = frozenset[int]().union(*group) if all(group) else NOTHING
    middle = [NOTHING if size == 1 else merged for size in before[first : len(before) - last]]
    return (*axes[:first], *middle, *axes[len(axes) - last :])


def _resized(node: ir.Node, dims: Sequence[Dim], axes: Axes) -> Axes | None:
    named = attribute_or_input(node, "axes", 1)
    larger = max(len(dims), len(axes))
    if named is None:
        named = tuple(axis for axis, size in enumerate(dims) if size == 1) if node.op_type == "Squeeze" else None
    if named is None or len(dims) + (len(named) if node.op_type == "Unsqueeze" else -len(named)) != len(axes):
        return None
    places = {axis % larger for axis in named}
    if node.op_type == "Unsqueeze":
        return tuple(axis for place, axis in enumerate(axes) if place not in places)
    rest = iter(axes)
    return tuple(NOTHING if place in places else next(rest) for place in range(larger))


def _reduced(node: ir.Node, rank: int, axes: Axes) -> Axes | None:
    places = reduced_axes(node, rank)
    if len(axes) != (rank if attribute_int(node, "keepdims", 1) else rank - len(places)):
        return None
    if len(axes) == rank:
        return tuple(NOTHING if place in places else axis for place, axis in enumerate(axes))
    rest = iter(axes)
    return tuple(NOTHING if place in places else next(rest) for place in range(rank))


def reduced_axes(node: ir.Node, rank: int) -> frozenset[int]:
    """The axes that a reduction of a value of `rank` axes sums over, counted from 0; all of them where none are named."""
    named = attribute_or_input(node, "axes", 1)
    return frozenset(axis % rank for axis in named) if named is not None else frozenset(range(rank))


def is_repeated(value: ir.Value | None, axis: int, depth: int = AXIS_STEPS) -> bool:
    """Whether `value` has the same entries all along `axis` (counted from the end, negative): of size 1, or expanded from it."""
    dims = dims_of(value) if value is not None else None
    if value is None or dims is None or len(dims) < -axis or dims[axis] == 1:
        return True
    node = value.producer()
    if node is None or depth == 0:
        return False
    if node.op_type in ("Expand", "Clip", "Pow") or (node.op_type.startswith("Reduce") and attribute_int(node, "keepdims", 1)):
        return is_repeated(node.inputs[0], axis, depth - 1)
    return node.op_type in POINTWISE and all(is_repeated(operand, axis, depth - 1) for operand in node.inputs)


POINTWISE = frozenset({"Mul", "Div", "Add", "Sub", "Cast", "Identity", "Max", "Neg", "Sqrt", "Reciprocal"})


def is_weight(value: ir.Value | None, depth: int = AXIS_STEPS) -> bool:
    """A constant, or computed from constants alone."""
    if value is None or value.const_value is not None or value.is_initializer():
        return True
    node = value.producer()
    if node is None or depth == 0:
        return False
    return all(is_weight(operand, depth - 1) for operand in node.inputs)
