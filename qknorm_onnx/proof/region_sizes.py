"""Numbers for the symbolic dimensions of a subgraph's inputs, such that the subgraph can run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import onnx_ir as ir

# Sizes for the symbols in the order of their appearance; odd and distinct, so that a mixed-up axis cannot fit by chance.
_DISTINCT_SIZES: Final = (7, 9, 5, 11, 13, 3, 15)
# Relations that are tried where a file names a length of its own, e.g. total = past + new.
_MOST_RELATIONS: Final = 60

# Elements of one input: half a gigabyte in float64. No region that was seen comes near it.
LARGEST_INPUT: Final = 1 << 26

Sizes = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Relation:
    """A symbol that is the sum of others."""

    symbol: str
    terms: tuple[str, ...]


class SymbolTable:
    """The symbols of the inputs of a subgraph; `batch` are those that only ever lead. An unknown dimension is a symbol, too."""

    def __init__(self, inputs: Sequence[ir.Value]) -> None:
        self._shapes: dict[str, tuple[int | str | ir.SymbolicDim, ...]] = {}
        leading: set[str] = set()
        inner: dict[str, None] = {}
        for value in inputs:
            dims = tuple(self._named(value, axis) for axis in range(len(value.shape or ())))
            self._shapes[str(value.name)] = dims
            for axis, dim in enumerate(dims):
                names = _names(dim)
                if axis == 0 and len(dims) > 1:
                    leading.update(names)
                else:
                    inner.update(dict.fromkeys(names))
        self.batch = leading - set(inner)
        self.symbols = (*inner, *sorted(self.batch))

    def shape(self, name: str, sizes: Sizes, *, may_be_empty: bool = False) -> tuple[int, ...]:
        """The shape of an input.

        Raises ValueError where a dimension comes out below 1 (below 0 if it `may_be_empty`), or it is too large to try.
        """
        shape = tuple(_size(dim, sizes) for dim in self._shapes[name])
        if math.prod(shape) > LARGEST_INPUT:
            raise ValueError(f"{name} would have shape {shape}")
        if any(size < (0 if may_be_empty else 1) for size in shape):
            raise ValueError(f"{name} would have shape {shape}")
        return shape

    def assignments(self, relation: Relation | None) -> Iterator[Sizes]:
        """Three assignments: all distinct; batch 1; another batch with length 1."""
        others = [symbol for symbol in self.symbols if symbol not in self.batch]
        distinct = {symbol: _DISTINCT_SIZES[index % len(_DISTINCT_SIZES)] for index, symbol in enumerate(others)}
        yield _related({**distinct, **dict.fromkeys(self.batch, 3)}, relation)
        yield _related({**{s: size + 1 for s, size in distinct.items()}, **dict.fromkeys(self.batch, 1)}, relation)
        yield _related({**dict.fromkeys(others, 1), **dict.fromkeys(self.batch, 2)}, relation)

    def relations(self) -> Iterator[Relation | None]:
        """None first, then each symbol as another one, then as the sum of two others."""
        yield None
        names = self.symbols
        equal = [Relation(a, (b,)) for a in names for b in names if a != b]
        sums = [Relation(a, (b, c)) for a in names for i, b in enumerate(names) for c in names[i + 1 :] if a not in (b, c)]
        yield from [*equal, *sums][:_MOST_RELATIONS]

    def _named(self, value: ir.Value, axis: int) -> int | str | ir.SymbolicDim:
        assert value.shape is not None, "only called for the axes of a known shape"
        dim = value.shape[axis]
        if isinstance(dim, int):
            return dim
        if dim.value is None:
            return "unknown batch" if axis == 0 and len(value.shape) > 1 else f"{value.name}, axis {axis}"
        return dim if isinstance(dim, ir.SymbolicDim) else str(dim.value)


def _names(dim: int | str | ir.SymbolicDim) -> list[str]:
    if isinstance(dim, ir.SymbolicDim):
        return sorted(dim.free_symbols())
    return [dim] if isinstance(dim, str) else []


def _related(sizes: dict[str, int], relation: Relation | None) -> Sizes:
    if relation is not None:
        sizes[relation.symbol] = sum(sizes[term] for term in relation.terms)
    return sizes


def _size(dim: int | str | ir.SymbolicDim, sizes: Sizes) -> int:
    if isinstance(dim, int):
        return dim
    if isinstance(dim, str):
        return sizes[dim]
    size = dim.evaluate(dict(sizes))
    if not isinstance(size, int):
        raise ValueError(f"dimension {dim} is no number for {dict(sizes)}")
    return size
