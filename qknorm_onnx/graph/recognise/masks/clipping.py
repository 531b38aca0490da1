"""Sizes of slices of a table: `min(64, S)` is S wherever a mask of that size fits S queries or keys."""

from __future__ import annotations

from collections.abc import Sequence

from qknorm_onnx.graph.symbolic.algebra import proven_nonnegative
from qknorm_onnx.graph.symbolic.terms import Apply, Linear, form_of


class Clipping:
    """What follows from a mask being as large as its attention.

    A size `min(n, L)` with n >= 2 meets L in a broadcast: they must be equal, or the first be 1, and then L is 1 too.  So L <= n,
    and every other `min(n, x)` with x <= L is x.
    """

    def __init__(self, sizes: Sequence[Linear], lengths: Sequence[Linear | None]) -> None:
        self._bounds: list[tuple[int, Linear]] = []
        for size, length in zip(sizes, lengths, strict=True):
            if length is not None and (table := _table_size(size, length)) is not None and table >= 2:
                self._bounds.append((table, length))

    def settled(self, size: Linear) -> Linear:
        """`size` without the minima and maxima that the bounds decide."""
        if not self._bounds:
            return size
        result = Linear(size.constant)
        for atom, factor in size.terms:
            known = self._decided(atom) if isinstance(atom, Apply) and atom.function in ("minimum", "maximum") else None
            result = result + (known if known is not None else form_of(atom)).times(factor)
        return result

    def _decided(self, atom: Apply) -> Linear | None:
        first, second = (self.settled(argument) for argument in atom.arguments)
        for one, other in ((first, second), (second, first)):
            if atom.function == "maximum" and proven_nonnegative(one - other, ()):
                return one
            if atom.function == "minimum" and self._at_most(one, other):
                return one
        return None

    def _at_most(self, form: Linear, other: Linear) -> bool:
        if proven_nonnegative(other - form, ()):
            return True
        number = other.number
        return number is not None and any(table <= number and proven_nonnegative(most - form, ()) for table, most in self._bounds)


def _table_size(size: Linear, length: Linear) -> int | None:
    """n where `size` is `min(n, length)`."""
    if size.constant or len(size.terms) != 1:
        return None
    atom, factor = next(iter(size.terms))
    if factor != 1 or not isinstance(atom, Apply) or atom.function != "minimum" or length not in atom.arguments:
        return None
    return next((argument.number for argument in atom.arguments if argument.number is not None), None)
