"""How the next token is chosen from its logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from qknorm_onnx.errors import InputError

Logits = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """In this order, as transformers does: repetition penalty, temperature, the `top_k` likeliest, the fewest making up `top_p`.

    `temperature` 0 takes the likeliest token; `top_k` 0 and `top_p` 1 keep all. `seed` None is another text each time.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (self.temperature >= 0.0 and np.isfinite(self.temperature)):
            raise InputError(f"temperature is {self.temperature}; it is 0 (the likeliest token) or greater")
        if self.top_k < 0:
            raise InputError(f"top_k is {self.top_k}; it is 0 (all tokens) or greater")
        if not 0.0 < self.top_p <= 1.0:
            raise InputError(f"top_p is {self.top_p}; it is greater than 0 and at most 1 (all tokens)")
        if not self.repetition_penalty > 0.0:
            raise InputError(f"repetition_penalty is {self.repetition_penalty}; it is greater than 0, and 1 changes nothing")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0.0


def sampling_of(
    search: Mapping[str, Any], *, temperature: float | None, top_k: int | None, top_p: float | None, seed: int | None
) -> Sampling:
    """What the caller says, and what a folder's `search` says where the caller does not."""
    if temperature is None:
        asked = any(value is not None for value in (top_k, top_p))
        temperature = float(search.get("temperature", 1.0)) if search.get("do_sample", False) or asked else 0.0
    return Sampling(
        temperature=temperature,
        top_k=int(search.get("top_k", 0)) if top_k is None else top_k,
        top_p=float(search.get("top_p", 1.0)) if top_p is None else top_p,
        repetition_penalty=float(search.get("repetition_penalty", 1.0)),
        seed=seed,
    )


class Chooser:
    """Chooses tokens for the rows of a batch; each row has random numbers of its own, whatever stands in the others."""

    def __init__(self, sampling: Sampling, num_rows: int) -> None:
        self._sampling = sampling
        seeds = np.random.SeedSequence(sampling.seed).spawn(num_rows)
        self._random = [np.random.default_rng(seed) for seed in seeds]

    def choose(self, logits: Logits, seen: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
        """The next token of each row, (B,), from logits (B, vocabulary) and the tokens before."""
        scores = logits.astype(np.float32)
        if self._sampling.repetition_penalty != 1.0:
            scores = self._penalised(scores, seen)
        if self._sampling.is_greedy:
            return scores.argmax(axis=-1)
        return np.array([self._drawn(row, random) for row, random in zip(scores, self._random, strict=True)], dtype=np.int64)

    def _penalised(self, scores: Logits, seen: Sequence[Sequence[int]]) -> Logits:
        penalised = scores.copy()
        for row, tokens in enumerate(seen):
            places = np.unique(np.asarray(tokens, dtype=np.int64))
            of_seen = penalised[row, places]
            factor = self._sampling.repetition_penalty
            penalised[row, places] = np.where(of_seen < 0, of_seen * factor, of_seen / factor)
        return penalised

    def _drawn(self, scores: Logits, random: np.random.Generator) -> int:
        """One token of one row, by inverting the distribution: one random number a token."""
        order = np.argsort(-scores, kind="stable")
        if 0 < self._sampling.top_k < order.size:
            order = order[: self._sampling.top_k]
        scaled = scores[order].astype(np.float64) / self._sampling.temperature
        odds = np.exp(scaled - scaled[0])
        odds /= odds.sum()
        if self._sampling.top_p < 1.0:
            kept = int(np.searchsorted(np.cumsum(odds), self._sampling.top_p)) + 1
            order, odds = order[:kept], odds[:kept] / odds[:kept].sum()
        drawn = int(np.searchsorted(np.cumsum(odds), random.random(), side="right"))
        return int(order[min(drawn, order.size - 1)])
