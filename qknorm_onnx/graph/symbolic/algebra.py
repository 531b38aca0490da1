"""Rules of index algebra: comparisons, logic, selection, substitution and proofs of sign, over the terms of `index_terms`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from qknorm_onnx.graph.symbolic.products import product_of
from qknorm_onnx.graph.symbolic.terms import (
    FALSE,
    NUMBERS,
    TRUE,
    Apply,
    AtLeastZero,
    Atom,
    Both,
    Dimension,
    Either,
    Element,
    Extents,
    Flag,
    Index,
    IsZero,
    Known,
    Linear,
    Not,
    Number,
    Read,
    Select,
    Truth,
    form_of,
)

MOST_SPLITS = 6  # of one form by its maxima and minima: each doubles what is written


def at_least_zero(form: Linear, splits: int = MOST_SPLITS) -> Truth:
    """`form >= 0`, with absolute values, maxima and minima spelled as logic, `splits` of them inside each other."""
    if form.number is not None:
        return Known(form.number >= 0)
    for atom, factor in form.terms:
        if splits and isinstance(atom, Apply) and atom.function in ("absolute", "maximum", "minimum"):
            rest = form - form_of(atom).times(factor)
            first, second = atom.arguments if len(atom.arguments) == 2 else (atom.arguments[0], -atom.arguments[0])
            parts = [at_least_zero(rest + part.times(factor), splits - 1) for part in (first, second)]
            is_conjunction = (factor > 0) == (atom.function == "minimum")
            return both(*parts) if is_conjunction else either(*parts)
    divisor = math.gcd(*(factor for _, factor in form.terms))
    if divisor > 1 and form.integral:
        return AtLeastZero(Linear(form.constant // divisor, frozenset((atom, factor // divisor) for atom, factor in form.terms)))
    return AtLeastZero(form)


def is_zero(form: Linear) -> Truth:
    """`form == 0`."""
    if form.number is not None:
        return Known(form.number == 0)
    divisor = math.gcd(*(factor for _, factor in form.terms))
    if form.integral and form.constant % divisor:
        return FALSE
    return IsZero(form)


def negate(truth: Truth) -> Truth:
    """Not `truth`, pushed down to the comparisons."""
    if isinstance(truth, Known):
        return Known(not truth.value)
    if isinstance(truth, Not):
        return truth.operand
    if isinstance(truth, AtLeastZero):
        return AtLeastZero((-truth.form).plus(-1))
    if isinstance(truth, Both):
        return either(*map(negate, truth.operands))
    if isinstance(truth, Either):
        return both(*map(negate, truth.operands))
    return Not(truth)


def both(*operands: Truth) -> Truth:
    """Conjunction, flattened; False where it holds a term and its opposite."""
    parts: set[Truth] = set()
    for operand in operands:
        parts.update(operand.operands if isinstance(operand, Both) else [operand])
    parts.discard(TRUE)
    if FALSE in parts or any(isinstance(part, Not) and part.operand in parts for part in parts):
        return FALSE
    if len(parts) <= 1:
        return parts.pop() if parts else TRUE
    return Both(frozenset(parts))


def either(*operands: Truth) -> Truth:
    """Disjunction, flattened; True where it holds a term and its opposite."""
    parts: set[Truth] = set()
    for operand in operands:
        parts.update(operand.operands if isinstance(operand, Either) else [operand])
    parts.discard(FALSE)
    if TRUE in parts or any(isinstance(part, Not) and part.operand in parts for part in parts):
        return TRUE
    if len(parts) <= 1:
        return parts.pop() if parts else FALSE
    return Either(frozenset(parts))


def conjuncts(truth: Truth) -> tuple[Truth, ...]:
    """The terms of a conjunction; one term otherwise."""
    return tuple(truth.operands) if isinstance(truth, Both) else (truth,)


def select(condition: Truth, when_true: Element, when_false: Element) -> Element | None:
    """`condition ? when_true : when_false`; None when a number meets a truth value."""
    if when_true == when_false:
        return when_true
    if isinstance(condition, Known):
        return when_true if condition.value else when_false
    if isinstance(when_true, NUMBERS) and isinstance(when_false, NUMBERS):
        return Select(condition, _assume(when_true, condition, True), _assume(when_false, condition, False))
    if isinstance(when_true, NUMBERS) or isinstance(when_false, NUMBERS):
        return None
    return either(both(condition, when_true), both(negate(condition), when_false))


def _assume(number: Number, condition: Truth, holds: bool) -> Number:
    """`number` where it is known whether `condition` holds."""
    while isinstance(number, Select):
        if number.condition == condition:
            number = number.when_true if holds else number.when_false
        elif number.condition == negate(condition):
            number = number.when_false if holds else number.when_true
        else:
            return number
    return number


def substitute(element: Element, mapping: Mapping[int, Linear]) -> Element:
    """`element` with the index variable of axis a replaced by `mapping[a]`, all at once."""
    if isinstance(element, Linear):
        return substitute_form(element, mapping)
    if isinstance(element, Select):
        parts = [substitute(part, mapping) for part in (element.condition, element.when_true, element.when_false)]
        chosen = select(*parts)  # type: ignore[arg-type]
        assert chosen is not None
        return chosen
    if isinstance(element, AtLeastZero):
        return at_least_zero(substitute_form(element.form, mapping))
    if isinstance(element, IsZero):
        return is_zero(substitute_form(element.form, mapping))
    if isinstance(element, Flag):
        return Flag(_substitute_read(element.read, mapping))
    if isinstance(element, Not):
        return negate(substitute(element.operand, mapping))  # type: ignore[arg-type]
    if isinstance(element, Both):
        return both(*(substitute(part, mapping) for part in element.operands))  # type: ignore[arg-type]
    if isinstance(element, Either):
        return either(*(substitute(part, mapping) for part in element.operands))  # type: ignore[arg-type]
    return element


def substitute_form(form: Linear, mapping: Mapping[int, Linear]) -> Linear:
    """`form` with index variables replaced."""
    result = Linear(form.constant)
    for atom, factor in form.terms:
        result = result + _substitute_atom(atom, mapping).times(factor)
    return result


def _substitute_atom(atom: Atom, mapping: Mapping[int, Linear]) -> Linear:
    if isinstance(atom, Index):
        return mapping.get(atom.axis, form_of(atom))
    if isinstance(atom, Read):
        return form_of(_substitute_read(atom, mapping))
    if isinstance(atom, Apply):
        arguments = tuple(substitute_form(part, mapping) for part in atom.arguments)
        if atom.function == "product":
            return product_of(arguments)
        return form_of(Apply(atom.function, arguments, atom.nonnegative))
    return form_of(atom)


def _substitute_read(read: Read, mapping: Mapping[int, Linear]) -> Read:
    return Read(read.value, tuple(substitute_form(part, mapping) for part in read.indices), read.integral)


def proven_nonnegative(form: Linear, extents: Extents) -> bool:
    """Whether `form >= 0` for every index inside `extents` and all sizes; False means not proven.

    An index with a negative factor is largest at its extent less one, one with a positive factor is smallest at 0; dimensions
    have their least size, and nothing is known of numbers read from tensors.
    """
    lowest = Linear(form.constant)
    for atom, factor in form.terms:
        if isinstance(atom, Index):
            if factor < 0:
                if atom.axis >= len(extents):
                    return False
                lowest = lowest + extents[atom.axis].plus(-1).times(factor)
        else:
            lowest = lowest + form_of(atom).times(factor)
    if not all(factor > 0 and _least(atom) is not None for atom, factor in lowest.terms):
        return False
    return lowest.constant + sum(factor * (_least(atom) or 0) for atom, factor in lowest.terms) >= 0


def _least(atom: Atom) -> int | None:
    """The smallest value of an atom, None where it has none."""
    if isinstance(atom, Dimension):
        return atom.least
    return 0 if isinstance(atom, Apply) and atom.nonnegative else None


def settle(truth: Truth, extents: Extents) -> Truth:
    """`truth` with the comparisons decided that hold, or fail, everywhere inside `extents`."""
    if isinstance(truth, AtLeastZero):
        if proven_nonnegative(truth.form, extents):
            return TRUE
        return FALSE if proven_nonnegative((-truth.form).plus(-1), extents) and truth.form.integral else truth
    if isinstance(truth, IsZero):
        apart = any(proven_nonnegative(form.plus(-1), extents) for form in (truth.form, -truth.form))
        return FALSE if apart and truth.form.integral else truth
    if isinstance(truth, Not):
        return negate(settle(truth.operand, extents))
    if isinstance(truth, Both):
        return both(*(settle(part, extents) for part in truth.operands))
    if isinstance(truth, Either):
        return either(*(settle(part, extents) for part in truth.operands))
    return truth
