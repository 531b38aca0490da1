"""Padding: for each mask of the inputs, keys hidden on the left, on the right, inside, and a whole row of them.

Hidden keys may leave a query that sees nothing. What such a query gives has no meaning that everybody agrees on: zeros, NaN, or
the mean of all values. It is a row of the padding itself, so it depends on the padding's own values, and what depends on those
is not judged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from qknorm_onnx.validation.cases.case import Case
from qknorm_onnx.validation.cases.domain import Domain
from qknorm_onnx.validation.cases.inputs import GraphInput, example_sizes
from qknorm_onnx.validation.cases.resized import Sizes, random_case, symbols_of

Tensor = npt.NDArray[Any]

_FEWEST_KEYS: Final = 7  # for hidden keys on the left, inside, and still visible ones beside them


def is_padding_mask(graph_input: GraphInput) -> bool:
    """A mask (B, N) of flags or bools: what hides nothing, or is called a mask."""
    called_mask = "mask" in graph_input.name
    is_mask = graph_input.kind in ("bool", "flags") and graph_input.example.ndim == 2
    return is_mask and graph_input.example.size > 0 and (called_mask or bool(graph_input.example.all()))


def is_attention_mask(graph_input: GraphInput) -> bool:
    """A mask of more axes, whose last one is the keys: one that hides nothing, or one that is added to the logits."""
    if graph_input.example.ndim < 3:
        return False
    hides_nothing = graph_input.kind in ("bool", "flags") and graph_input.example.size > 0 and bool(graph_input.example.all())
    return hides_nothing or graph_input.kind == "float mask"


def padded(inputs: Sequence[GraphInput], domain: Domain) -> Iterator[Case]:
    """Cases for masks (B, N), and for masks (B, H, S, N) or (B, S, N)."""
    masks = [i for i in inputs if is_padding_mask(i)]
    if masks:
        yield from _rows_of_keys(inputs, masks, domain)
    attention_masks = [i for i in inputs if is_attention_mask(i)]
    if attention_masks:
        yield from _one_key(inputs, attention_masks)


def _rows_of_keys(inputs: Sequence[GraphInput], masks: Sequence[GraphInput], domain: Domain) -> Iterator[Case]:
    sizes, symbols = example_sizes(inputs), symbols_of(inputs)
    longer = {symbol: max(sizes[symbol], _FEWEST_KEYS) for symbol in symbols.lengths}
    window = min(domain.windows, default=1 << 30)
    one = dict.fromkeys(symbols.batches, 1)
    for number, (name, purpose, hide, changed) in enumerate(_patterns(one)):
        plain = random_case(name, inputs, {**sizes, **longer, **changed}, seed=3000 + number, purpose=purpose)
        shown = {mask.name: np.ones_like(plain.inputs[mask.name]) for mask in masks if plain.inputs[mask.name].shape[-1] > 1}
        gone = {name: hide(*mask.shape) for name, mask in shown.items()}
        hidden = {name: np.where(gone[name], 0, mask).astype(mask.dtype) for name, mask in shown.items()}
        if not any(pattern.any() for pattern in gone.values()):
            continue
        case = dataclasses.replace(plain, inputs={**plain.inputs, **hidden})
        if any(_run_of(pattern) >= window or pattern[:, 0].any() for pattern in gone.values()):
            case = _without_hidden_values(case, inputs, gone)
            if case.with_other_padding is None:
                continue  # whose rows are the padding's cannot be told
        yield case


def _left(batch: int, keys: int) -> Tensor:
    """The first half in the first row, the first key in the second, nothing in the others."""
    hidden = np.zeros((batch, keys), dtype=np.bool_)
    hidden[0, : keys // 2] = True
    hidden[1:2, 0] = True
    return hidden


def _right(batch: int, keys: int) -> Tensor:
    hidden = np.zeros((batch, keys), dtype=np.bool_)
    hidden[0, -(keys // 3 or 1) :] = True
    hidden[1:2, -1] = True
    return hidden


def _inner(batch: int, keys: int) -> Tensor:
    """Single keys behind the first: every query still sees one, whatever window of two or more there is."""
    hidden = np.zeros((batch, keys), dtype=np.bool_)
    hidden[0, 2:-1:2] = True
    hidden[1:2, 1:-1:3] = True
    return hidden


def _whole_row(batch: int, keys: int) -> Tensor:
    hidden = np.zeros((batch, keys), dtype=np.bool_)
    if batch > 1:
        hidden[-1] = True
    return hidden


_Hide = Callable[[int, int], Tensor]


def _patterns(one: Sizes) -> Iterator[tuple[str, str, _Hide, Sizes]]:
    """Name, purpose, what is hidden, and sizes other than the example's; `one` is a batch of one where that is free."""
    yield "left padding", "a mask that is ignored, or read at the last keys only", _left, {}
    yield "right padding", "a mask that is ignored, or read at the first keys only", _right, {}
    yield "inner padding", "a mask that is taken for a length", _inner, {}
    yield "a row of padding", "a row without a visible key that spoils the others", _whole_row, {}
    if one:
        for name, hide in (("left", _left), ("inner", _inner)):
            yield f"{name} padding, batch 1", "a mask that is ignored where one row needs none", hide, one


def _run_of(hidden: Tensor) -> int:
    """The largest number of hidden keys side by side."""
    longest = 0
    for row in hidden:
        ends = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(np.int64), [0]])))
        longest = max(longest, int((ends[1::2] - ends[::2]).max(initial=0)))
    return longest


def _without_hidden_values(case: Case, inputs: Sequence[GraphInput], gone: Mapping[str, Tensor]) -> Case:
    """`case` with positions as a tokenizer counts them, and its inputs again with other values where keys are hidden."""
    hidden = next(iter(gone.values()))
    batch, keys = hidden.shape
    new = {i.name for i in inputs if i.kind in ("tokens", "activations") and i.example.ndim >= 2 and not i.is_called_past}
    lengths = {case.inputs[name].shape[1] for name in new if case.inputs[name].shape[0] == batch}
    if len(lengths) != 1:
        return case
    (length,) = lengths
    other: dict[str, Tensor] = {}
    for graph_input in inputs:
        array = case.inputs[graph_input.name]
        if graph_input.name in new and array.shape[0] == batch:
            other[graph_input.name] = _with_others(graph_input, array, hidden[:, keys - length :], axis=1)
        elif graph_input.is_called_past and array.ndim >= 3 and array.shape[0] == batch and keys - length in array.shape[1:]:
            other[graph_input.name] = _with_others(
                graph_input, array, hidden[:, : keys - length], axis=1 + array.shape[1:].index(keys - length)
            )
    positions = {i.name: _counted(case.inputs[i.name], hidden) for i in inputs if i.kind == "positions"}
    given = {**case.inputs, **positions}
    return dataclasses.replace(case, inputs=given, with_other_padding={**given, **other}) if other else case


def _counted(positions: Tensor, hidden: Tensor) -> Tensor:
    """Positions (B, S) of the last S keys, counted from the first visible one; others as they are."""
    batch, keys = hidden.shape
    if positions.ndim != 2 or positions.shape[0] != batch or positions.shape[1] > keys:
        return positions
    counted = np.maximum(np.cumsum(~hidden, 1) - 1, 0)
    return counted[:, keys - positions.shape[1] :].astype(positions.dtype)


def _with_others(graph_input: GraphInput, array: Tensor, hidden: Tensor, *, axis: int) -> Tensor:
    """`array` with other values at `hidden` (B, length of `axis`)."""
    if graph_input.kind == "tokens":
        low, high = int(graph_input.example.min()), int(graph_input.example.max())
        other = low + (array - low + 1) % max(high - low + 1, 1)
    else:
        other = 1.0 - array[..., ::-1]
    shape = [1] * array.ndim
    shape[0], shape[axis] = hidden.shape
    return np.where(hidden.reshape(shape), other, array)


def _one_key(inputs: Sequence[GraphInput], masks: Sequence[GraphInput]) -> Iterator[Case]:
    """One key of the first sequence is hidden, the last or the second: nobody reads a mask that hides nothing."""
    for number, key in enumerate((-1, 1)):
        name = ("last key hidden", "second key hidden")[number]
        plain = random_case(name, inputs, example_sizes(inputs), seed=3100 + number, purpose="a mask that is ignored")
        hidden: dict[str, Tensor] = {}
        for mask in masks:
            array = plain.inputs[mask.name]
            is_float = mask.kind == "float mask"
            if array.shape[-1] > 2 and not (is_float and key == -1):
                hidden[mask.name] = array.copy()
                hidden[mask.name][0, ..., key] = mask.example.min() if is_float else 0
        if hidden:
            yield dataclasses.replace(plain, inputs={**plain.inputs, **hidden})
