"""The walk from an operand of the core back towards its projection: layout operators are passed, all else must be a fragment."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from qknorm_onnx.graph.match import Chain, Declined, Factor, Layout, Located, Norm, Offset, Rotary, Step
from qknorm_onnx.graph.recognise.cache import read_cache_append
from qknorm_onnx.graph.recognise.constants import constant, input_of, producer
from qknorm_onnx.graph.recognise.layout import dims_of, read_expanded_heads, same_size, step_back
from qknorm_onnx.graph.recognise.norm import aligned, read_norm
from qknorm_onnx.graph.recognise.rotary import read_rotary

MAX_STEPS = 64
Steps = tuple[Step, ...]
ChainReader = Callable[[Located, Steps], Steps | Declined | None]


def read_prepared(start: Located) -> Chain:
    """The chain of q or k."""
    return _walk(start, PREPARED_READERS)


def read_values(start: Located) -> Chain:
    """The chain of v: only repeats and a cache belong to the attention, what else happens to v stays outside."""
    return _walk(start, VALUE_READERS)


def _walk(start: Located, readers: tuple[ChainReader, ...]) -> Chain:
    here, steps, path = start, (), [start]
    steps: Steps = ()
    stop: Declined | None = None
    for _ in range(MAX_STEPS):
        node = here.value.producer()
        if node is None or here.value.is_graph_input():
            break
        found = next((answer for reader in readers if (answer := reader(here, steps)) is not None), None)
        if isinstance(found, Declined):
            stop = found
            break
        if found is not None:
            steps = (*steps, *found)
            here = found[-1].source
        else:
            before = step_back(here)
            if before is None:
                break
            here = before
        path.append(here)
    return Chain(start, steps, tuple(path), stop)


def read_repeat(located: Located, steps: Steps) -> Steps | Declined | None:
    """Repeated key / value heads."""
    found = read_expanded_heads(located)
    return (Step(*found),) if found is not None else None


def read_cached(located: Located, steps: Steps) -> Steps | Declined | None:
    """A cache in front of new keys or values."""
    found = read_cache_append(located)
    return (Step(*found),) if found is not None else None


def read_any_norm(located: Located, steps: Steps) -> Steps | Declined | None:
    """A norm, if none was read yet."""
    if any(isinstance(step.fragment, Norm) for step in steps):
        return None
    return read_norm(located)


def read_any_rotary(located: Located, steps: Steps) -> Steps | Declined | None:
    """A rotary embedding, if none was read yet."""
    if any(isinstance(step.fragment, Rotary) for step in steps):
        return None
    found = read_rotary(located)
    if found is None or isinstance(found, Declined):
        return found
    return (Step(*found),)


def read_factor(located: Located, steps: Steps) -> Steps | Declined | None:
    """x * w or x / w, where w is smaller than x: a weight, a scale, one factor per head or position."""
    node = producer(located.value, "Mul", "Div")
    if node is None or any(isinstance(step.fragment, Norm) for step in steps):
        return None
    operands = _data_and_parameter(node, located)
    if operands is None or (node.op_type == "Div" and operands[0] is not node.inputs[0]):
        return None
    data, parameter = operands
    if _depends_on(parameter, data):
        return Declined("it is multiplied by something that is computed from it", node)
    source = located.at(data, located.layout)
    return (Step(Factor(aligned(parameter, located.layout), node.op_type == "Div", node), source),)


def read_offset(located: Located, steps: Steps) -> Steps | Declined | None:
    """x + b, where b is one number per value of a head or of all heads: the bias of a norm, if one follows."""
    node = producer(located.value, "Add")
    if node is None or any(isinstance(step.fragment, Norm | Offset) for step in steps):
        return None
    operands = _data_and_parameter(node, located)
    if operands is None:
        return None
    data, parameter = operands
    placed = aligned(parameter, located.layout)
    if "B" in "".join(placed.layout) or "S" in "".join(placed.layout):
        return None
    return (Step(Offset(placed, node), located.at(data, located.layout)),)


PREPARED_READERS: tuple[ChainReader, ...] = (
    read_repeat,
    read_cached,
    read_any_norm,
    read_any_rotary,
    read_factor,
    read_offset,
)
VALUE_READERS: tuple[ChainReader, ...] = (read_repeat, read_cached)


def _data_and_parameter(node: ir.Node, located: Located) -> tuple[ir.Value, ir.Value] | None:
    """Of two operands, the one of full size, and the one that is broadcast to it."""
    first, second = input_of(node, 0), input_of(node, 1)
    if first is None or second is None:
        return None
    if constant(second) is not None or not _covers(second, located.layout, located):
        return (first, second) if _covers(first, located.layout, located) else None
    if constant(first) is not None or not _covers(first, located.layout, located):
        return second, first
    return None


def _covers(value: ir.Value, layout: Layout, located: Located) -> bool:
    """Whether no axis of `value` is missing or broadcast."""
    dims, whole = dims_of(value), dims_of(located.value)
    if dims is None or len(dims) != len(layout):
        return False
    if whole is None:
        return all(dim != 1 or not letters for dim, letters in zip(dims, layout, strict=True))
    return all(same_size(dim, full) or dim != 1 for dim, full in zip(dims, whole, strict=True))


def _depends_on(value: ir.Value, other: ir.Value, depth: int = 12) -> bool:
    if value is other:
        return True
    node = value.producer()
    if node is None or depth == 0:
        return False
    return any(_depends_on(operand, other, depth - 1) for operand in node.inputs if operand is not None)
