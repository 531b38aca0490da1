"""Numbers of a given type: functions lifted over selections, rounding of constants, and casts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.symbolic.algebra import is_zero, negate, select, settle
from qknorm_onnx.graph.symbolic.layout import Outcome
from qknorm_onnx.graph.symbolic.tensor import IndexTensor, components_of, plain, stack, tensor
from qknorm_onnx.graph.symbolic.terms import NUMBERS, Element, Extents, Known, Linear, Real, Select, constant

Binary: TypeAlias = Callable[[Linear | Real, Linear | Real, Extents], Element | None]
Entrywise: TypeAlias = Callable[[Sequence[Element], Extents], Element | None]
DEEPEST_SELECTION = 4
_EXACT = {ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT, ir.DataType.DOUBLE}
_NARROW_FLOATS: dict[ir.DataType, type[np.floating]] = {ir.DataType.FLOAT: np.float32, ir.DataType.FLOAT16: np.float16}


def value(number: Linear | Real) -> float | None:
    """The number where it is a constant."""
    return number.value if isinstance(number, Real) else number.number


def equal(left: Linear | Real, right: Linear | Real, extents: Extents) -> Element | None:
    """Whether two numbers are equal everywhere, nowhere, or under a condition."""
    if isinstance(left, Real) and isinstance(right, Real):
        return Known(left.value == right.value)
    if isinstance(left, Real) or isinstance(right, Real):
        other = right if isinstance(left, Real) else left
        return Known(False) if isinstance(other, Linear) and other.integral else None
    form = left - right
    return settle(is_zero(form), extents) if form.integral or not form.terms else None


def lifted(function: Binary, left: Element, right: Element, extents: Extents, depth: int = DEEPEST_SELECTION) -> Element | None:
    """`function` applied inside selections."""
    for number, other, swapped in ((left, right, False), (right, left, True)):
        if isinstance(number, Select):
            if not depth:
                return None
            pair = [
                lifted(function, other if swapped else part, part if swapped else other, extents, depth - 1)
                for part in (number.when_true, number.when_false)
            ]
            if pair[0] is None or pair[1] is None:
                return None
            return select(number.condition, pair[0], pair[1])
    if not (isinstance(left, (Linear, Real)) and isinstance(right, (Linear, Real))):
        return None
    if any(isinstance(number, Linear) and not number.integral for number in (left, right)):
        return None  # numbers read from float tensors may be NaN or infinite: not even x - x is known
    return function(left, right, extents)


def is_opaque(source: IndexTensor | None) -> bool:
    """Whether nothing can be computed with the numbers of a tensor, as `lifted` finds: most of a model, told at once."""
    return source is not None and isinstance(source.element, Linear) and not source.element.integral


def finished(extents: Extents, element: Element | None, dtype: ir.DataType | None) -> Outcome:
    """The tensor, with constants rounded to its type; sizes alone where the type cannot hold the term exactly."""
    if element is None or not _holds(element, dtype):
        return extents
    return tensor(extents, _rounded(element, dtype), dtype)


def entrywise(function: Entrywise, sources: Sequence[IndexTensor | None], dtype: ir.DataType | None) -> IndexTensor | None:
    """`function` applied to each entry of short vectors, such as shapes; None where one is no vector, number or known."""
    known = [source for source in sources if source is not None and source.rank <= 1]
    columns = [components_of(source) if source.rank else (source.element,) for source in known]
    length = max((len(column) for column in columns if column is not None), default=0)
    if len(known) < len(sources) or length < 2 or any(column is None or len(column) not in (1, length) for column in columns):
        return None
    found = []
    for place in range(length):
        entries = [column[place if len(column) > 1 else 0] for column in columns if column is not None]
        if any(entry is None for entry in entries):
            return None
        result = function([entry for entry in entries if entry is not None], ())
        if result is None or not _holds(result, dtype):
            return None
        found.append(_rounded(result, dtype))
    return stack((), found, dtype)


def _holds(element: Element, dtype: ir.DataType | None) -> bool:
    if isinstance(element, Select):
        return _holds(element.when_true, dtype) and _holds(element.when_false, dtype)
    if isinstance(element, Linear) and element.terms:
        return dtype in _EXACT and element.integral
    return True


def _rounded(element: Element, dtype: ir.DataType | None) -> Element:
    if isinstance(element, Select):
        chosen = select(element.condition, _rounded(element.when_true, dtype), _rounded(element.when_false, dtype))
        return chosen if chosen is not None else element
    narrow = _NARROW_FLOATS.get(dtype) if dtype is not None else None
    if narrow is None or not isinstance(element, (Linear, Real)) or value(element) is None:
        return element
    with np.errstate(over="ignore"):
        return constant(float(narrow(value(element))))


def cast(node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    """Rule for Cast."""
    return _converted(sources[0], ir.DataType(node.attributes.get_int("to", 0)))


def cast_like(_node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    """Rule for CastLike."""
    like = sources[1]
    return _converted(sources[0], like.dtype) if like is not None and like.dtype is not None else None


def _converted(source: IndexTensor | None, target: ir.DataType) -> Outcome:
    if source is None:
        return None
    flat = plain(source)
    if flat is None or flat.element is None:
        parts = entrywise(lambda parts, extents: _converted_element(parts[0], target, extents), [source], target)
        return parts or source.extents
    return finished(flat.extents, _converted_element(flat.element, target, flat.extents), target)


def _converted_element(element: Element, target: ir.DataType, extents: Extents) -> Element | None:
    if target == ir.DataType.BOOL:
        if not isinstance(element, NUMBERS):
            return element
        same = lifted(equal, element, Linear(), extents)
        return negate(same) if same is not None and not isinstance(same, NUMBERS) else None
    if not isinstance(element, NUMBERS):
        return select(element, Linear(1), Linear(0))
    return element if _castable(element, target) else None


def _castable(element: Element, target: ir.DataType) -> bool:
    """Whether a cast keeps the term.

    Indices survive in the exact types; fractions, infinities and large numbers in floats (bfloat16: infinities only); small
    integers anywhere.
    """
    if isinstance(element, Select):
        return _castable(element.when_true, target) and _castable(element.when_false, target)
    if isinstance(element, Real):
        wide = target in _NARROW_FLOATS or target == ir.DataType.DOUBLE
        return wide or (target == ir.DataType.BFLOAT16 and math.isinf(element.value))
    if target in _EXACT:
        return True
    return isinstance(element, Linear) and element.number is not None and 0 <= element.number < 128
