"""Rules for ops that read elements at computed places, and for those that generate or sum along an axis."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from qknorm_onnx.graph.symbolic.algebra import proven_nonnegative, select, substitute
from qknorm_onnx.graph.symbolic.layout import Outcome, Rule, argument, clipped
from qknorm_onnx.graph.symbolic.tensor import IndexTensor, components_of, integers, plain, relabel, stack, tensor
from qknorm_onnx.graph.symbolic.terms import FALSE, NUMBERS, AtLeastZero, Element, Extents, Linear, index


def _place(element: Element | None, extents: Extents, size: Linear) -> Linear | None:
    """An index read from an index tensor, counted from the front; None where its sign is not proven."""
    if not isinstance(element, Linear) or not element.integral:
        return None
    if proven_nonnegative(element, extents):
        return element
    return element + size if proven_nonnegative((-element).plus(-1), extents) else None


def _gather(node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    source, places = sources[0], argument(sources, 1)
    if source is None or places is None:
        return None
    axis = node.attributes.get_int("axis", 0) % source.rank
    extents = (*source.extents[:axis], *places.extents, *source.extents[axis + 1 :])
    picked = _entries(source, places) if source.components and axis == source.rank - 1 else None
    flat = plain(places)
    place = _place(flat.element, flat.extents, source.extents[axis]) if flat is not None else None
    if picked is not None or place is None:
        return picked or extents
    return _moved(plain(source), axis, place, places.rank, extents) or extents


def _entries(source: IndexTensor, places: IndexTensor) -> IndexTensor | None:
    """Entries of a short vector, such as a shape, that a constant picks."""
    wanted, length = integers(places), len(source.components)
    if wanted is None or places.rank > 1 or any(not -length <= at < length for at in wanted):
        return None
    extents = source.extents[:-1]
    if not places.rank:
        return tensor(extents, source.components[wanted[0]], source.dtype)
    return stack(extents, [source.components[at] for at in wanted], source.dtype)


def _moved(source: IndexTensor | None, axis: int, place: Linear, rank: int, extents: Extents) -> IndexTensor | None:
    if source is None:
        return None
    moved = substitute(place, {inner: index(inner + axis) for inner in range(rank)})
    assert isinstance(moved, Linear)
    behind = {outer: index(outer + rank - 1) for outer in range(axis + 1, source.rank)}
    return relabel(source, extents, {axis: moved, **behind})


def _gather_nd(node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    source, places = sources[0], argument(sources, 1)
    if source is None or places is None or node.attributes.get_int("batch_dims", 0) != 0:
        return None
    columns = components_of(places) if places.rank else None
    if columns is None or len(columns) > source.rank:
        return None
    leading = places.extents[:-1]
    extents = (*leading, *source.extents[len(columns) :])
    found = [_place(column, leading, source.extents[axis]) for axis, column in enumerate(columns)]
    mapping = {axis: place for axis, place in enumerate(found) if place is not None}
    if len(mapping) < len(columns):
        return extents
    behind = {axis: index(axis - len(columns) + len(leading)) for axis in range(len(columns), source.rank)}
    return relabel(source, extents, mapping | behind) or extents


def _gather_elements(node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    source, places = sources[0], argument(sources, 1)
    flat = plain(places) if places is not None else None
    if source is None or flat is None:
        return None
    axis = node.attributes.get_int("axis", 0) % source.rank
    place = _place(flat.element, flat.extents, source.extents[axis])
    return relabel(source, flat.extents, {axis: place}) or flat.extents if place is not None else flat.extents


def _range(_node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    start, limit, step = (source.element if source is not None else None for source in sources)
    if not (isinstance(start, Linear) and isinstance(limit, Linear) and isinstance(step, Linear)):
        return None
    if not (start.integral and limit.integral and step.number):
        return None
    length = (limit - start).times(1 if step.number > 0 else -1)
    if abs(step.number) != 1:
        if length.number is None:
            return None
        length = Linear(max(0, -(-length.number // abs(step.number))))
    if not proven_nonnegative(length, ()):
        length = clipped(length)
    return tensor((length,), start + index(0).times(step.number), sources[0].dtype if sources[0] is not None else None)


def _cumulative_sum(node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    source, axes = sources[0], integers(argument(sources, 1))
    flat = plain(source) if source is not None else None
    if flat is None or axes is None:
        return flat.extents if flat is not None else None
    axis, each = axes[0] % flat.rank, flat.element
    if not isinstance(each, Linear) or each.number is None:
        return flat.extents
    steps = index(axis)
    if node.attributes.get_int("reverse", 0):
        steps = (flat.extents[axis] - steps).plus(-1)
    if not node.attributes.get_int("exclusive", 0):
        steps = steps.plus(1)
    return tensor(flat.extents, steps.times(each.number), flat.dtype)


def _triangle(node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    source, given = sources[0], argument(sources, 1)
    flat = plain(source) if source is not None else None
    if flat is None or flat.element is None or flat.rank < 2:
        return None
    offset = given.element if given is not None else Linear()
    if not isinstance(offset, Linear) or not offset.integral:
        return flat.extents
    ahead = index(flat.rank - 1) - index(flat.rank - 2) - offset
    kept = AtLeastZero(ahead) if node.attributes.get_int("upper", 1) else AtLeastZero(-ahead)
    cut = Linear() if isinstance(flat.element, NUMBERS) else FALSE
    element = select(kept, flat.element, cut)
    return tensor(flat.extents, element, flat.dtype) if element is not None else flat.extents


GATHERS: dict[str, Rule] = {
    "Gather": _gather,
    "GatherND": _gather_nd,
    "GatherElements": _gather_elements,
    "Range": _range,
    "CumSum": _cumulative_sum,
    "Trilu": _triangle,
}
