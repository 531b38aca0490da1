"""Random inputs for a subgraph: values of every magnitude, masks that hide some keys, positions that count upwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qknorm_onnx.proof.region_sizes import Relation, SymbolTable
from qknorm_onnx.runtime.value_types import FLOAT_TYPES

Tensor = npt.NDArray[Any]
Kind = Literal[
    "ordinary",
    "small rows",
    "tiny rows",
    "a row of the mask that hides all or nothing",
    "a mask that hides the first keys",
    "a mask of the opposite sense",
]
_MASK_KINDS: Final[tuple[Kind, ...]] = (
    "a row of the mask that hides all or nothing",
    "a mask that hides the first keys",  # padding on the left: under causality the first queries see nothing
    "a mask of the opposite sense",  # True hides
)

# Sizes of rows: where an epsilon of 1e-5 or 1e-6 inside a root matters, where an L2 norm's bound of 1e-12 does (float64
# squares that without loss), and what half precision holds.
_MAGNITUDES: Final = {"small rows": (1e-7, 1e1), "tiny rows": (1e-15, 1e-7)}
_HALF_MAGNITUDES: Final = (1e-3, 3e2)  # squares of the largest overflow float16


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegionCase:
    """Inputs by name, and in words what is special about them.

    `may_be_undefined`: a row is all zero, or a mask may leave it without a key. Some spellings divide by zero there, the
    operator gives zeros. `keys`: so many entries of each row of a cache (batch, heads, positions, values) hold keys
    afterwards, the others hold anything.
    """

    what: str
    inputs: dict[str, Tensor]
    may_be_undefined: bool = False
    keys: Tensor | None = None


def region_cases(
    inputs: Sequence[ir.Value], table: SymbolTable, relation: Relation | None, *, seed: int, half: bool = False
) -> Iterator[RegionCase]:
    """The cases that `inputs` are tried on; sizes that a dimension's expression does not allow are left out."""
    has_mask = any(value.dtype == ir.DataType.BOOL for value in inputs)
    kinds: list[tuple[Kind, ...]] = [("ordinary", "small rows", "tiny rows"), ("small rows",), ("ordinary",)]
    if has_mask:
        kinds[0] = (*kinds[0], *_MASK_KINDS)
    random = np.random.default_rng(seed)
    for sizes, kinds_of_size in zip(table.assignments(relation), kinds, strict=True):
        for kind in kinds_of_size:
            try:
                shapes = {str(value.name): table.shape(str(value.name), sizes) for value in inputs}
                values = {
                    str(value.name): random_values(value, shapes[str(value.name)], kind, random, half=half) for value in inputs
                }
            except ValueError:
                continue
            named = ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items())
            undefined = has_mask or any(_has_zero_row(array) for array in values.values())
            yield RegionCase(what=f"{kind}; {named or 'static sizes'}", inputs=values, may_be_undefined=undefined)


def random_values(
    value: ir.Value, shape: tuple[int, ...], kind: Kind, random: np.random.Generator, *, half: bool = False
) -> Tensor:
    """An array of the type of `value`."""
    if value.dtype == ir.DataType.BOOL:
        return _mask(shape, kind, random)
    if value.dtype in FLOAT_TYPES:
        array = random.standard_normal(shape)
        if kind in _MAGNITUDES and len(shape) >= 3:
            array = array * _magnitudes(shape[:-1], _HALF_MAGNITUDES if half else _MAGNITUDES[kind], random)[..., None]
        if kind == "tiny rows" and len(shape) >= 3 and array.size:
            array[..., -1, :] = 0
        return array.astype(value.dtype.numpy())  # so that every arithmetic sees the same numbers
    assert value.dtype is not None, "inputs without a type are refused before"
    if len(shape) >= 2:
        counting = np.arange(shape[-1]) + random.integers(0, 3, (*shape[:-1], 1))
        integers = counting if kind == "ordinary" else random.integers(0, 2, shape)
    else:
        integers = random.integers(0, 3, shape)
    return np.asarray(integers).astype(value.dtype.numpy())


def _magnitudes(shape: tuple[int, ...], limits: tuple[float, float], random: np.random.Generator) -> Tensor:
    """One factor per row, spread evenly over the decades between `limits`, in random order: none of them is left out."""
    count = int(np.prod(shape))
    low, high = (float(np.log(limit)) for limit in limits)
    exponents = np.linspace(low, high, count) if count > 1 else random.uniform(low, high, count)
    return np.exp(random.permutation(exponents)).reshape(shape)


def _has_zero_row(array: Tensor) -> bool:
    return array.ndim >= 3 and array.dtype != np.bool_ and bool((array == 0).all(-1).any())


def _mask(shape: tuple[int, ...], kind: Kind, random: np.random.Generator) -> Tensor:
    """About two thirds True. The first key and the diagonal are True, so that a causal query always sees a key."""
    mask = random.random(shape) < 0.7
    if mask.ndim == 0:
        return np.asarray(mask)
    mask[..., 0] = True
    if mask.ndim >= 2:
        offset = shape[-1] - shape[-2]
        rows = np.arange(shape[-2])
        columns = np.clip(rows + offset, 0, shape[-1] - 1)
        mask[..., rows, columns] = True
    if kind == "a row of the mask that hides all or nothing" and mask.ndim >= 2:
        mask[..., -1, :] = False
        mask[..., 0, :] = True
    if kind == "a mask that hides the first keys":
        mask[:1, ..., : (shape[-1] + 1) // 2] = False
    return ~mask if kind == "a mask of the opposite sense" else mask
