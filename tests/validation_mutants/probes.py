"""Inputs in the domain of a model, made without the validator: they tell which mutants can be seen from outside at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.validation_mutants.text_model import MOST_POSITIONS, VOCABULARY, WIDTH, TextForm

Feeds = dict[str, np.ndarray[Any, Any]]

SIZES = ((1, 1), (1, 7), (2, 6), (2, 2), (3, 13), (4, 5), (6, 9), (2, 21), (2, 40))


def probes(form: TextForm) -> Iterator[Feeds]:
    """Batches up to 6, lengths up to 40 and one of 320, pasts of 0 to 50, every token, padding of every kind, positions of
    every kind, and where the model takes floats, small, large and zero ones.
    """
    random = np.random.default_rng(0)
    pasts = (0, 3, 25, 16, 50) if form.past else (0,)
    for number, (batch, length) in enumerate(SIZES):
        for past in {pasts[number % len(pasts)], pasts[(number + 1) % len(pasts)]}:
            yield _feeds(form, random, batch, length, past, number)
    if not form.learned_positions:
        yield _feeds(form, random, 1, 320, 2 if form.past else 0, 0)
    if form.tokens:
        every = _feeds(form, random, 6, VOCABULARY // 6, 0, 0)
        every["tokens"] = np.arange(VOCABULARY).reshape(6, -1)
        yield every
    else:
        for factor in (1e-7, 1e-3, 1e3):
            scaled = _feeds(form, random, 2, 6, 0, 0)
            yield {**scaled, "tokens": scaled["tokens"] * factor}
        zeros = _feeds(form, random, 2, 6, 0, 0)
        yield {**zeros, "tokens": zeros["tokens"] * (np.arange(6) % 3 != 1)[:, None]}


def _feeds(form: TextForm, random: np.random.Generator, batch: int, length: int, past: int, number: int) -> Feeds:
    feeds: Feeds = {}
    if form.tokens:
        feeds["tokens"] = random.integers(0, VOCABULARY, (batch, length))
    else:
        feeds["tokens"] = random.standard_normal((batch, length, WIDTH))
    if form.mask:
        feeds["mask"] = np.ones((batch, past + length), dtype=np.int64)
        for row in range(batch):  # each row keeps a visible key, the last one or the first
            hidden = (number + row) % 4
            if hidden == 1:
                feeds["mask"][row, : (past + length) // 2] = 0
            elif hidden == 2:
                feeds["mask"][row, (past + length + 1) // 2 :] = 0
            elif hidden == 3:
                feeds["mask"][row, 1:-1:2] = 0
    if form.positions:
        start = random.integers(0, (MOST_POSITIONS - length) if form.learned_positions else 250, (batch, 1))
        step = 1 + number % 2 if not form.learned_positions else 1
        feeds["positions"] = start + step * np.arange(length)
    for layer in range(form.layers if form.past else 0):
        for part in ("key", "value"):
            feeds[f"past.{layer}.{part}"] = random.standard_normal((batch, form.kv_heads, past, form.head_size))
    return feeds


def visible(feeds: Feeds, output: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """`output` without the rows of padding, which have no agreed meaning."""
    mask = feeds.get("mask")
    if mask is None or output.ndim != 3 or output.shape[:2] != feeds["tokens"].shape[:2]:
        return output
    return output[mask[:, -output.shape[1] :] != 0]
