"""Key / value caches of fixed size: new entries are written into a buffer by index, behind those of earlier calls."""

from __future__ import annotations

import onnx_ir as ir

from qknorm_onnx.graph.match.fragments import CacheAppend
from qknorm_onnx.graph.match.located import HEADS_SECOND, Located, Unreadable
from qknorm_onnx.graph.recognise.masks.limits import inputs_behind
from qknorm_onnx.graph.recognise.unread.lookalikes import norm_behind
from qknorm_onnx.graph.symbolic.expression import IndexReader
from qknorm_onnx.graph.symbolic.tensor import plain
from qknorm_onnx.graph.symbolic.terms import ONE, Index, Linear, Read, index
from qknorm_onnx.graph.walk.constants import attribute_int, producer
from qknorm_onnx.graph.walk.layout import dims_of, same_size, step_back

POSITIONS_HINT = (
    "compute the positions as the number of earlier entries (an input of one number, or one for each row) plus "
    "arange(new tokens), or export with a cache that grows (transformers' DynamicCache)"
)


def read_buffer_write(located: Located) -> tuple[CacheAppend, Located] | Unreadable | None:
    """ScatterND or ScatterElements of new keys or values, one behind the other, into a buffer that the caller gives.

    `located` is the buffer afterwards, with its heads second; where the first new entry lies is a form in integers of the graph.
    """
    written = step_back(located) if producer(located.value, "Transpose") is not None else located
    node = producer(written.value, "ScatterND", "ScatterElements") if written is not None else None
    if located.layout != HEADS_SECOND or written is None or node is None or len(node.inputs) != 3:
        return None
    buffer, positions, new = node.inputs
    if buffer is None or positions is None or new is None:
        return None
    past = _fed_buffer(written.at(buffer, written.layout))
    new_dims, axis = dims_of(new), written.axis_of("S")
    if past is None or new_dims is None or axis is None or len(new_dims) != len(written.layout):
        return None
    first = _first_position(node, positions, written, axis)
    if first is None:
        read = " and ".join(inputs_behind(positions)) or f"'{positions.name}'"
        reason = (
            f"its new keys are written into a static cache at positions that are not seen to follow one another, read from {read}"
        )
        return Unreadable(reason, node, POSITIONS_HINT) if norm_behind(new) is not None else None
    append = CacheAppend(past, Located(located.value, HEADS_SECOND, located.sizes), node, first=first)
    return append, Located(new, written.layout, {**written.sizes, "S": new_dims[axis]})


def _fed_buffer(located: Located) -> Located | None:
    """The caller's tensor with heads second, of which `located` is a transposition."""
    here: Located | None = located
    while here is not None and not here.value.is_graph_input():
        here = step_back(here)
    return here if here is not None and here.layout == HEADS_SECOND else None


def _first_position(node: ir.Node, positions: ir.Value, written: Located, axis: int) -> Linear | None:
    """The position of the first new entry, where entry n is written n positions behind it in all heads; None where not proven."""
    if "reduction" in node.attributes and node.attributes["reduction"].as_string() != "none":
        return None
    if node.op_type == "ScatterND":
        fits = axis == 0 and (dims_of(positions) or ())[1:] == (1,)
        along = 0
    else:
        fits = attribute_int(node, "axis", 0) % len(written.layout) == axis and _covers(positions, written, axis)
        along = axis
    known = IndexReader().read(positions) if fits else None
    flat = plain(known) if known is not None else None
    if flat is None or not isinstance(flat.element, Linear):
        return None
    first = flat.element if flat.extents[along] == ONE else flat.element - index(along)
    row = written.axis_of("B") if node.op_type == "ScatterElements" else None
    return first if all(_is_start(atom, row) for atom, _ in first.terms) else None


def _covers(positions: ir.Value, written: Located, axis: int) -> bool:
    """Whether entries are written for all rows, heads and values."""
    dims, whole = dims_of(positions), dims_of(written.value)
    if dims is None or whole is None or len(dims) != len(whole):
        return False
    return all(same_size(*pair) for place, pair in enumerate(zip(dims, whole, strict=True)) if place != axis)


def _is_start(atom: object, row: int | None) -> bool:
    """Whether `atom` is an integer that the graph reads: one for all rows, or from a vector with one for each (axis `row`, 0)."""
    if not isinstance(atom, Read) or not atom.integral:
        return False
    if all(place.number is not None for place in atom.indices):
        return True
    return row == 0 and atom.indices == (Linear(0, frozenset([(Index(0), 1)])),)
