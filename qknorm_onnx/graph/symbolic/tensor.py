"""A tensor as a function of its index: extents and one element term, or one term per entry of a short last axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.symbolic.algebra import both, negate, select, substitute
from qknorm_onnx.graph.symbolic.terms import (
    ONE,
    TRUE,
    AtLeastZero,
    Element,
    Extents,
    Known,
    Linear,
    PartialExtents,
    Truth,
    constant,
    index,
)

LONGEST_STACK = 64
LARGEST_TABLE = 2**24


@dataclass(frozen=True, slots=True)
class IndexTensor:
    """Element at index `(i0, .., i{r-1})` of a tensor with sizes `extents`.

    `element` is a term in `Index(0) .. Index(r-1)`; or `components` holds one term for each entry of the last axis (shape
    vectors, index grids) and `element` is None.  No term mentions the index of an axis of size 1.
    """

    extents: Extents
    element: Element | None
    dtype: ir.DataType | None
    components: tuple[Element, ...] = ()

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.extents)


def tensor(extents: Sequence[Linear], element: Element, dtype: ir.DataType | None) -> IndexTensor:
    """A tensor whose element is `element`; indices of axes of size 1 become 0."""
    single = {axis: Linear() for axis, extent in enumerate(extents) if extent == ONE}
    return IndexTensor(tuple(extents), substitute(element, single) if single else element, dtype)


def stack(leading: Sequence[Linear], components: Sequence[Element], dtype: ir.DataType | None) -> IndexTensor:
    """A tensor of sizes `(*leading, len(components))` with one term per entry of its last axis."""
    extents = (*leading, Linear(len(components)))
    if len(components) < 2:
        return tensor(extents, components[0] if components else Linear(), dtype)
    single = {axis: Linear() for axis, extent in enumerate(leading) if extent == ONE}
    return IndexTensor(extents, None, dtype, tuple(substitute(part, single) for part in components))


def components_of(source: IndexTensor) -> tuple[Element, ...] | None:
    """The entries along the last axis, where that axis is short and of known length."""
    if source.components:
        return source.components
    length = source.extents[-1].number if source.extents else None
    if length is None or length > LONGEST_STACK or source.element is None:
        return None
    last = source.rank - 1
    return tuple(substitute(source.element, {last: Linear(position)}) for position in range(length))


def plain(source: IndexTensor) -> IndexTensor | None:
    """The same tensor with one element term: entries that are equal, or that grow by a constant step."""
    if not source.components:
        return source
    first, second = source.components[:2]
    if all(part == first for part in source.components):
        return tensor(source.extents, first, source.dtype)
    if not all(isinstance(part, Linear) for part in source.components):
        return None
    step = (second - first).number  # type: ignore[operator]
    if step is None or any(part != first.plus(step * at) for at, part in enumerate(source.components)):  # type: ignore[union-attr]
        return None
    return tensor(source.extents, first + index(source.rank - 1).times(step), source.dtype)  # type: ignore[operator]


def relabel(source: IndexTensor, extents: Sequence[Linear], mapping: Mapping[int, Linear]) -> IndexTensor | None:
    """The tensor of sizes `extents` whose element is that of `source` with axis a read at `mapping[a]`."""
    last = source.rank - 1
    if source.components and extents and mapping.get(last) == index(len(extents) - 1) and extents[-1] == source.extents[-1]:
        return stack(extents[:-1], [substitute(part, mapping) for part in source.components], source.dtype)
    flat = plain(source)
    if flat is None or flat.element is None:
        return None
    return tensor(extents, substitute(flat.element, mapping), source.dtype)


def broadcast_sizes(shapes: Sequence[Extents]) -> PartialExtents:
    """The common sizes by ONNX's broadcasting; None for one where two sizes meet of which neither is known to be that."""
    rank = max(map(len, shapes), default=0)
    result: list[Linear | None] = []
    for axis in range(rank):
        meeting = {shape[axis - rank + len(shape)] for shape in shapes if axis - rank + len(shape) >= 0} - {ONE}
        numbers = {extent for extent in meeting if extent.number is not None}
        certain = meeting if len(meeting) == 1 else numbers
        result.append(ONE if not meeting else next(iter(certain)) if len(certain) == 1 else None)
    return tuple(result)


def broadcast_extents(shapes: Sequence[Extents]) -> Extents | None:
    """The common sizes; None where equal sizes are not proven."""
    sizes = broadcast_sizes(shapes)
    known = tuple(size for size in sizes if size is not None)
    fitting = all(extent in (ONE, size) for shape in shapes for extent, size in zip(shape[::-1], known[::-1], strict=False))
    return known if len(known) == len(sizes) and fitting else None


def broadcast(sources: Sequence[IndexTensor | None]) -> tuple[Extents, list[Element]] | None:
    """Common sizes and the element terms over the common index; None where one is unknown or the sizes do not fit."""
    flats = [plain(source) if source is not None else None for source in sources]
    known = [flat for flat in flats if flat is not None and flat.element is not None]
    extents = broadcast_extents([flat.extents for flat in known])
    if extents is None or len(known) < len(sources):
        return None
    return extents, [_shifted(flat, len(extents) - flat.rank) for flat in known]


def _shifted(source: IndexTensor, shift: int) -> Element:
    assert source.element is not None
    if not shift:
        return source.element
    return substitute(source.element, {axis: index(axis + shift) for axis in range(source.rank)})


def integers(source: IndexTensor | None) -> list[int] | None:
    """The entries of a vector (or a scalar) of constant integers."""
    if source is None:
        return None
    parts = components_of(source) if source.rank == 1 else (source.element,) if source.rank == 0 else None
    numbers = [part.number if isinstance(part, Linear) else None for part in parts or ()]
    return None if parts is None or None in numbers else [number for number in numbers if number is not None]


def forms(source: IndexTensor | None) -> list[Linear] | None:
    """The entries of a vector (or a scalar) of integers as forms."""
    if source is None:
        return None
    parts = components_of(source) if source.rank == 1 else (source.element,) if source.rank == 0 else None
    if parts is None or not all(isinstance(part, Linear) for part in parts):
        return None
    return [part for part in parts if isinstance(part, Linear)]


def constant_element(number: object) -> Element:
    """A NumPy scalar as a term."""
    if isinstance(number, (bool, np.bool_)):
        return Known(bool(number))
    if isinstance(number, np.integer):
        return Linear(int(number))
    return constant(float(number))  # type: ignore[arg-type]


def constant_tensor(array: np.ndarray, dtype: ir.DataType) -> IndexTensor | None:
    """A constant as a term in its index: a uniform one, a short vector, or a table with two values whose border is a band.

    None for any other table, for which nothing general can be said.
    """
    if dtype == ir.DataType.STRING:
        return None
    extents = tuple(map(Linear, array.shape))
    if array.size == 0:
        return tensor(extents, Linear() if dtype != ir.DataType.BOOL else TRUE, dtype)
    first = array.reshape(-1)[0]
    if array.size == 1:
        return tensor(extents, constant_element(first), dtype)
    if array.ndim == 1 and array.size <= LONGEST_STACK:
        return stack((), [constant_element(entry) for entry in array], dtype)
    steps = _steps(array)
    if steps is not None:
        grown = [index(axis).times(step) for axis, step in enumerate(steps) if step]
        return tensor(extents, sum(grown, Linear(int(first))), dtype)
    same = array == first
    if same.all():
        return tensor(extents, constant_element(first), dtype)
    if array.ndim < 2 or array.size > LARGEST_TABLE or array.size != array.shape[-1] * array.shape[-2]:
        return None
    other = array[~same][0]
    if not (same | (array == other)).all():
        return None
    band = _band(same.reshape(array.shape[-2:]), array.ndim)
    element = select(band, constant_element(first), constant_element(other)) if band is not None else None
    return tensor(extents, element, dtype) if element is not None else None


def _steps(array: np.ndarray) -> tuple[int, ...] | None:
    """By how much integers grow from one entry to the next along each axis; None where that is not the same everywhere."""
    if not np.issubdtype(array.dtype, np.integer):
        return None
    wide = array.astype(np.int64)
    origin = (0,) * array.ndim
    steps = [
        int(wide[tuple(int(axis == place) for axis in range(array.ndim))] - wide[origin]) if size > 1 else 0
        for place, size in enumerate(array.shape)
    ]
    grown = wide[origin] + sum(
        step * np.arange(size).reshape([-1 if axis == place else 1 for axis in range(array.ndim)])
        for place, (step, size) in enumerate(zip(steps, array.shape, strict=True))
    )
    return tuple(steps) if np.array_equal(wide, grown) else None


def _band(inside: np.ndarray, rank: int) -> Truth | None:
    """The condition on the last two indices that is true exactly where `inside` is, if that is a band or its complement."""
    for wanted, table in ((True, inside), (False, ~inside)):
        rows, columns = table.shape
        filled = table.any(axis=1)
        at = np.arange(rows)[filled]
        lower = int((at - table[filled].argmax(axis=1)).max())
        upper = int((columns - 1 - table[filled][:, ::-1].argmax(axis=1) - at).max())
        if not np.array_equal(table, np.tri(rows, columns, upper, bool) & ~np.tri(rows, columns, -lower - 1, bool)):
            continue
        ahead = index(rank - 1) - index(rank - 2)
        right = TRUE if upper >= columns - 1 else AtLeastZero(Linear(upper) - ahead)
        left = TRUE if lower >= rows - 1 else AtLeastZero(Linear(lower) + ahead)
        return both(left, right) if wanted else negate(both(left, right))
    return None
