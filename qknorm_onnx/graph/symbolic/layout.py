"""Rules for ops that only move elements: layout, broadcasting, joining and cutting.

Every rule takes a node and its interpreted inputs and returns the tensor, or its sizes alone (None for one that is not
known), or None where it knows neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import onnx_ir as ir

from qknorm_onnx.graph.symbolic.algebra import proven_nonnegative, select, substitute
from qknorm_onnx.graph.symbolic.products import product_of, quotient_of
from qknorm_onnx.graph.symbolic.tensor import (
    LONGEST_STACK,
    IndexTensor,
    broadcast_extents,
    broadcast_sizes,
    components_of,
    constant_element,
    forms,
    integers,
    plain,
    relabel,
    stack,
    tensor,
)
from qknorm_onnx.graph.symbolic.terms import (
    ONE,
    Apply,
    AtLeastZero,
    Element,
    Extents,
    Linear,
    PartialExtents,
    form_of,
    index,
)

Outcome: TypeAlias = IndexTensor | PartialExtents | None
Rule: TypeAlias = Callable[[ir.Node, Sequence[IndexTensor | None]], Outcome]
UNBOUNDED = 2**31 - 1


def argument(sources: Sequence[IndexTensor | None], position: int) -> IndexTensor | None:
    """Input `position`, None where it is absent."""
    return sources[position] if position < len(sources) else None


def _identity(_node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    return sources[0]


def _unsqueeze(_node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    source, axes = sources[0], integers(argument(sources, 1))
    if source is None or axes is None:
        return None
    rank = source.rank + len(axes)
    inserted = {axis % rank for axis in axes}
    kept = [axis for axis in range(rank) if axis not in inserted]
    if len(kept) != source.rank:
        return None
    extents = [ONE] * rank
    for old, new in enumerate(kept):
        extents[new] = source.extents[old]
    return relabel(source, extents, {old: index(new) for old, new in enumerate(kept)}) or tuple(extents)


def _squeeze(_node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    source = sources[0]
    if source is None:
        return None
    if len(sources) > 1 and sources[1] is not None:
        axes = integers(sources[1])
        if axes is None:
            return None
        removed = {axis % source.rank for axis in axes}
    elif all(extent.number is not None for extent in source.extents):
        removed = {axis for axis, extent in enumerate(source.extents) if extent == ONE}
    else:
        return None
    kept = [axis for axis in range(source.rank) if axis not in removed]
    mapping = {old: index(new) for new, old in enumerate(kept)} | {axis: Linear() for axis in removed}
    extents = tuple(source.extents[axis] for axis in kept)
    return relabel(source, extents, mapping) or extents


def _transpose(node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    source = sources[0]
    if source is None:
        return None
    order = node.attributes.get_ints("perm", list(reversed(range(source.rank))))
    if sorted(order) != list(range(source.rank)):
        return None  # a source of another rank than the file says
    extents = tuple(source.extents[old] for old in order)
    return relabel(source, extents, {old: index(new) for new, old in enumerate(order)}) or extents


def _reshape(node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    source, target = sources[0], forms(argument(sources, 1))
    if source is None or target is None:
        return None
    if not node.attributes.get_int("allowzero", 0):
        target = [source.extents[at] if size == Linear() and at < source.rank else size for at, size in enumerate(target)]
    extents = _inferred(source.extents, target)
    if extents is None:
        return tuple(None if size == Linear(-1) else size for size in target)
    old = [axis for axis, extent in enumerate(source.extents) if extent != ONE]
    new = [axis for axis, extent in enumerate(extents) if extent != ONE]
    if [source.extents[axis] for axis in old] != [extents[axis] for axis in new]:
        flat = plain(source)
        free = flat is not None and flat.element is not None and not _depends_on_index(flat.element, source.rank)
        return tensor(extents, flat.element, source.dtype) if free else extents  # type: ignore[union-attr, arg-type]
    mapping = {axis: Linear() for axis in range(source.rank)} | {a: index(b) for a, b in zip(old, new, strict=True)}
    return relabel(source, extents, mapping) or extents


def _inferred(old: Extents, target: Sequence[Linear]) -> Extents | None:
    """`target` with its -1 replaced by what the other sizes leave over; None where a size is 0."""
    if Linear(-1) not in target:
        return tuple(target)
    missing = quotient_of(product_of(old), product_of(size for size in target if size != Linear(-1)))
    if missing is None:
        return None
    return tuple(missing if size == Linear(-1) else size for size in target)


def _depends_on_index(element: Element, rank: int) -> bool:
    return substitute(element, {axis: Linear() for axis in range(rank)}) != element


def _expand(_node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    source, target = sources[0], forms(argument(sources, 1))
    if source is None or target is None:
        return None
    shapes = source.extents, tuple(target)
    extents = broadcast_extents(shapes)
    if extents is None:
        return broadcast_sizes(shapes)
    shift = len(extents) - source.rank
    return relabel(source, extents, {axis: index(axis + shift) for axis in range(source.rank)}) or extents


def _constant_of_shape(node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    extents = forms(sources[0])
    if extents is None:
        return None
    value = node.attributes.get_tensor("value")
    if value is None:
        return tensor(extents, Linear(), ir.DataType.FLOAT)
    return tensor(extents, constant_element(value.numpy().reshape(-1)[0]), value.dtype)


def _concat(node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    parts = [source for source in sources if source is not None]
    if len(parts) < len(sources) or not parts:
        return None
    rank = parts[0].rank
    axis = node.attributes.get_int("axis", 0) % rank
    beside = [part.extents[:axis] + part.extents[axis + 1 :] for part in parts]
    if any(sizes != beside[0] for sizes in beside):
        return _joined_sizes([part.extents for part in parts], axis)
    length = sum((part.extents[axis] for part in parts), Linear())
    extents = (*parts[0].extents[:axis], length, *parts[0].extents[axis + 1 :])
    if axis == rank - 1 and length.number is not None and length.number <= LONGEST_STACK:
        columns = [components_of(part) for part in parts]
        if all(column is not None for column in columns):
            return stack(extents[:-1], [entry for column in columns if column for entry in column], parts[0].dtype)
    return _joined(parts, axis, extents) or extents


def _joined_sizes(shapes: Sequence[Extents], axis: int) -> PartialExtents | None:
    """Sizes of pieces whose other axes are equal, though that is not proven: a number is right for all of them."""
    if len(set(map(len, shapes))) > 1:
        return None
    found: list[Linear | None] = []
    for place, sizes in enumerate(zip(*shapes, strict=True)):
        certain = set(sizes) if len(set(sizes)) == 1 else {size for size in sizes if size.number is not None}
        found.append(sum(sizes, Linear()) if place == axis else next(iter(certain)) if len(certain) == 1 else None)
    return tuple(found)


def _joined(parts: Sequence[IndexTensor], axis: int, extents: Extents) -> IndexTensor | None:
    """Pieces laid end to end along `axis`: one term where each goes on as the one before, else a selection by index."""
    flats = [plain(part) for part in parts]
    if any(flat is None or flat.element is None for flat in flats):
        return None
    element, length = flats[0].element, parts[0].extents[axis]  # type: ignore[union-attr]
    for flat in flats[1:]:
        assert flat is not None and flat.element is not None and element is not None
        following = substitute(flat.element, {axis: index(axis) - length})
        element = _continued(element, length, following, flat.extents[axis], axis)
        if element is None:
            return None
        length = length + flat.extents[axis]
    return tensor(extents, element, parts[0].dtype) if element is not None else None


def _continued(first: Element, length: Linear, second: Element, more: Linear, axis: int) -> Element | None:
    if first == second:
        return first
    if length == ONE and substitute(second, {axis: Linear()}) == substitute(first, {axis: Linear()}):
        return second
    if more == ONE and substitute(first, {axis: length}) == substitute(second, {axis: length}):
        return first
    return select(AtLeastZero((length - index(axis)).plus(-1)), first, second)


def _slice(_node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    source, starts, ends = sources[0], forms(argument(sources, 1)), forms(argument(sources, 2))
    if source is None or starts is None or ends is None:
        return None
    given_axes, given_steps = argument(sources, 3), argument(sources, 4)
    axes = list(range(len(starts))) if given_axes is None else integers(given_axes)
    steps = [1] * len(starts) if given_steps is None else integers(given_steps)
    if axes is None or steps is None or any(step != 1 for step in steps):
        return None
    extents, firsts = list(source.extents), {}
    for start, end, axis in zip(starts, ends, axes, strict=True):
        bounds = _bounds(start, end, source.extents[axis % source.rank])
        if bounds is None:
            return None
        firsts[axis % source.rank], extents[axis % source.rank] = bounds
    last = source.rank - 1
    if source.components and set(firsts) == {last} and firsts[last].number is not None:
        begin, length = firsts[last].number or 0, extents[last].number or 0
        return stack(extents[:-1], source.components[begin : begin + length], source.dtype)
    mapping = {axis: index(axis) + first for axis, first in firsts.items()}
    flat = plain(source)
    return relabel(flat, extents, mapping) or tuple(extents) if flat is not None else tuple(extents)


def _bounds(start: Linear, end: Linear, size: Linear) -> tuple[Linear, Linear] | None:
    """First index and length of a slice with step 1; None where it is not proven on which side of the border they lie."""
    if start.number is not None and start.number <= -UNBOUNDED:
        start = Linear()  # far in front of the first entry
    first = start if proven_nonnegative(start, ()) else start + size if proven_nonnegative(-start.plus(1), ()) else None
    if first is None or not proven_nonnegative(first, ()):
        return None
    if proven_nonnegative(end - size, ()) or (end.number is not None and end.number >= UNBOUNDED):
        stop = size
    elif proven_nonnegative(end, ()):
        stop = end if proven_nonnegative(size - end, ()) else form_of(Apply("minimum", (size, end), nonnegative=True))
    elif proven_nonnegative(-end.plus(1), ()) and proven_nonnegative(end + size, ()):
        stop = end + size
    else:
        return None
    length = stop - first
    if proven_nonnegative(-length, ()):
        length = Linear()
    return first, length if proven_nonnegative(length, ()) else clipped(length)


def clipped(length: Linear) -> Linear:
    """`max(length, 0)` as a size."""
    return form_of(Apply("maximum", (length, Linear()), nonnegative=True))


def _flatten(node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    source = sources[0]
    if source is None:
        return None
    axis = node.attributes.get_int("axis", 1)
    axis = axis if axis >= 0 else axis + source.rank
    return product_of(source.extents[:axis]), product_of(source.extents[axis:])


def split(node: ir.Node, sources: Sequence[IndexTensor | None], place: int) -> Outcome:
    """Output `place` of a Split: like a slice from where the outputs before it end."""
    source = sources[0]
    if source is None:
        return None
    axis = node.attributes.get_int("axis", 0) % source.rank
    lengths = integers(argument(sources, 1))
    length, count = source.extents[axis].number, len(node.outputs)
    if lengths is None and length is not None:
        part = -(-length // count)
        lengths = [part] * (count - 1) + [length - part * (count - 1)]
    if lengths is None or len(lengths) != count:
        return tuple(None if at == axis else extent for at, extent in enumerate(source.extents))
    first, own = sum(lengths[:place]), lengths[place]
    extents = tuple(Linear(own) if at == axis else extent for at, extent in enumerate(source.extents))
    if source.components and axis == source.rank - 1:
        return stack(extents[:-1], source.components[first : first + own], source.dtype)
    return relabel(source, extents, {at: index(at).plus(first if at == axis else 0) for at in range(source.rank)}) or extents


LAYOUTS: dict[str, Rule] = {
    "Identity": _identity,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Expand": _expand,
    "ConstantOfShape": _constant_of_shape,
    "Concat": _concat,
    "Slice": _slice,
    "Flatten": _flatten,
}
