"""Attention masks that an exporter spelled out as a graph: which part is causality or a window, and which part must stay.

Use::

    context = MaskContext()                      # one per graph: all layers share its memo
    fragment = recognise_mask(mask, context=context,
                              query_length=context.extent(query, -2), key_length=context.extent(key, -2))
    if fragment.recognised and fragment.alignment in ("upper_left", "both", "none"): ...

`mask` is what meets the scores: a boolean tensor (True: this key is seen; input 4 of `Attention`), or a float tensor that is added to
the scores.  For `Where(hidden, fill, scores)` pass the boolean `hidden` with `negated=True`.

The answer is always a `MaskFragment`: what is not recognised is in its `residual`, each term with a reason; a mask of which nothing is
recognised comes back as one residual term, the mask itself.  What is recognised holds for every shape, not only for sizes tried.
Dimension names that the graph declares (`batch`, `s70 + 1`) are taken at their word: equal names are equal sizes.

The meaning of a fragment, for the query at index i, the key at index j and `p = i + query_offset`::

    visible(i, j) = (j <= p if is_causal) and (p - left_window_size <= j if left_window_size >= 0)
                    and (j <= p + right_window_size if right_window_size >= 0) and every residual term of kind "keep"
    bias(i, j)    = (0 if visible(i, j) else fill) + the sum of the residual terms of kind "add"

Window sizes follow ONNX Attention-25: a window of W tokens is `left_window_size = W - 1`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from qknorm_onnx.graph.recognise.index_terms import Dimension, Linear, form_of

Alignment = Literal["none", "both", "upper_left", "lower_right", "other"]


@dataclass(frozen=True)
class ResidualTerm:
    """One part of the mask that was not recognised and must stay in the graph.

    `value` is an existing value of the graph; `axes` has one entry per axis of the mask: the axis of `value` that lies there, or None
    where the term is the same all along.  When `broadcasts` is true the value can be used as it is, else transpose it so that its axes
    ascend and unsqueeze the axes that are None.  `kind` "keep" is boolean, True (False when `negated`) where the key is visible;
    `kind` "add" is a float that is added to the scores.  `fill_value` is what a "keep" term wrote over hidden scores, None if boolean.
    """

    value: ir.Value
    kind: Literal["keep", "add"]
    negated: bool
    axes: tuple[int | None, ...]
    fill_value: float | None
    reason: str

    @property
    def broadcasts(self) -> bool:
        """Whether `value` broadcasts to the mask by ONNX's rules without a transpose or an unsqueeze."""
        used = [axis for axis in self.axes if axis is not None]
        return used == list(range(len(used))) and None not in self.axes[len(self.axes) - len(used) :]


@dataclass(frozen=True)
class MaskFragment:
    """What a mask was recognised as; see the head of this module for the meaning of the fields.

    `alignment` says which query offset the recognised part has: "upper_left" 0 (no cache, as PyTorch's `is_causal`), "lower_right"
    `key_length - query_length` (queries are the last tokens: a cache of P tokens in front), "both" where the two lengths are equal,
    "other" any other `query_offset` (a number that the graph reads elsewhere), "none" where nothing depends on positions.  `recognised` is false where the one residual term is the whole mask.  `reasons` has one
    sentence for each residual term.
    `query_length` and `key_length` are the sizes of the recognised mask: the caller that did not pass its own must compare them.
    `rows_never_empty`: every query is proven to see a key, so that the fill value cannot show.  Where it is false, a fill of -inf
    gives such a row zeros or NaN and the smallest finite number gives it the mean of all values.
    """

    is_causal: bool
    left_window_size: int
    right_window_size: int
    alignment: Alignment
    query_offset: Linear
    query_length: Linear
    key_length: Linear
    residual: tuple[ResidualTerm, ...]
    fill_value: float | None
    rows_never_empty: bool
    recognised: bool
    reasons: tuple[str, ...]

    @property
    def fill(self) -> Literal["-inf", "finfo_min", "large_negative"] | None:
        """Kind of the number written over hidden scores; None for a boolean mask."""
        if self.fill_value is None:
            return None
        if self.fill_value == float("-inf"):
            return "-inf"
        return "finfo_min" if self.fill_value <= -65504.0 and self.fill_value != -1e9 else "large_negative"


class MaskContext:
    """What is known of one graph's values; share one between all masks of a graph, so that each value is read once."""

    def extent(self, value: ir.Value, axis: int) -> Linear:
        """The size of `value` along `axis` (negative: from the end) as a form in the graph's dimensions."""
        dims = value.shape.dims if value.shape is not None else ()
        dim = dims[axis] if -len(dims) <= axis < len(dims) else None
        return Linear(dim) if isinstance(dim, int) else form_of(Dimension(f"{value.name}[{axis}]", value, axis))


def recognise_mask(
    mask: ir.Value,
    *,
    context: MaskContext,
    negated: bool = False,
    query_axis: int = -2,
    key_axis: int = -1,
    query_length: Linear | None = None,
    key_length: Linear | None = None,
) -> MaskFragment:
    """Read `mask` as causality, windows and a residual; see the head of this module.

    `mask` is boolean or float with any rank >= 1 that broadcasts to (B, H, S, T); `negated`: True hides a key (boolean masks only).
    `query_axis` and `key_axis` count from the end.  With `query_length` and `key_length`, the attention's own S and T, a mask is
    recognised only where its sizes are proven to be those; without, the caller has to compare them with the fragment's.
    """
    rank = len(mask.shape.dims) if mask.shape is not None else 2
    term = ResidualTerm(mask, "keep" if mask.dtype == ir.DataType.BOOL else "add", negated, tuple(range(rank)), None, "not read")
    query, key = query_length or context.extent(mask, query_axis), key_length or context.extent(mask, key_axis)
    return MaskFragment(False, -1, -1, "none", Linear(), query, key, (term,), None, False, False, (term.reason,))
