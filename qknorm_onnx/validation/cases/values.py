"""Floats that break careless arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy.typing as npt

from qknorm_onnx.validation.cases.case import Case
from qknorm_onnx.validation.cases.inputs import GraphInput, example_sizes
from qknorm_onnx.validation.cases.resized import random_case

Tensor = npt.NDArray[Any]

# In units of the example's own deviation, or as factors. Squares of 300 add up beyond 65504, the largest float16, after one
# value; a mean of 30 deviations costs E[x^2] - E[x]^2 three digits.
_LARGE: Final = 300.0
_SMALL: Final = 1e-3  # where an epsilon of 1e-6 under a root is half of the sum
_MEAN: Final = 30.0


def adversarial(inputs: Sequence[GraphInput]) -> Iterator[Case]:
    """Large and small values, zero rows, and means that are large beside the deviation.

    Large caches are tried by themselves, in float32: no norm makes cached keys small, so that their logits are some hundreds,
    where a half type has steps of 0.5 to 8 and the largest of a row is decided by one rounding.
    """
    floats = [i for i in inputs if i.kind == "activations" and i.example.ndim >= 2]
    cached = {i.name for i in floats if i.is_called_past}
    new, both = {i.name for i in floats} - cached, {i.name for i in floats}
    changes: tuple[tuple[str, str, set[str], Callable[[Tensor], Tensor]], ...] = (
        ("large values", "squares that overflow", new, lambda x: _LARGE * x),
        ("small values", "an epsilon that is wrong", both, lambda x: _SMALL * x),
        ("zero rows", "a division by zero", both, _with_zero_rows),
        ("large means", "a variance as a difference of squares", both, _with_large_mean),
        ("large cache", "a softmax that overflows", cached, lambda x: _LARGE * x),
    )
    for number, (name, purpose, names, change) in enumerate(changes):
        if names:
            plain = random_case(name, inputs, example_sizes(inputs), seed=2000 + number, purpose=purpose)
            changed = {key: change(value) if key in names else value for key, value in plain.inputs.items()}
            yield dataclasses.replace(plain, inputs=changed, in_half=name != "large cache")


def _with_large_mean(x: Tensor) -> Tensor:
    return x + _MEAN * (x.std() if x.size and x.std() else 1.0)


def _with_zero_rows(x: Tensor) -> Tensor:
    """Every third row of the last axis is zero, the first one not."""
    rows = x.reshape(-1, x.shape[-1]).copy()
    rows[1::3] = 0
    return rows.reshape(x.shape)
