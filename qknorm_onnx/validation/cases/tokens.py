"""Tokens over the whole vocabulary: a wrong row of an embedding shows at its token only."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from qknorm_onnx.validation.cases.case import Case
from qknorm_onnx.validation.cases.domain import Domain
from qknorm_onnx.validation.cases.inputs import GraphInput, example_sizes
from qknorm_onnx.validation.cases.resized import LONG, Sizes, random_case, symbols_of

Tokens = npt.NDArray[Any]

_BATCH: Final = 8  # of 33 tokens each: 264 rows of the table
_MOST_LOGITS: Final = 4e7
_MOST_WORK: Final = 1e11  # tokens times weights


def other_tokens(inputs: Sequence[GraphInput], domain: Domain) -> Iterator[Case]:
    """The first and the last token, and random ones of the whole vocabulary."""
    tokens = [i for i in inputs if i.kind == "tokens" and domain.rows.get(i.name)]
    if not tokens:
        return
    sizes: Sizes = example_sizes(inputs)
    ends = random_case("first and last token", inputs, sizes, seed=4000, purpose="a wrong first or last row of an embedding")
    planted = {i.name: _ends(ends.inputs[i.name], domain.rows[i.name]) for i in tokens}
    yield dataclasses.replace(ends, inputs={**ends.inputs, **planted})
    sizes = _many(inputs, domain, sizes, tokens)
    for number, name in enumerate(("whole vocabulary", "whole vocabulary, again")):
        many = random_case(name, inputs, sizes, seed=4001 + number, purpose="wrong rows of an embedding")
        drawn = {i.name: _without_repeats(many.inputs[i.name].shape, domain.rows[i.name], number) for i in tokens}
        yield dataclasses.replace(many, inputs={**many.inputs, **drawn})


def _without_repeats(shape: tuple[int, ...], rows: int, number: int) -> Tokens:
    """As many different rows as there is room for, in random order; the next ones for the next `number`."""
    order = np.random.default_rng(4001).permutation(rows)
    count = math.prod(shape)
    return np.take(order, np.arange(number * count, (number + 1) * count), mode="wrap").reshape(shape)


def _ends(array: Tokens, rows: int) -> Tokens:
    """The first, the last, and again tokens of the example in turn."""
    flat = array.reshape(-1).copy()
    flat[::3], flat[1::3] = 0, rows - 1
    return flat.reshape(array.shape)


def _many(inputs: Sequence[GraphInput], domain: Domain, sizes: Sizes, tokens: Sequence[GraphInput]) -> Sizes:
    """Sizes with 256 tokens and more where that can be afforded."""
    symbols, count = symbols_of(inputs), _BATCH * LONG
    rows = max(domain.rows[i.name] for i in tokens)
    if rows * count > _MOST_LOGITS or domain.parameters * count > _MOST_WORK:
        return sizes
    lengths = {symbol: max(sizes[symbol], LONG) for symbol in symbols.lengths}
    return {**sizes, **lengths, **dict.fromkeys(symbols.batches, _BATCH)}
