"""The walk from an operand of the core back towards its projection: layout operators are passed, all else must be a fragment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import onnx_ir as ir

from qknorm_onnx.graph.match.fragments import CacheAppend, Chain, Factor, Fragment, Norm, Offset, Repeat, Rotary, Step, Streams
from qknorm_onnx.graph.match.located import Layout, Located, Unreadable
from qknorm_onnx.graph.recognise.chains.buffer_write import read_buffer_write
from qknorm_onnx.graph.recognise.chains.cache import read_cache_append
from qknorm_onnx.graph.recognise.chains.grouped_norm import read_grouped_norm
from qknorm_onnx.graph.recognise.chains.streams import read_streams
from qknorm_onnx.graph.recognise.norms.norm import read_norm
from qknorm_onnx.graph.recognise.rotaries.rotary import read_rotary
from qknorm_onnx.graph.recognise.unread.lookalikes import norm_behind
from qknorm_onnx.graph.walk.broadcasts import unrepeated
from qknorm_onnx.graph.walk.constants import constant, input_of, producer
from qknorm_onnx.graph.walk.head_groups import has_tiled_heads, joined_heads, tiled_refusal, with_head_axis
from qknorm_onnx.graph.walk.layout import dims_of, same_size, step_back
from qknorm_onnx.graph.walk.limits import CHAIN_STEPS
from qknorm_onnx.graph.walk.readings import first_answer
from qknorm_onnx.graph.walk.repeats import read_copied_axes, read_copied_groups, read_copied_head, read_listed_heads

GATE_HINT = (
    "a gate on queries or keys is not QK-Norm attention; if this is a norm, write it as the operators LayerNormalization or "
    "RMSNormalization, or with its statistic over the values of a head"
)
Steps = tuple[Step, ...]
ChainReader = Callable[[Located], Steps | Unreadable | None]


@dataclasses.dataclass(frozen=True)
class OpenReader:
    """A reader, and the kinds of fragments after which it is not asked any more."""

    read: ChainReader
    closed_by: tuple[type, ...] = ()


def read_prepared(start: Located, own: tuple[Fragment, ...] = ()) -> Chain:
    """The chain of q or k. `own` is what the core's operator does to it itself, nearest to the softmax first."""
    return _walk(start, PREPARED_READERS, tuple(Step(fragment, start) for fragment in own))


def read_values(start: Located) -> Chain:
    """The chain of v: only repeats and a cache belong to the attention, what else happens to v stays outside."""
    return _walk(start, VALUE_READERS)


def _walk(start: Located, readers: tuple[OpenReader, ...], steps: Steps = ()) -> Chain:
    here, path = start, [start]
    for _ in range(CHAIN_STEPS):
        if here.value.producer() is None or here.value.is_graph_input():
            break
        kinds = [type(step.fragment) for step in steps]
        asked = [reader.read for reader in readers if not any(kind in kinds for kind in reader.closed_by)]
        found = first_answer(asked, here, "chains")
        if isinstance(found, Unreadable):
            return Chain(start, steps, tuple(path), found)
        if found is not None:
            steps = (*steps, *found)
            here = found[-1].source
            if isinstance(found[-1].fragment, Streams):
                break
        else:
            before = step_back(here)
            if before is None:
                break
            here = with_head_axis(joined_heads(before))
            if has_tiled_heads(here):
                return Chain(start, steps, tuple(path), tiled_refusal(here) if norm_behind(here.value) else None)
        path.append(here)
    return Chain(start, steps, tuple(path))


def read_repeat(located: Located) -> Steps | Unreadable | None:
    """Repeated key / value heads."""
    found = first_answer(REPEAT_READERS, located, "chains")
    return (Step(*found),) if found is not None else None


REPEAT_READERS = (read_copied_groups, read_copied_axes, read_copied_head, read_listed_heads)


def read_cached(located: Located) -> Steps | Unreadable | None:
    """A cache in front of new keys or values."""
    found = read_cache_append(located) or read_buffer_write(located)
    return found if found is None or isinstance(found, Unreadable) else (Step(*found),)


def read_grouped(located: Located) -> Steps | Unreadable | None:
    """A norm over parts of each head."""
    return read_grouped_norm(located, lambda inner: _walk(inner, GROUPED_READERS))


def read_joined(located: Located) -> Steps | Unreadable | None:
    """Streams with norms of their own."""
    found = read_streams(located, read_prepared)
    return (Step(*found),) if found is not None else None


def read_rotated(located: Located) -> Steps | Unreadable | None:
    """A rotary embedding."""
    found = read_rotary(located)
    return found if found is None or isinstance(found, Unreadable) else (Step(*found),)


def read_factor(located: Located) -> Steps | Unreadable | None:
    """x * w or x / w, where w is smaller than x: a weight, a scale, one factor per head or position."""
    node = producer(located.value, "Mul", "Div")
    if node is None:
        return None
    operands = _data_and_parameter(node, located)
    if operands is None or (node.op_type == "Div" and operands[0] is not node.inputs[0]):
        return None
    data, parameter = operands
    if _depends_on(parameter, data):
        return Unreadable("it is multiplied by something that is computed from it", node, GATE_HINT)
    source = located.at(data, located.layout)
    return (Step(Factor(unrepeated(parameter, located.layout), node.op_type == "Div", node), source),)


def read_offset(located: Located) -> Steps | Unreadable | None:
    """x + b, where b is one number per value of a head or of all heads: the bias of a norm, if one follows."""
    node = producer(located.value, "Add")
    if node is None:
        return None
    operands = _data_and_parameter(node, located)
    if operands is None:
        return None
    data, parameter = operands
    placed = unrepeated(parameter, located.layout)
    if "B" in "".join(placed.layout) or "S" in "".join(placed.layout):
        return None
    return (Step(Offset(placed, node), located.at(data, located.layout)),)


PREPARED_READERS = (
    OpenReader(read_repeat, (Repeat,)),
    OpenReader(read_cached, (CacheAppend,)),
    OpenReader(read_joined, (Norm,)),
    OpenReader(read_norm, (Norm,)),
    OpenReader(read_grouped, (Norm,)),
    OpenReader(read_rotated, (Rotary,)),
    OpenReader(read_factor, (Norm,)),
    OpenReader(read_offset, (Norm, Offset)),
)
GROUPED_READERS = (OpenReader(read_norm, (Norm,)), OpenReader(read_factor, (Norm,)), OpenReader(read_offset, (Norm, Offset)))
VALUE_READERS = (OpenReader(read_repeat, (Repeat,)), OpenReader(read_cached, (CacheAppend,)))


def _data_and_parameter(node: ir.Node, located: Located) -> tuple[ir.Value, ir.Value] | None:
    """Of two operands, the one of full size, and the one that is broadcast to it."""
    first, second = input_of(node, 0), input_of(node, 1)
    if first is None or second is None:
        return None
    if constant(second) is not None or not _covers(second, located.layout, located):
        return (first, second) if _covers(first, located.layout, located) else None
    if constant(first) is not None or not _covers(first, located.layout, located):
        return second, first
    for data, parameter in ((first, second), (second, first)):  # both are of full size: one may be a small one, expanded
        small = unrepeated(parameter, located.layout)
        if small.value is not parameter and not {"B", "S"} & set(small.layout):
            return data, parameter
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
