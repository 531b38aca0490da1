"""Reads a condition on (query index, key index) as limits `j <= i + a` and `j >= i + a`, and says in words why one is none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from qknorm_onnx.graph.symbolic.algebra import conjuncts
from qknorm_onnx.graph.symbolic.terms import (
    FALSE,
    TRUE,
    Apply,
    AtLeastZero,
    Both,
    Either,
    Flag,
    Index,
    IsZero,
    Linear,
    Not,
    Read,
    Truth,
    index,
)

_NEAR = 40


@dataclass(frozen=True)
class Limit:
    """`j <= i + offset` where `upper`, else `j >= i + offset`."""

    upper: bool
    offset: Linear


def limits_of(truth: Truth, *, query_axis: int, key_axis: int, single_query: bool) -> tuple[list[Limit], list[str]]:
    """The limits in a conjunction and a reason for each part of it that is none.

    `single_query`: there is exactly one query, so that a condition without the query index is a limit for i = 0.
    """
    limits: list[Limit] = []
    reasons: list[str] = []
    for part in conjuncts(truth):
        if part == TRUE:
            continue
        found = _limits(part, query_axis, key_axis, single_query)
        limits.extend(found)
        if not found:
            reasons.append(_reason(part, query_axis, key_axis))
    return limits, sorted(set(reasons))


def _limits(part: Truth, query_axis: int, key_axis: int, single_query: bool) -> list[Limit]:
    if not isinstance(part, (AtLeastZero, IsZero)):
        return []
    query, key = part.form.coefficient(Index(query_axis)), part.form.coefficient(Index(key_axis))
    rest = part.form - index(query_axis).times(query) - index(key_axis).times(key)
    if abs(key) != 1 or not (query == -key or (single_query and query == 0)) or _varies(rest, (query_axis, key_axis)):
        return []
    if isinstance(part, IsZero):
        offset = rest if key == -1 else -rest
        return [Limit(True, offset), Limit(False, offset)]
    return [Limit(True, rest) if key == -1 else Limit(False, -rest)]


def _varies(form: Linear, axes: tuple[int, int]) -> bool:
    """Whether `form` is not one number for a row of the batch: an integer that is read for each row is."""
    bare = any(isinstance(atom, Index) for atom, _ in form.terms)
    applied = [axis for atom, _ in form.terms if isinstance(atom, Apply) for inner in atom.arguments for axis in _indices(inner)]
    return bare or bool(applied) or any(axis != 0 or axis in axes for axis in _indices(form))


def _indices(form: Linear) -> Iterator[int]:
    for atom, _ in form.terms:
        if isinstance(atom, Index):
            yield atom.axis
        for inner in atom.indices if isinstance(atom, Read) else atom.arguments if isinstance(atom, Apply) else ():
            yield from _indices(inner)


def _reason(part: Truth, query_axis: int, key_axis: int) -> str:
    if part == FALSE:
        return "it hides every key"
    reads = sorted({_source(read) for read in _reads(part)})
    if reads:
        return f"it depends on the values of {' and '.join(reads)}"
    forms = list(_forms(part))
    if any(isinstance(atom, Apply) and atom.function == "quotient" for form in forms for atom, _ in form.terms):
        return "it lets a query see the keys of its own chunk, which is no window"
    used = {axis for form in forms for axis in _indices(form)}
    if used - {query_axis, key_axis}:
        return "it differs between the batch rows or heads"
    if query_axis not in used:
        return "it is the same for every query, so it is neither causality nor a window"
    return f"its condition on positions is no band along the diagonal: {_text(part, query_axis, key_axis)}"


def _source(read: Read) -> str:
    node = read.value.producer()
    if node is None:
        return f"'{read.value.name}' (a graph input)"
    roots = inputs_behind(read.value)
    return f"'{read.value.name}' ({node.op_type}{' of ' if roots else ''}{' and '.join(roots)})"


def inputs_behind(value: ir.Value) -> list[str]:
    """The names, in quotes, of the inputs that a value hangs on by at most `_NEAR` values in between; none where by more."""
    seen, pending, roots = set[ir.Value](), [value], set[str]()
    while pending and len(seen) < _NEAR:
        current = pending.pop()
        node = current.producer()
        if current in seen or node is None:
            roots |= {f"'{current.name}'"} if node is None and not current.is_initializer() else set()
            continue
        seen.add(current)
        if node.op_type not in ("Shape", "Constant"):
            pending.extend(source for source in node.inputs if source is not None)
    return [] if pending else sorted(roots)


def _forms(truth: Truth) -> Iterator[Linear]:
    if isinstance(truth, (AtLeastZero, IsZero)):
        yield truth.form
    elif isinstance(truth, Not):
        yield from _forms(truth.operand)
    elif isinstance(truth, (Both, Either)):
        for operand in truth.operands:
            yield from _forms(operand)


def _reads(truth: Truth) -> Iterator[Read]:
    if isinstance(truth, Flag):
        yield truth.read
    elif isinstance(truth, Not):
        yield from _reads(truth.operand)
    elif isinstance(truth, (Both, Either)):
        for operand in truth.operands:
            yield from _reads(operand)
    for form in _forms(truth) if isinstance(truth, (AtLeastZero, IsZero)) else ():
        yield from _form_reads(form)


def _form_reads(form: Linear) -> Iterator[Read]:
    for atom, _ in form.terms:
        if isinstance(atom, Read):
            yield atom
        elif isinstance(atom, Apply):
            for inner in atom.arguments:
                yield from _form_reads(inner)


def _text(truth: Truth, query_axis: int, key_axis: int) -> str:
    """The condition with q and k for the two indices."""
    if isinstance(truth, (AtLeastZero, IsZero)):
        sign = ">=" if isinstance(truth, AtLeastZero) else "=="
        text = str(truth.form)
        return f"{text} {sign} 0".replace(f"i{query_axis}", "q").replace(f"i{key_axis}", "k")
    if isinstance(truth, (Both, Either)):
        joint = " and " if isinstance(truth, Both) else " or "
        return "(" + joint.join(sorted(_text(part, query_axis, key_axis) for part in truth.operands)) + ")"
    return f"not {_text(truth.operand, query_axis, key_axis)}" if isinstance(truth, Not) else str(truth)
