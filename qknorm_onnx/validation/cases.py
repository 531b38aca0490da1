"""The inputs on which a model is judged: the example, other batches and lengths, and values that break careless arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from qknorm_onnx.validation.inputs import GraphInput, example_sizes, random_like

Tensor = npt.NDArray[Any]

# In units of the example's own deviation, or as factors. Squares of 300 add up beyond 65504, the largest float16, after one
# value; a mean of 30 deviations costs E[x^2] - E[x]^2 three digits.
_LARGE: Final = 300.0
_SMALL: Final = 1e-3  # where an epsilon of 1e-6 under a root is half of the sum
_MEAN: Final = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Inputs by graph input name, in float64, int64 or bool. `required`: without a result on it there is no verdict."""

    name: str
    inputs: dict[str, Tensor]
    required: bool = False


def make_cases(inputs: Sequence[GraphInput], *, seeds: int = 1) -> Iterator[Case]:
    """The example; its batch 1 and 3; every length 1 and some odd longer ones; padding; adversarial floats; `seeds` random ones.

    Dimensions that the graph fixes are left as they are. A case that the module itself refuses is left out by the caller.
    """
    yield Case(name="example", inputs={i.name: i.example for i in inputs}, required=True)
    sizes = example_sizes(inputs)
    batch = _batch_symbols(inputs)
    for number, (name, changed) in enumerate(_resizings(sizes, batch)):
        yield _random_case(name, inputs, changed, seed=number)
    yield from _padded(inputs, sizes)
    yield from _adversarial(inputs, sizes)
    for seed in range(seeds):
        yield _random_case(f"random values {seed}", inputs, sizes, seed=1000 + seed)


def _batch_symbols(inputs: Sequence[GraphInput]) -> set[str]:
    leading = {i.dims[0] for i in inputs if i.dims and isinstance(i.dims[0], str)}
    inner = {dim for i in inputs for dim in i.dims[1:] if isinstance(dim, str)}
    return {str(symbol) for symbol in leading - inner}


def _resizings(sizes: Mapping[str, int], batch: set[str]) -> Iterator[tuple[str, dict[str, int]]]:
    lengths = {symbol: size for symbol, size in sizes.items() if symbol not in batch and symbol != "?"}
    batches = sorted(symbol for symbol in sizes if symbol in batch and symbol != "?")
    longer = {symbol: size + 5 + index * 2 for index, (symbol, size) in enumerate(lengths.items())}
    if batches:
        yield "batch 1", {**sizes, **dict.fromkeys(batches, 1)}
        yield "batch 3", {**sizes, **dict.fromkeys(batches, 3)}
    if lengths:
        yield "length 1", {**sizes, **dict.fromkeys(lengths, 1)}
        yield "longer", {**sizes, **longer}
    if batches and lengths:
        yield "batch 3, longer", {**sizes, **longer, **dict.fromkeys(batches, 3)}


def _random_case(name: str, inputs: Sequence[GraphInput], sizes: Mapping[str, int], *, seed: int) -> Case:
    random = np.random.default_rng(seed)
    return Case(name=name, inputs={i.name: random_like(i, i.resized(sizes), random) for i in inputs})


def _padded(inputs: Sequence[GraphInput], sizes: Mapping[str, int]) -> Iterator[Case]:
    """The last key of the first sequence is hidden where a mask of the example hides nothing: else nobody reads it.

    One key, because a row of a window that sees no key at all has no meaning that everybody agrees on.
    """
    masks = {i.name for i in inputs if _hides_nothing(i)}
    plain = _random_case("padding", inputs, sizes, seed=3000)
    hidden = {name: value.copy() for name, value in plain.inputs.items() if name in masks and value.shape[-1] > 1}
    for mask in hidden.values():
        mask[0, ..., -1] = 0
    if hidden:
        yield dataclasses.replace(plain, inputs=plain.inputs | hidden)


def _hides_nothing(graph_input: GraphInput) -> bool:
    is_mask = graph_input.kind in ("bool", "flags") and graph_input.example.ndim >= 2
    return is_mask and graph_input.example.size > 0 and bool(graph_input.example.all())


def _adversarial(inputs: Sequence[GraphInput], sizes: Mapping[str, int]) -> Iterator[Case]:
    floats = {i.name for i in inputs if i.kind == "activations" and i.example.ndim >= 2}
    if not floats:
        return
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "large values": lambda x: _LARGE * x,
        "small values": lambda x: _SMALL * x,
        "zero rows": _with_zero_rows,
        "large means": lambda x: x + _MEAN * (x.std() or 1.0),
    }
    for number, (name, change) in enumerate(changes.items()):
        plain = _random_case(name, inputs, sizes, seed=2000 + number)
        changed = {key: change(value) if key in floats else value for key, value in plain.inputs.items()}
        yield dataclasses.replace(plain, inputs=changed)


def _with_zero_rows(x: Tensor) -> Tensor:
    """Every third row of the last axis is zero, the first one not."""
    rows = x.reshape(-1, x.shape[-1]).copy()
    rows[1::3] = 0
    return rows.reshape(x.shape)
