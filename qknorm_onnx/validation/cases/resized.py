"""Other batches and lengths: 1, odd ones, an empty past, and one beyond every window."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import onnx_ir as ir

from qknorm_onnx.validation.cases.case import Case
from qknorm_onnx.validation.cases.domain import Domain
from qknorm_onnx.validation.cases.inputs import GraphInput, example_sizes, random_like

Sizes = Mapping[str, int]

MANY, LONG = 5, 33  # more than any example has, and one more than a power of two
FULL, FULLER = 16, 64  # blocks of kernels have sizes like these: what is left over is empty
MORE, LONGER = 8, 36  # again, with room for more than 256 tokens; where that can be afforded
# A window is tried where it costs no more than all other cases together, or the model is small: its logits in float64 must fit.
_CHEAP_KEYS: Final = 600
_MOST_KEYS: Final = 1100
_MOST_WORK: Final = 5e11  # tokens times weights
_MOST_WORK_AGAIN: Final = 1e11


@dataclasses.dataclass(frozen=True, kw_only=True)
class Symbols:
    """The symbols of the inputs' shapes by meaning: batches, lengths of new tokens, lengths of what is cached."""

    batches: tuple[str, ...]
    lengths: tuple[str, ...]
    pasts: tuple[str, ...]


def symbols_of(inputs: Sequence[GraphInput]) -> Symbols:
    """Batches lead every input that has them; a past is in caches, or is added to the length of the tokens."""
    leading = {i.dims[0] for i in inputs if i.dims and isinstance(i.dims[0], str)}
    inner = {dim for i in inputs for dim in i.dims[1:] if isinstance(dim, str)}
    batches = {str(symbol) for symbol in leading - inner}
    new = {dim for i in inputs if i.kind in ("tokens", "positions") for dim in i.symbols} - batches
    cached = {dim for i in inputs if i.is_called_past for dim in i.symbols}
    added = {str(symbol) for i in inputs for dim in i.dims if isinstance(dim, ir.SymbolicDim) for symbol in dim.free_symbols()}
    pasts = (cached | (added if new else set())) - batches - new
    known = [symbol for symbol in example_sizes(inputs) if symbol != "?"]
    return Symbols(
        batches=tuple(sorted(symbol for symbol in known if symbol in batches)),
        lengths=tuple(symbol for symbol in known if symbol not in batches and symbol not in pasts),
        pasts=tuple(symbol for symbol in known if symbol in pasts),
    )


def random_case(name: str, inputs: Sequence[GraphInput], sizes: Sizes, *, seed: int, purpose: str) -> Case:
    """Random values of the examples' kinds in other sizes."""
    random = np.random.default_rng(seed)
    return Case(name=name, purpose=purpose, inputs={i.name: random_like(i, i.resized(sizes), random) for i in inputs})


def resized(inputs: Sequence[GraphInput], domain: Domain) -> Iterator[Case]:
    """Every case has sizes that differ from the example's."""
    sizes, symbols = example_sizes(inputs), symbols_of(inputs)
    lengths = [0, 0]
    again = MORE * LONGER * domain.parameters <= _MOST_WORK_AGAIN
    for number, (name, purpose, changed) in enumerate(_resizings(sizes, symbols, again=again)):
        lengths.append(_longest(changed, symbols))
        yield random_case(name, inputs, {**sizes, **changed}, seed=number, purpose=purpose)
    if any(sizes[symbol] for symbol in symbols.pasts):
        empty = {**sizes, **dict.fromkeys(symbols.pasts, 0)}
        yield _empty_past("empty past", inputs, empty)
        one = {**dict.fromkeys(symbols.batches, 1), **dict.fromkeys(symbols.lengths, 1)}
        yield _empty_past("empty past, one token", inputs, {**empty, **one})
    yield from _beyond_windows(inputs, domain, symbols, tried=sorted(lengths)[-2])  # by two cases


def _resizings(sizes: Sizes, symbols: Symbols, *, again: bool) -> Iterator[tuple[str, str, dict[str, int]]]:
    varied = [symbol for symbol in sizes if symbol in (*symbols.lengths, *symbols.pasts)]
    longer = {symbol: sizes[symbol] + 5 + index * 2 for index, symbol in enumerate(varied)}
    long = {symbol: max(size, LONG + index * 2) for index, (symbol, size) in enumerate(longer.items())}
    one, three, many, more = (dict.fromkeys(symbols.batches, batch) for batch in (1, 3, MANY, MORE))
    if symbols.batches:
        yield "batch 1", "a batch that is built in", dict.fromkeys(symbols.batches, 1)
        yield "batch 3", "a batch that is built in", three
    if varied:
        yield "length 1", "one token, as in every step of a generation", dict.fromkeys(varied, 1)
        yield "longer", "a length that is built in", longer
        for length in (FULL, FULLER) if again else (FULL,):
            yield f"length {length}", "blocks that are filled exactly", dict.fromkeys(varied, length)
    if symbols.batches and varied:
        yield "batch 3, longer", "batch and length that are mixed up", {**longer, **three}
        yield "batch 1, length 1", "sizes of 1 that are taken for broadcast ones", {**dict.fromkeys(varied, 1), **one}
        yield f"batch {MANY}, length {LONG}", "tables, windows and batches that end early", {**long, **many}
    if again and varied:
        longest = {symbol: size + LONGER - LONG for symbol, size in long.items()}
        yield f"batch {MORE}, length {LONGER}", "tables, windows and batches that end early", {**longest, **more}


def _empty_past(name: str, inputs: Sequence[GraphInput], sizes: Sizes) -> Case:
    """The first step of every generation: positions begin at 0."""
    case = random_case(name, inputs, sizes, seed=100, purpose="the first step of a generation, with nothing cached")
    first = {i.name: case.inputs[i.name] - case.inputs[i.name].min() for i in inputs if i.kind == "positions"}
    return dataclasses.replace(case, inputs={**case.inputs, **first})


def _beyond_windows(inputs: Sequence[GraphInput], domain: Domain, symbols: Symbols, *, tried: int) -> Iterator[Case]:
    """Two sequences of more tokens than the largest window that can be afforded: as cached ones where there is a cache."""
    wider = [window for window in domain.windows if window >= tried and _affordable(window, domain)]
    grown = symbols.pasts or symbols.lengths
    if wider and grown:
        purpose = f"a window of {max(wider)} that is lost, or added"
        for more in (3, 6):
            sizes = example_sizes(inputs) | dict.fromkeys(symbols.batches, 1) | dict.fromkeys(grown, max(wider) + more)
            yield random_case(f"{max(wider) + more} tokens", inputs, sizes, seed=100 + more, purpose=purpose)


def _affordable(window: int, domain: Domain) -> bool:
    return window <= _CHEAP_KEYS or (window <= _MOST_KEYS and window * domain.parameters <= _MOST_WORK)


def _longest(sizes: Sizes, symbols: Symbols) -> int:
    varied = {*symbols.lengths, *symbols.pasts}
    return max((size for symbol, size in sizes.items() if symbol in varied), default=0)
