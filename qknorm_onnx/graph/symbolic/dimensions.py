"""Sizes as forms, and forms as the dimensions that a file stores: numbers, names, or expressions of names."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Final

import onnx_ir as ir

from qknorm_onnx.graph.symbolic.expression import parsed_dimension
from qknorm_onnx.graph.symbolic.terms import Apply, Atom, Dimension, Linear, form_of

# A model names the same few sizes at every value.
MOST_NAMES: Final = 1 << 12

Dim = int | str | None
Dims = list[Dim]


def form_of_dim(dim: int | ir.SymbolicDim | str | None) -> Linear | None:
    """A dimension of a file as a form; None where it has no name."""
    if isinstance(dim, int):
        return Linear(dim)
    name = dim.value if isinstance(dim, ir.SymbolicDim) else dim
    return None if name is None else _form_of_name(name)


def is_expression(name: str) -> bool:
    """Whether a dimension's name is one name, or an expression of names and numbers."""
    return _parsed(name) is not None


def dim_of_form(form: Linear) -> Dim:
    """A form as a dimension of a file, such that `form_of_dim` reads it back; None where its parts have no names."""
    if form.number is not None:
        return form.number if form.number >= 0 else None
    name = _single_name(form)
    if name is not None:
        return name
    text = _text(form)
    return text if text is not None and form_of_dim(text) == form else None


def names_in(form: Linear) -> Iterator[str]:
    """The names that a form is made of."""
    for atom, _ in form.terms:
        if isinstance(atom, Dimension):
            yield atom.name
        elif isinstance(atom, Apply):
            for argument in atom.arguments:
                yield from names_in(argument)


def plain_dims(shape: ir.Shape | None) -> Dims | None:
    """The dimensions of a shape as numbers and names."""
    return None if shape is None else [dim if isinstance(dim, int) else dim.value for dim in shape]


def forms_of_shape(shape: Sequence[Dim] | None) -> list[Linear | None] | None:
    """The sizes of a shape as forms."""
    return None if shape is None else [form_of_dim(dim) for dim in shape]


def _named(name: str) -> Linear:
    return form_of(Dimension(name))


@functools.lru_cache(MOST_NAMES)
def _parsed(name: str) -> Linear | None:
    return parsed_dimension(name, _named)


@functools.lru_cache(MOST_NAMES)
def _form_of_name(name: str) -> Linear:
    return _parsed(name) or _named(name)


def _single_name(form: Linear) -> str | None:
    """The name that a form consists of, if it is nothing else and reads as one."""
    if form.constant or len(form.terms) != 1:
        return None
    ((atom, factor),) = form.terms
    plain = factor == 1 and isinstance(atom, Dimension) and atom.owner is None and atom.name.isidentifier()
    return atom.name if plain and isinstance(atom, Dimension) else None


def _text(form: Linear) -> str | None:
    parts = []
    for atom, factor in form.terms:
        name = _atom_text(atom)
        if name is None:
            return None
        amount = name if abs(factor) == 1 else f"{abs(factor)}*{name}"
        parts.append((name, factor < 0, amount))
    parts.sort()
    parts.sort(key=lambda part: part[1])  # what is added comes first
    text = "".join(f" {'-' if negative else '+'} {amount}" for _, negative, amount in parts)
    if form.constant:
        text += f" {'-' if form.constant < 0 else '+'} {abs(form.constant)}"
    return text[3:] if text.startswith(" + ") else f"-{text[3:]}"


def _atom_text(atom: Atom) -> str | None:
    if isinstance(atom, Dimension):
        return atom.name if atom.owner is None else None
    if not isinstance(atom, Apply):
        return None
    arguments = [_text(argument) for argument in atom.arguments]
    if any(argument is None for argument in arguments):
        return None
    if atom.function in ("minimum", "maximum"):
        return f"{'Min' if atom.function == 'minimum' else 'Max'}({', '.join(map(str, arguments))})"
    operator = {"product": "*", "quotient": "//", "remainder": "%"}.get(atom.function)
    if operator is None:
        return None
    joined = operator.join(
        str(text) if _is_single(argument) else f"({text})" for text, argument in zip(arguments, atom.arguments, strict=True)
    )
    return joined if operator == "*" else f"({joined})"


def _is_single(form: Linear) -> bool:
    """Whether the text of `form` needs no brackets."""
    return form.number is not None or (not form.constant and len(form.terms) == 1 and next(iter(form.terms))[1] == 1)
