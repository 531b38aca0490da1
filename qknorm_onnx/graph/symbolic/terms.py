"""Terms of index algebra: what one element of a tensor is, as a function of its index and of the graph's dimensions.

A number is a `Linear` form over atoms (index variables, dimensions, elements read from tensors nobody can look into), a
`Real` constant, or a `Select` between two numbers.  A truth value is built from comparisons of linear forms.  Every term is
immutable and compares by meaning of its parts, so equal terms are equal for all shapes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import onnx_ir as ir


@dataclass(frozen=True, slots=True)
class Index:
    """The index variable of one axis."""

    axis: int


@dataclass(frozen=True, slots=True)
class Dimension:
    """A size: one that the graph names, or axis `axis` of `owner` where it has no name.

    `least` is the smallest size considered; it takes no part in comparisons, since the size is the same whatever is assumed.
    """

    name: str
    owner: ir.Value | None = None
    axis: int = 0
    least: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Read:
    """The element of `value` at `indices`; `integral` when the tensor holds integers."""

    value: ir.Value
    indices: tuple[Linear, ...]
    integral: bool


@dataclass(frozen=True, slots=True)
class Apply:
    """A function that is not linear: quotient, remainder, absolute, maximum, minimum, product; all of integers."""

    function: Literal["quotient", "remainder", "absolute", "maximum", "minimum", "product"]
    arguments: tuple[Linear, ...]
    nonnegative: bool = field(default=False, compare=False)


Atom: TypeAlias = Index | Dimension | Read | Apply


@dataclass(frozen=True, slots=True)
class Linear:
    """`constant + sum(coefficient * atom)`, with integer coefficients that are not 0."""

    constant: int = 0
    terms: frozenset[tuple[Atom, int]] = frozenset()

    def __add__(self, other: Linear) -> Linear:
        return _collect(self, other, 1)

    def __sub__(self, other: Linear) -> Linear:
        return _collect(self, other, -1)

    def __neg__(self) -> Linear:
        return self.times(-1)

    def plus(self, number: int) -> Linear:
        """The form plus a number."""
        return Linear(self.constant + number, self.terms)

    def times(self, number: int) -> Linear:
        """The form times a number."""
        if number == 0:
            return Linear()
        return Linear(self.constant * number, frozenset((atom, factor * number) for atom, factor in self.terms))

    @property
    def number(self) -> int | None:
        """The value where it is a constant, else None."""
        return None if self.terms else self.constant

    @property
    def integral(self) -> bool:
        """Whether every atom is known to be an integer."""
        return all(not isinstance(atom, Read) or atom.integral for atom, _ in self.terms)

    def coefficient(self, atom: Atom) -> int:
        """The factor in front of `atom`, 0 where it does not occur."""
        return next((factor for other, factor in self.terms if other == atom), 0)

    def __str__(self) -> str:
        parts = [(factor, _atom_text(atom)) for atom, factor in self.terms]
        text = "".join(_signed(factor, name) for factor, name in sorted(parts, key=lambda part: part[1]))
        if self.constant or not parts:
            text += _signed(self.constant, "")
        return text[3:] if text.startswith(" + ") else "-" + text[3:]


def _signed(factor: int, name: str) -> str:
    amount = f"{abs(factor)}*{name}" if name and abs(factor) != 1 else name or str(abs(factor))
    return f" {'-' if factor < 0 else '+'} {amount}"


def _collect(left: Linear, right: Linear, sign: int) -> Linear:
    if not right.terms:
        return left.plus(sign * right.constant)
    factors = dict(left.terms)
    for atom, factor in right.terms:
        factors[atom] = factors.get(atom, 0) + sign * factor
    return Linear(left.constant + sign * right.constant, frozenset((a, f) for a, f in factors.items() if f))


def _atom_text(atom: Atom) -> str:
    if isinstance(atom, Index):
        return f"i{atom.axis}"
    if isinstance(atom, Dimension):
        return atom.name
    if isinstance(atom, Read):
        return f"{atom.value.name}[{', '.join(map(str, atom.indices))}]"
    return f"{atom.function}({', '.join(map(str, atom.arguments))})"


@dataclass(frozen=True, slots=True)
class Real:
    """A constant that is no integer: a fraction, a very large number, infinity or NaN."""

    value: float


@dataclass(frozen=True, slots=True)
class Select:
    """`when_true` where `condition` holds, else `when_false`."""

    condition: Truth
    when_true: Number
    when_false: Number


@dataclass(frozen=True, slots=True)
class Known:
    """A truth value that is the same everywhere."""

    value: bool


@dataclass(frozen=True, slots=True)
class AtLeastZero:
    """`form >= 0`."""

    form: Linear


@dataclass(frozen=True, slots=True)
class IsZero:
    """`form == 0`."""

    form: Linear


@dataclass(frozen=True, slots=True)
class Flag:
    """A truth value read from a tensor nobody can look into."""

    read: Read


@dataclass(frozen=True, slots=True)
class Not:
    """The opposite of `operand`."""

    operand: Truth


@dataclass(frozen=True, slots=True)
class Both:
    """All of `operands` hold."""

    operands: frozenset[Truth]


@dataclass(frozen=True, slots=True)
class Either:
    """At least one of `operands` holds."""

    operands: frozenset[Truth]


Number: TypeAlias = Linear | Real | Select
Truth: TypeAlias = Known | AtLeastZero | IsZero | Flag | Not | Both | Either
Element: TypeAlias = Number | Truth
Extents: TypeAlias = tuple[Linear, ...]
PartialExtents: TypeAlias = tuple[Linear | None, ...]

TRUE = Known(True)
FALSE = Known(False)
ONE = Linear(1)
NUMBERS = (Linear, Real, Select)


def constant(value: float) -> Linear | Real:
    """The number `value`: a `Linear` where it is an integer that a double holds exactly."""
    if math.isfinite(value) and float(value).is_integer() and abs(value) <= 2**53:
        return Linear(int(value))
    return Real(float(value))


@functools.cache  # every tensor has the same few
def index(axis: int) -> Linear:
    """The index variable of `axis` as a form."""
    return Linear(0, frozenset([(Index(axis), 1)]))


def form_of(atom: Atom) -> Linear:
    """An atom as a form."""
    return Linear(0, frozenset([(atom, 1)]))
