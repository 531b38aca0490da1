"""What the entries of a rotary table were before they were joined: 2 x 2 matrices of cosines and sines, signs in a table.

The original code of FLUX stacks (cos, -sin, sin, cos) to a matrix for each pair and position; others put the sign of a half
turn into the table. Entry by entry, such a table is one of its sources, with a sign.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qknorm_onnx.graph.match.located import Dim, Layout
from qknorm_onnx.graph.recognise.rotaries.terms import Term, Terms
from qknorm_onnx.graph.walk.constants import attribute_int, attribute_or_input, constant, input_of, integers, producer
from qknorm_onnx.graph.walk.layout import dims_of, same_size
from qknorm_onnx.graph.walk.limits import TABLE_STEPS

Entries = npt.NDArray[Any]  # of Entry; its axes are the trailing axes of a table


@dataclasses.dataclass(frozen=True)
class Entry:
    """sign * entry `column` of the last `axes` axes of `value`; `lead` names its other axes."""

    sign: int
    value: ir.Value
    column: int
    axes: int
    lead: Layout


@dataclasses.dataclass(frozen=True)
class Place:
    """A table on the way back: the meaning of its leading axes, and the number of its trailing ones."""

    value: ir.Value
    lead: Layout
    axes: int
    steps: int

    def at(self, value: ir.Value | None, *, lead: Layout | None = None, axes: int | None = None) -> Entries | None:
        """The entries of an operand, one step further back; None where its axes are not these."""
        lead, axes = self.lead if lead is None else lead, self.axes if axes is None else axes
        dims = dims_of(value) if value is not None else None
        if value is None or dims is None or axes < 1 or len(dims) != len(lead) + axes:
            return None
        if any(not isinstance(dim, int) for dim in dims[len(lead) :]):
            return None
        return entries_of(Place(value, lead, axes, self.steps - 1))


def with_sources(channels: Sequence[Terms], layout: Layout) -> list[Terms] | None:
    """`channels` with the sources of all tables in their place; None where nothing changes or a source has no last axis.

    `layout` names the axes of what is rotated.
    """
    known: dict[tuple[ir.Value, int], Entries | None] = {}
    out: list[Terms] = []
    for terms in channels:
        found = [_sourced(term, layout, known) for term in terms]
        if any(term is None for term in found):
            return None
        out.append(tuple(term for term in found if term is not None))
    return out if out != list(channels) else None


def _sourced(term: Term, layout: Layout, known: dict[tuple[ir.Value, int], Entries | None]) -> Term | None:
    if term.table is None:
        return term
    key = term.table, term.axes
    if key not in known:
        rank = len(dims_of(term.table) or ()) - term.axes
        fits = term.lead is None and not term.of_operator and 0 <= rank < len(layout)
        lead = layout[len(layout) - 1 - rank : -1]
        known[key] = entries_of(Place(term.table, lead, term.axes, TABLE_STEPS)).reshape(-1) if fits else None
    entries = known[key]
    if entries is None or entries[term.column].axes != 1:
        return None
    entry: Entry = entries[term.column]
    return dataclasses.replace(term, sign=term.sign * entry.sign, table=entry.value, column=entry.column, axes=1, lead=entry.lead)


def entries_of(place: Place) -> Entries:
    """The entries of a table's trailing axes, each from as far back as it is only moved, joined or negated."""
    node = producer(place.value)
    rule = RULES.get(node.op_type) if node is not None and place.steps and constant(place.value) is None else None
    found = rule(node, place) if rule is not None and node is not None else None
    return _own(place) if found is None else found


def _own(place: Place) -> Entries:
    dims = dims_of(place.value) or ()
    sizes = [dim if isinstance(dim, int) else 0 for dim in dims[len(dims) - place.axes :]]
    out = np.empty(sizes, dtype=object)
    out.reshape(-1)[:] = [Entry(1, place.value, column, place.axes, place.lead) for column in range(math.prod(sizes))]
    return out


def _same(node: ir.Node, place: Place) -> Entries | None:
    return place.at(node.inputs[0])


def _cast(node: ir.Node, place: Place) -> Entries | None:
    """Conversions that round to float32 at most, as nodes themselves do with their tables."""
    wide = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
    return place.at(node.inputs[0]) if place.value.dtype in wide else None


def _negated(node: ir.Node, place: Place) -> Entries | None:
    found = place.at(node.inputs[0])
    if found is None:
        return None
    out = np.empty(found.shape, dtype=object)
    out.reshape(-1)[:] = [dataclasses.replace(entry, sign=-entry.sign) for entry in found.reshape(-1)]
    return out


def _joined(node: ir.Node, place: Place) -> Entries | None:
    axis = _trailing(attribute_int(node, "axis", 0), place)
    parts = [place.at(operand) for operand in node.inputs]
    known = [part for part in parts if part is not None]
    return np.concatenate(known, axis=axis) if axis is not None and len(known) == len(parts) else None


def _unsqueezed(node: ir.Node, place: Place) -> Entries | None:
    axes = attribute_or_input(node, "axes", 1)
    rank = len(place.lead) + place.axes
    if axes is None:
        return None
    added = {axis % rank for axis in axes}
    trailing = sorted(axis - len(place.lead) for axis in added if axis >= len(place.lead))
    lead = tuple(letters for axis, letters in enumerate(place.lead) if axis not in added)
    found = place.at(node.inputs[0], lead=lead, axes=place.axes - len(trailing))
    return np.expand_dims(found, trailing) if found is not None else None


def _squeezed(node: ir.Node, place: Place) -> Entries | None:
    """Axes of size 1 that are dropped, all of them before the trailing ones, or all among them."""
    axes = attribute_or_input(node, "axes", 1)
    rank = len(place.lead) + place.axes + len(axes or ())
    dropped = sorted(axis % rank for axis in axes or ())
    if not dropped:
        return None
    if dropped[0] >= len(place.lead):
        found = place.at(node.inputs[0], axes=place.axes + len(dropped))
        return np.squeeze(found, tuple(axis - len(place.lead) for axis in dropped)) if found is not None else None
    if dropped[-1] > len(place.lead) + len(dropped) - 1:
        return None
    lead = list(place.lead)
    for axis in dropped:
        lead.insert(axis, "")
    return place.at(node.inputs[0], lead=tuple(lead))


def _reshaped(node: ir.Node, place: Place) -> Entries | None:
    """Trailing axes cut or merged; the others stay as they are."""
    before, after = dims_of(node.inputs[0]) if node.inputs[0] is not None else None, dims_of(place.value)
    lead = len(place.lead)
    if before is None or after is None or len(before) <= lead or not all(map(same_size, before[:lead], after[:lead])):
        return None
    own, made = before[lead:], after[lead:]
    if any(not isinstance(dim, int) for dim in (*own, *made)) or _size(own) != _size(made):
        return None
    found = place.at(node.inputs[0], axes=len(own))
    return found.reshape([dim for dim in made if isinstance(dim, int)]) if found is not None else None


def _gathered(node: ir.Node, place: Place) -> Entries | None:
    indices = constant(input_of(node, 1))
    if indices is None or not np.issubdtype(indices.dtype, np.integer):
        return None
    axes = place.axes - indices.ndim + 1
    axis = attribute_int(node, "axis", 0)
    axis = axis - len(place.lead) if axis >= 0 else axis + axes
    found = place.at(node.inputs[0], axes=axes) if axis >= 0 else None
    if found is None or not np.all(np.abs(indices) < found.shape[axis]):
        return None
    return np.take(found, indices.astype(np.int64), axis=axis)


def _sliced(node: ir.Node, place: Place) -> Entries | None:
    starts, ends, axes = (integers(input_of(node, index)) for index in (1, 2, 3))
    steps = integers(input_of(node, 4)) or (1,) * len(starts or ())
    found = place.at(node.inputs[0])
    if starts is None or ends is None or axes is None or found is None:
        return None
    cut = [slice(None)] * place.axes
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        own = _trailing(axis, place)
        if own is None:
            return None
        cut[own] = slice(start, end if abs(end) < 1 << 31 else None, step)
    return found[tuple(cut)]


def _transposed(node: ir.Node, place: Place) -> Entries | None:
    """Axes that change places among the leading ones, and among the trailing ones."""
    perm = tuple(node.attributes["perm"].as_ints()) if "perm" in node.attributes else ()
    lead = len(place.lead)
    if len(perm) != lead + place.axes or set(perm[:lead]) != set(range(lead)):
        return None
    names = [""] * lead
    for axis, origin in enumerate(perm[:lead]):
        names[origin] = place.lead[axis]
    found = place.at(node.inputs[0], lead=tuple(names))
    return found.transpose([axis - lead for axis in perm[lead:]]) if found is not None else None


def _expanded(node: ir.Node, place: Place) -> Entries | None:
    """A table that is copied along axes that it lacks, or has with size 1."""
    before, after = dims_of(node.inputs[0]) if node.inputs[0] is not None else None, dims_of(place.value)
    if before is None or after is None or not place.axes <= len(before) <= len(after):
        return None
    lead = place.lead[len(after) - len(before) :]
    found = place.at(node.inputs[0], lead=lead)
    sizes = after[len(after) - place.axes :]
    return np.broadcast_to(found, [dim for dim in sizes if isinstance(dim, int)]) if found is not None else None


def _size(dims: Sequence[Dim]) -> int:
    return math.prod(dim for dim in dims if isinstance(dim, int))


def _trailing(axis: int, place: Place) -> int | None:
    """The axis as one of the trailing ones, from 0; None if it is none of them."""
    own = axis % (len(place.lead) + place.axes) - len(place.lead)
    return own if own >= 0 else None


RULES: Final[dict[str, Callable[[ir.Node, Place], Entries | None]]] = {
    "Identity": _same,
    "Cast": _cast,
    "Neg": _negated,
    "Concat": _joined,
    "Unsqueeze": _unsqueezed,
    "Squeeze": _squeezed,
    "Reshape": _reshaped,
    "Gather": _gathered,
    "Slice": _sliced,
    "Transpose": _transposed,
    "Expand": _expanded,
}
