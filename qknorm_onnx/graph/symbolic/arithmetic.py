"""Rules for element-wise ops: arithmetic, comparison, logic and selection.

A rule of element-wise ops is lifted over `Select`, so `(1 - cast(mask)) * fill` is a selection between 0 and fill again.
Arithmetic stays symbolic in types that hold indices exactly (int32, int64, float32, float64); elsewhere only constants are
computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import onnx_ir as ir

from qknorm_onnx.graph.symbolic.algebra import (
    at_least_zero,
    both,
    either,
    is_zero,
    negate,
    proven_nonnegative,
    select,
    settle,
)
from qknorm_onnx.graph.symbolic.layout import Outcome, Rule
from qknorm_onnx.graph.symbolic.numbers import Binary, cast, cast_like, entrywise, equal, finished, is_opaque, lifted, value
from qknorm_onnx.graph.symbolic.products import is_quotient, product_of, quotient_of
from qknorm_onnx.graph.symbolic.tensor import IndexTensor, broadcast, broadcast_sizes, plain, tensor
from qknorm_onnx.graph.symbolic.terms import (
    NUMBERS,
    Apply,
    Element,
    Extents,
    Known,
    Linear,
    PartialExtents,
    Real,
    constant,
    form_of,
)


def _folded(function: Callable[[float, float], float], left: Linear | Real, right: Linear | Real) -> Element | None:
    """The constant that two constants give; None where one is not constant."""
    first, second = value(left), value(right)
    return constant(function(first, second)) if first is not None and second is not None else None


def add(left: Linear | Real, right: Linear | Real, _extents: Extents) -> Element | None:
    """The sum."""
    if isinstance(left, Linear) and isinstance(right, Linear):
        return left + right
    return _folded(lambda a, b: a + b, left, right)


def subtract(left: Linear | Real, right: Linear | Real, _extents: Extents) -> Element | None:
    """The difference."""
    if isinstance(left, Linear) and isinstance(right, Linear):
        return left - right
    return _folded(lambda a, b: a - b, left, right)


def multiply(left: Linear | Real, right: Linear | Real, extents: Extents) -> Element | None:
    """The product."""
    if isinstance(left, Linear) and isinstance(right, Linear):
        if left.number is not None or right.number is not None:
            return right.times(left.number) if left.number is not None else left.times(right.number or 0)
        found = product_of((left, right))
        ((atom, factor),) = found.terms
        if isinstance(atom, Apply) and proven_nonnegative(left, extents) and proven_nonnegative(right, extents):
            return form_of(replace(atom, nonnegative=True)).times(factor)
        return found
    return _folded(lambda a, b: a * b, left, right)


def _divided_exactly(left: Linear, divisor: int) -> Linear | None:
    if divisor and left.constant % divisor == 0 and all(factor % divisor == 0 for _, factor in left.terms):
        return Linear(left.constant // divisor, frozenset((atom, factor // divisor) for atom, factor in left.terms))
    return None


def divide_integers(left: Linear | Real, right: Linear | Real, extents: Extents) -> Element | None:
    """Integer division; towards zero and downwards are the same for the quotients that are kept."""
    if not (isinstance(left, Linear) and isinstance(right, Linear)):
        return None
    exact = _divided_exactly(left, right.number) if right.number else None
    if exact is not None:
        return exact
    reduced = quotient_of(left, right)
    if reduced is None or not is_quotient(reduced):
        return reduced
    if not (proven_nonnegative(left, extents) and proven_nonnegative(right, extents)):
        return None
    if left.number is not None and right.number is not None:
        return Linear(left.number // right.number)
    ((atom, _),) = reduced.terms
    return form_of(replace(atom, nonnegative=True)) if isinstance(atom, Apply) else reduced


def _divide_reals(left: Linear | Real, right: Linear | Real, _extents: Extents) -> Element | None:
    divisor = value(right)
    if isinstance(left, Linear) and isinstance(right, Linear) and right.number:
        exact = _divided_exactly(left, right.number)
        if exact is not None:
            return exact
    return _folded(lambda a, b: a / b, left, right) if divisor else None


def remainder(left: Linear | Real, right: Linear | Real, extents: Extents) -> Element | None:
    """What an integer division by a positive number leaves."""
    if not (isinstance(left, Linear) and isinstance(right, Linear) and right.number and right.number > 0):
        return None
    if _divided_exactly(left, right.number) is not None:
        return Linear()
    if not proven_nonnegative(left, extents):
        return None
    if left.number is not None:
        return Linear(left.number % right.number)
    return form_of(Apply("remainder", (left, right), nonnegative=True))


def larger(left: Linear | Real, right: Linear | Real, extents: Extents) -> Element | None:
    """The maximum."""
    if isinstance(left, Linear) and isinstance(right, Linear):
        if proven_nonnegative(left - right, extents):
            return left
        if proven_nonnegative(right - left, extents):
            return right
        positive = proven_nonnegative(left, extents) or proven_nonnegative(right, extents)
        return form_of(Apply("maximum", (left, right), positive))
    return _folded(max, left, right)


def smaller(left: Linear | Real, right: Linear | Real, extents: Extents) -> Element | None:
    """The minimum."""
    if isinstance(left, Linear) and isinstance(right, Linear):
        if proven_nonnegative(left - right, extents):
            return right
        if proven_nonnegative(right - left, extents):
            return left
        positive = proven_nonnegative(left, extents) and proven_nonnegative(right, extents)
        return form_of(Apply("minimum", (left, right), positive))
    return _folded(min, left, right)


def _not_less(left: Linear | Real, right: Linear | Real, extents: Extents) -> Element | None:
    """`left >= right`; a bound that is no integer is rounded to the next one."""
    if isinstance(left, Real) and isinstance(right, Real):
        return Known(left.value >= right.value)
    if isinstance(right, Real) and isinstance(left, Linear):
        if not math.isfinite(right.value):
            return Known(right.value == -math.inf)
        right = Linear(math.ceil(right.value))
    elif isinstance(left, Real):
        if not math.isfinite(left.value):
            return Known(left.value == math.inf)
        left = Linear(math.floor(left.value))
    assert isinstance(left, Linear) and isinstance(right, Linear)
    form = left - right
    return settle(at_least_zero(form), extents) if form.integral else None


def _greater(left: Linear | Real, right: Linear | Real, extents: Extents) -> Element | None:
    """`left > right` is not `right >= left`, but for NaN, which no index is."""
    if any(isinstance(side, Real) and math.isnan(side.value) for side in (left, right)):
        return Known(False)
    found = _not_less(right, left, extents)
    return negate(found) if found is not None and not isinstance(found, NUMBERS) else None


def _elementwise(function: Binary, *, logical: bool = False) -> Rule:
    """A rule for two or more inputs, folded from the left."""

    def rule(_node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
        dtype = ir.DataType.BOOL if logical else sources[0].dtype if sources[0] is not None else None
        if any(map(is_opaque, sources)):
            return _sizes(sources)
        joined = broadcast(sources)
        if joined is None:
            return entrywise(folded, sources, dtype) or _sizes(sources)
        extents, elements = joined
        return finished(extents, folded(elements, extents), dtype)

    def folded(elements: Sequence[Element], extents: Extents) -> Element | None:
        element: Element | None = elements[0]
        for other in elements[1:]:
            element = lifted(function, element, other, extents) if element is not None else None
        return element

    return rule


def _sizes(sources: Sequence[IndexTensor | None]) -> PartialExtents | None:
    if any(source is None for source in sources):
        return None
    return broadcast_sizes([source.extents for source in sources if source is not None])


def _divide(node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    dtype = sources[0].dtype if sources[0] is not None else None
    whole = dtype in (ir.DataType.INT32, ir.DataType.INT64)
    return _elementwise(divide_integers if whole else _divide_reals)(node, sources)


def _modulo(node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    return _elementwise(remainder)(node, sources)


def _equality(node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    if all(source is not None and source.dtype == ir.DataType.BOOL for source in sources):
        return _logic(lambda a, b: either(both(a, b), both(negate(a), negate(b))))(node, sources)  # type: ignore[arg-type]
    return _elementwise(equal, logical=True)(node, sources)


def _logic(function: Callable[[Element, Element], Element]) -> Rule:
    def rule(_node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
        joined = broadcast(sources)
        if joined is None:
            return entrywise(joined_truths, sources, ir.DataType.BOOL) or _sizes(sources)
        extents, elements = joined
        element = joined_truths(elements, extents)
        return tensor(extents, element, ir.DataType.BOOL) if element is not None else extents

    def joined_truths(elements: Sequence[Element], _extents: Extents) -> Element | None:
        left, right = elements
        return None if isinstance(left, NUMBERS) or isinstance(right, NUMBERS) else function(left, right)

    return rule


def _unary(function: Callable[[Linear | Real, Extents], Element | None], *, logical: bool = False) -> Rule:
    return _elementwise_one(lambda number, _zero, extents: function(number, extents), logical=logical)


def _elementwise_one(function: Binary, *, logical: bool) -> Rule:
    def rule(_node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
        if sources[0] is None:
            return None
        if is_opaque(sources[0]):
            return sources[0].extents
        flat, dtype = plain(sources[0]), ir.DataType.BOOL if logical else sources[0].dtype
        if flat is None or flat.element is None:
            return entrywise(applied, sources[:1], dtype) or sources[0].extents
        return finished(flat.extents, applied([flat.element], flat.extents), dtype)

    def applied(elements: Sequence[Element], extents: Extents) -> Element | None:
        return lifted(function, elements[0], Linear(), extents)

    return rule


def _absolute(number: Linear | Real, extents: Extents) -> Element | None:
    if isinstance(number, Real):
        return Real(abs(number.value))
    if proven_nonnegative(number, extents):
        return number
    return -number if proven_nonnegative(-number, extents) else form_of(Apply("absolute", (number,), nonnegative=True))


def _sign(number: Linear | Real, extents: Extents) -> Element | None:
    if isinstance(number, Real) or not number.integral:
        return None
    zero, positive = settle(is_zero(number), extents), settle(at_least_zero(number), extents)
    beyond = select(positive, Linear(1), Linear(-1))
    return select(zero, Linear(), beyond) if beyond is not None else None


def _not(_node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    source = sources[0]
    if source is None or source.element is None or isinstance(source.element, NUMBERS):
        return source.extents if source is not None else None
    return tensor(source.extents, negate(source.element), ir.DataType.BOOL)


def _where(_node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    dtype = sources[1].dtype if sources[1] is not None else None
    joined = broadcast(sources)
    if joined is None:
        return entrywise(_selected, sources, dtype) or _sizes(sources)
    extents, elements = joined
    return finished(extents, _selected(elements, extents), dtype)


def _selected(elements: Sequence[Element], _extents: Extents) -> Element | None:
    condition, when_true, when_false = elements
    return None if isinstance(condition, NUMBERS) else select(condition, when_true, when_false)


def _is_nan(number: Linear | Real, _extents: Extents) -> Element | None:
    if isinstance(number, Real):
        return Known(math.isnan(number.value))
    return Known(False) if number.integral else None


def _rounding(number: Linear | Real, _extents: Extents) -> Element | None:
    return number if isinstance(number, Linear) and number.integral else None


def _negated(number: Linear | Real, _extents: Extents) -> Element | None:
    return -number if isinstance(number, Linear) else Real(-number.value)


ARITHMETIC: dict[str, Rule] = {
    "Add": _elementwise(add),
    "Sub": _elementwise(subtract),
    "Mul": _elementwise(multiply),
    "Div": _divide,
    "Mod": _modulo,
    "Max": _elementwise(larger),
    "Min": _elementwise(smaller),
    "Neg": _unary(_negated),
    "Abs": _unary(_absolute),
    "Sign": _unary(_sign),
    "Floor": _unary(_rounding),
    "Ceil": _unary(_rounding),
    "Round": _unary(_rounding),
    "IsNaN": _unary(_is_nan, logical=True),
    "GreaterOrEqual": _elementwise(_not_less, logical=True),
    "Greater": _elementwise(_greater, logical=True),
    "LessOrEqual": _elementwise(lambda a, b, e: _not_less(b, a, e), logical=True),
    "Less": _elementwise(lambda a, b, e: _greater(b, a, e), logical=True),
    "Equal": _equality,
    "And": _logic(both),  # type: ignore[arg-type]
    "Or": _logic(either),  # type: ignore[arg-type]
    "Xor": _logic(lambda a, b: either(both(a, negate(b)), both(negate(a), b))),  # type: ignore[arg-type]
    "Not": _not,
    "Where": _where,
    "Cast": cast,
    "CastLike": cast_like,
}

LOGICAL = frozenset(["IsNaN", "GreaterOrEqual", "Greater", "LessOrEqual", "Less", "Equal", "And", "Or", "Xor", "Not"])
