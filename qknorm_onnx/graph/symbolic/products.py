"""Products and quotients of sizes in one normal form, so that equal ones are equal terms: 12*B*S / (12*B) is S."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from qknorm_onnx.graph.symbolic.terms import Apply, Atom, Dimension, Index, Linear, form_of

Factors = Counter[Linear]


def factors_of(form: Linear) -> tuple[int, Factors]:
    """A number and the factors by which it is multiplied; a sum of several terms is one factor, without its common divisor."""
    if form.number is not None:
        return form.number, Counter()
    if len(form.terms) == 1 and not form.constant:
        ((atom, coefficient),) = form.terms
        if not isinstance(atom, Apply) or atom.function != "product":
            return coefficient, Counter([form_of(atom)])
        number, found = coefficient, Factors()
        for argument in atom.arguments:
            inner, more = factors_of(argument)
            number, found = number * inner, found + more
        return number, found
    divisor = math.gcd(form.constant, *(factor for _, factor in form.terms))
    reduced = Linear(form.constant // divisor, frozenset((atom, factor // divisor) for atom, factor in form.terms))
    return divisor, Counter([reduced])


def product_of(forms: Iterable[Linear]) -> Linear:
    """The product of `forms`."""
    number, found = 1, Factors()
    for form in forms:
        inner, more = factors_of(form)
        number, found = number * inner, found + more
    return _joined(number, found)


def quotient_of(dividend: Linear, divisor: Linear) -> Linear | None:
    """`dividend / divisor` for quotients without remainder, with what both have in common left out; None for a divisor of 0."""
    above, below = factors_of(dividend), factors_of(divisor)
    if not below[0]:
        return None
    shared = math.gcd(above[0], below[0])
    top = _joined(above[0] // shared, above[1] - below[1])
    bottom = _joined(below[0] // shared, below[1] - above[1])
    if bottom.number is not None and abs(bottom.number) == 1:
        return top.times(bottom.number)
    if top == Linear():
        return top
    positive = is_size(top) and is_size(bottom)
    return form_of(Apply("quotient", (top, bottom), nonnegative=positive))


def is_quotient(form: Linear) -> bool:
    """Whether `form` is one division that leaves, or may leave, a remainder."""
    if form.constant or len(form.terms) != 1:
        return False
    ((atom, factor),) = form.terms
    return factor == 1 and isinstance(atom, Apply) and atom.function == "quotient"


def is_size(form: Linear) -> bool:
    """Whether `form` is a sum of sizes and of numbers that are not negative."""
    return form.constant >= 0 and all(factor > 0 and _is_nonnegative(atom) for atom, factor in form.terms)


def _is_nonnegative(atom: Atom) -> bool:
    return isinstance(atom, (Dimension, Index)) or (isinstance(atom, Apply) and atom.nonnegative)


def _joined(number: int, factors: Factors) -> Linear:
    parts = sorted(factors.elements(), key=str)
    if not parts or not number:
        return Linear(number)
    if len(parts) == 1:
        return parts[0].times(number)
    return form_of(Apply("product", tuple(parts), nonnegative=all(map(is_size, parts)))).times(number)
