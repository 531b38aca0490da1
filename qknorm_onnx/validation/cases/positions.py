"""Positions that are shifted, restarted and repeated: a model that has them built in is right at the example's only."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from qknorm_onnx.validation.cases.case import Case
from qknorm_onnx.validation.cases.domain import Domain
from qknorm_onnx.validation.cases.inputs import GraphInput, example_sizes
from qknorm_onnx.validation.cases.resized import random_case

Tensor = npt.NDArray[Any]

_SHIFT: Final = 7
_FAR: Final = 300  # beyond what eight bits hold
_ANYWHERE: Final = 400  # again, where no table ends earlier
_FAR_AWAY: Final = ("positions far", "positions anywhere")


def moved_positions(inputs: Sequence[GraphInput], domain: Domain) -> Iterator[Case]:
    """Positions that say where a cache is written are only shifted: written twice, a place may hold either value."""
    read = [i for i in inputs if i.kind == "positions"]
    unwritten = [i for i in read if i.name not in domain.written and not i.is_called_past]
    kinds: tuple[tuple[str, str, list[GraphInput], Callable[[Tensor, int], Tensor]], ...] = (
        (
            "positions shifted",
            "positions that are built in, or shared by all rows",
            read,
            lambda array, _: _shifted(array, _SHIFT),
        ),
        ("positions far", "positions in a narrow type, or tables that end early", read, lambda array, _: _shifted(array, _FAR)),
        ("positions restarted", "positions that are counted instead of read", unwritten, lambda array, _: _restarted(array)),
        ("positions repeated", "positions that are counted instead of read", unwritten, lambda array, _: array // 2),
        ("positions anywhere", "positions in a narrow type, or wrong rows of a table", unwritten, _anywhere),
    )
    for number, (name, purpose, moved, change) in enumerate(kinds):
        plain = random_case(name, inputs, example_sizes(inputs), seed=5000 + number, purpose=purpose)
        rows = {i.name: domain.rows.get(i.name, 0) for i in moved}
        changed = {name: _within(change(plain.inputs[name], table), table) for name, table in rows.items()}
        if any(not np.array_equal(array, plain.inputs[key]) for key, array in changed.items()):
            # A half type may round frequencies, in buffers or in a converted file: far from 0 that is all there is to see.
            yield dataclasses.replace(plain, inputs={**plain.inputs, **changed}, in_half=name not in _FAR_AWAY)


def _shifted(positions: Tensor, by: int) -> Tensor:
    """By `by` in the first row, by a third of it in the others."""
    shift = np.full(positions.shape, by // 3)
    shift[:1] = by
    return positions + shift


def _restarted(positions: Tensor) -> Tensor:
    """Counted from 0 again behind the middle."""
    half = positions.shape[-1] // 2
    restarted = positions.copy()
    restarted[..., half:] = np.arange(positions.shape[-1] - half)
    return restarted


def _anywhere(positions: Tensor, rows: int) -> Tensor:
    """Ascending along the last axis, drawn without repeats from a table of `rows` rows, or from what has no end."""
    length = positions.shape[-1]
    choices = max(rows or _ANYWHERE, length)
    random = np.random.default_rng(5100)
    drawn = [np.sort(random.permutation(choices)[:length]) for _ in range(math.prod(positions.shape[:-1]))]
    return np.reshape(drawn, positions.shape)


def _within(positions: Tensor, rows: int) -> Tensor:
    """Positions of a table of `rows` rows (0: any number): moved back where they would be behind its end."""
    beyond = max(int(positions.max(initial=0)) - (rows - 1), 0) if rows else 0
    return np.maximum(positions - beyond, 0)
