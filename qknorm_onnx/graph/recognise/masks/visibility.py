"""Masks of a core: causality and windows as numbers where they are proven, a bias for everything else."""

from __future__ import annotations

import dataclasses

from qknorm_onnx.graph.match.attention_core import Bias, Core
from qknorm_onnx.graph.match.qk_norm_match import Visibility
from qknorm_onnx.graph.recognise.masks.mask import MaskContext, MaskFragment, recognise_mask
from qknorm_onnx.graph.symbolic.terms import Linear
from qknorm_onnx.graph.walk.readings import record

ROOM = "masks"


def read_visibility(core: Core, masks: MaskContext, *, cached: bool, first: Linear | None = None) -> Visibility:
    """Everything that is added to the logits of `core` or hides keys. `cached`: the queries stand behind past keys.

    `first`: the first query's position in a buffer of fixed size.
    """
    visibility = Visibility(is_causal=core.is_causal, left_window_size=core.left_window_size)
    for bias in core.biases:
        if bias.windows or bias.folded or bias.grouped is not None:
            visibility = dataclasses.replace(visibility, biases=(*visibility.biases, bias))
            continue
        fragment = recognise_mask(
            bias.value,
            context=masks,
            negated=bias.negated,
            fill_value=bias.fill,
            query_axis=_query_axis(bias),
            query_length=masks.extent(core.query.value, core.query.layout.index("S")),
            key_length=masks.extent(core.key.value, core.key.layout.index("S")),
        )
        fits = _same_function(fragment, cached=cached) if first is None else _fits_buffer(fragment, first)
        _record(bias, fragment, fits=fits)
        visibility = _joined(visibility, bias, fragment, fits=fits)
    return visibility


def _record(bias: Bias, fragment: MaskFragment, *, fits: bool) -> None:
    """What a mask was read as, and which parts of it stay a tensor that is added, and why."""
    why = "; ".join(fragment.reasons) or (
        "" if fits else f"its limits are counted from {fragment.alignment}, or empty rows differ"
    )
    record(recognise_mask, bias.value, "read" if fits and fragment.recognised else "no", ROOM, why=why)


def _query_axis(bias: Bias) -> int:
    """The axis of the queries, counted from the end."""
    if bias.axes is None or bias.axes[2] is None or bias.value.shape is None:
        return -2
    return bias.axes[2] - len(bias.value.shape)


def _joined(visibility: Visibility, bias: Bias, fragment: MaskFragment, *, fits: bool) -> Visibility:
    if not fits:
        return dataclasses.replace(visibility, biases=(*visibility.biases, bias))
    rest = tuple(
        Bias(term.value, term.negated, term.fill_value if term.kind == "keep" else None, axes=_axes_of_logits(bias, term.axes))
        for term in fragment.residual
    )
    return Visibility(
        is_causal=visibility.is_causal or fragment.is_causal,
        left_window_size=_narrower(visibility.left_window_size, fragment.left_window_size),
        right_window_size=_narrower(visibility.right_window_size, fragment.right_window_size),
        biases=(*visibility.biases, *rest),
    )


def _axes_of_logits(bias: Bias, axes: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Those of a part of the mask `bias`, which are counted along the mask's own axes, along the axes of the logits."""
    if bias.axes is None:
        return axes
    return tuple(axes[place] if place is not None else None for place in bias.axes)


def _same_function(fragment: MaskFragment, *, cached: bool) -> bool:
    """Whether the fragment, read as an operator's attributes, is the mask: counted from the right position, and where a row
    may see no key, with such a row as zeros (a finite fill value makes it the mean of all values instead).
    """
    if not fragment.recognised:
        return False
    places = ("none", "lower_right") if cached else ("none", "both", "upper_left")
    return fragment.alignment in places and (fragment.rows_never_empty or fragment.fill in (None, "-inf"))


def _fits_buffer(fragment: MaskFragment, first: Linear) -> bool:
    """As `_same_function`, for queries from `first` on: each sees the key written with it, if nothing else hides that."""
    if not fragment.recognised or (fragment.alignment != "none" and fragment.query_offset != first):
        return False
    return not fragment.residual or fragment.fill in (None, "-inf")


def _narrower(first: int, second: int) -> int:
    return max(first, second) if -1 in (first, second) else min(first, second)
