"""Attention masks that an exporter spelled out as a graph: which part is causality or a window, and which part must stay.

Use::

    context = MaskContext()                      # one per graph: all layers share its memo
    fragment = recognise_mask(mask, context=context,
                              query_length=context.extent(query, -2), key_length=context.extent(key, -2))
    if fragment.recognised and fragment.alignment in ("upper_left", "both", "none"): ...

`mask` is what meets the scores: a boolean tensor (True: this key is seen; input 4 of `Attention`), or a float tensor that is
added to the scores.  For `Where(hidden, fill, scores)` pass the boolean `hidden` with `negated=True` and `fill_value=fill`.

The answer is always a `MaskFragment`: what is not recognised is in its `residual`, each term with a reason; a mask of which
nothing is recognised comes back as one residual term, the mask itself.  What is recognised holds for every shape, not only
for sizes tried. Dimension names that the graph declares (`batch`, `s70 + 1`) are taken at their word: equal names are equal
sizes.

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

from qknorm_onnx.graph.recognise.masks.band import Alignment, Band, Finding, Place, fit_band
from qknorm_onnx.graph.recognise.masks.clipping import Clipping
from qknorm_onnx.graph.recognise.masks.conjuncts import SMALLEST_FINITE, Part, additive_parts, boolean_parts, type_of
from qknorm_onnx.graph.symbolic.algebra import proven_nonnegative
from qknorm_onnx.graph.symbolic.expression import IndexReader
from qknorm_onnx.graph.symbolic.terms import ONE, Dimension, Linear, form_of


@dataclass(frozen=True)
class ResidualTerm:
    """One part of the mask that was not recognised and must stay in the graph.

    `value` is an existing value of the graph; `axes` has one entry per axis of the mask: the axis of `value` that lies there,
    or None where the term is the same all along.  When `broadcasts` is true the value can be used as it is, else transpose it
    so that its axes ascend and unsqueeze the axes that are None.  `kind` "keep" is boolean, True (False when `negated`) where
    the key is visible; `kind` "add" is a float that is added to the scores.  `fill_value` is what a "keep" term wrote over
    hidden scores, None if boolean.
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

    `alignment` says which query offset the recognised part has: "upper_left" 0 (no cache, as PyTorch's `is_causal`),
    "lower_right" `key_length - query_length` (the queries are the last tokens: a cache of P tokens in front), "both" where
    the two lengths are equal, "other" any other `query_offset` (a number that the graph reads elsewhere), "none" where
    nothing depends on positions.  `query_length` and `key_length` are the sizes of the mask: a caller that did not pass its
    own must compare them.
    `fill_value`: what the recognised part writes over hidden scores, None where it is boolean.
    `rows_never_empty`: every query is proven to see a key, so that the fill value cannot show.  Where it is false, a fill of -inf
    gives a row that sees no key zeros or NaN, and the smallest finite number gives it the mean of all values.
    `recognised` is false where the one residual term is the whole mask.  `reasons` has one sentence for each residual term.
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
        return "finfo_min" if self.fill_value in SMALLEST_FINITE else "large_negative"


class MaskContext:
    """What is known of one graph's values; share one between all masks of a graph, so that each value is read once.

    It stays valid while the graph is rewritten as long as a value that it has read keeps its meaning.
    """

    def __init__(self) -> None:
        self.reader = IndexReader()
        self._nonempty: dict[frozenset[Dimension], IndexReader] = {frozenset(): self.reader}

    def reader_of(self, mask: ir.Value, *lengths: Linear | None) -> IndexReader:
        """The reader for `mask`, which takes its sizes and `lengths` to be 1 at least: where one is 0, nothing is attended."""
        known = self.reader.read(mask)
        extents = [*(known.extents if known is not None else ()), *(length for length in lengths if length is not None)]
        terms = [term for extent in extents if len(extent.terms) == 1 for term in extent.terms]
        sizes = frozenset(atom for atom, _ in terms if isinstance(atom, Dimension))
        return self._nonempty.setdefault(sizes, IndexReader(sizes))

    def extent(self, value: ir.Value, axis: int) -> Linear:
        """The size of `value` along `axis` (negative: from the end) as a form in the graph's dimensions.

        A size about which nothing is known is a dimension of its own, equal only to itself.
        """
        extents = self.reader.extents(value)
        if extents is None or not -len(extents) <= axis < len(extents):
            return form_of(Dimension(f"{value.name}.shape[{axis}]", value, axis))
        return extents[axis]


def recognise_mask(
    mask: ir.Value,
    *,
    context: MaskContext,
    negated: bool = False,
    fill_value: float | None = None,
    query_axis: int = -2,
    key_axis: int = -1,
    query_length: Linear | None = None,
    key_length: Linear | None = None,
) -> MaskFragment:
    """Read `mask` as causality, windows and a residual; see the head of this module.

    `mask` is boolean or float with any rank that broadcasts to (B, H, S, T).  For boolean masks, `negated`: True hides a key, and
    `fill_value`: what the caller's Where writes over hidden scores.  `query_axis` and `key_axis` count from the end.  With
    `query_length` and `key_length`, the attention's own S and T, a mask is recognised only where its sizes are proven to be those
    (a mask aligned to the lower right needs only S); without, the caller has to compare them with the fragment's.
    """
    reader = context.reader_of(mask, query_length, key_length)
    known = reader.read(mask)
    kind: Literal["keep", "add"] = "keep" if type_of(reader, mask) == ir.DataType.BOOL else "add"
    if known is None or known.rank < max(-query_axis, -key_axis):
        query, key = (context.extent(mask, axis) for axis in (query_axis, key_axis))
        rank = known.rank if known is not None else 0
        return _untouched(mask, kind, rank, negated, fill_value, (query, key), ("the mask's shape shows no query and key axes",))
    sizes = (
        _known_or(known.extents[query_axis], query_length),
        _known_or(known.extents[key_axis], key_length),
    )
    clipping = Clipping(sizes, (query_length, key_length))
    sizes = clipping.settled(sizes[0]), clipping.settled(sizes[1])
    place = Place(known.rank + query_axis, known.rank + key_axis, *sizes, clipping)
    axes = tuple(range(known.rank))
    if kind == "keep":
        parts = list(boolean_parts(reader, mask, axes, negated=negated, fill=fill_value))
    else:
        parts = list(additive_parts(reader, mask, axes))
    band = fit_band([Finding.of(reader, part, place) for part in parts], place)
    wrong = _wrong_size(band, place, query_length, key_length)
    if wrong is not None or not _is_gain(band, reader, place):
        reasons = tuple(dict.fromkeys(finding.reason for finding in band.kept)) if wrong is None else (wrong,)
        return _untouched(mask, kind, known.rank, negated, fill_value, sizes, reasons)
    return _recognised(band, place)


def _known_or(own: Linear, given: Linear | None) -> Linear:
    """A size of the mask; where the graph does not tell it, the attention's: mask and scores are broadcast to one size."""
    return given if given is not None and any(isinstance(atom, Dimension) and atom.owner for atom, _ in own.terms) else own


def _untouched(
    mask: ir.Value,
    kind: Literal["keep", "add"],
    rank: int,
    negated: bool,
    fill_value: float | None,
    sizes: tuple[Linear, Linear],
    reasons: tuple[str, ...],
) -> MaskFragment:
    term = ResidualTerm(mask, kind, negated, tuple(range(rank)), fill_value, "; ".join(reasons))
    return MaskFragment(
        is_causal=False,
        left_window_size=-1,
        right_window_size=-1,
        alignment="none",
        query_offset=Linear(),
        query_length=sizes[0],
        key_length=sizes[1],
        residual=(term,),
        fill_value=None,
        rows_never_empty=False,
        recognised=False,
        reasons=reasons,
    )


def _wrong_size(band: Band, place: Place, query_length: Linear | None, key_length: Linear | None) -> str | None:
    """Why the mask's sizes cannot be the attention's; None where they are, or where no position matters."""
    if band.alignment == "none":
        return None
    if query_length is not None and query_length != place.query_length:
        return f"the mask has {place.query_length} rows and the attention {query_length} queries, not proven equal"
    if key_length is not None and key_length != place.key_length and band.alignment != "lower_right":
        return f"the mask has {place.key_length} columns and the attention {key_length} keys, not proven equal"
    return None


def _is_gain(band: Band, reader: IndexReader, place: Place) -> bool:
    """Whether anything is won: a limit, or that no part is left that has a row for each query."""
    if band.alignment != "none" or not band.kept:
        return True
    return bool(band.adopted) and all(_is_one_row(finding.part, reader, place) for finding in band.kept)


def _is_one_row(part: Part, reader: IndexReader, place: Place) -> bool:
    axis, known = part.axes[place.query_axis], reader.read(part.value)
    return axis is None or (known is not None and known.extents[axis] == ONE)


def _recognised(band: Band, place: Place) -> MaskFragment:
    residual = tuple(
        ResidualTerm(
            value=finding.part.value,
            kind="keep" if finding.part.boolean else "add",
            negated=finding.part.negated,
            axes=finding.part.axes,
            fill_value=finding.part.fill,
            reason=finding.reason,
        )
        for finding in band.kept
    )
    fills = [finding.part.fill for finding in band.adopted if finding.part.fill is not None]
    return MaskFragment(
        is_causal=band.is_causal,
        left_window_size=band.left,
        right_window_size=band.right,
        alignment=band.alignment,
        query_offset=band.offset,
        query_length=place.query_length,
        key_length=place.key_length,
        residual=residual,
        fill_value=max(fills) if fills else None,
        rows_never_empty=not residual and _every_row_sees_a_key(band, place),
        recognised=True,
        reasons=tuple(term.reason for term in residual),
    )


def _every_row_sees_a_key(band: Band, place: Place) -> bool:
    """Whether the band alone leaves each query a key: key 0, or the one at its own position."""
    if band.alignment == "none" or (band.alignment == "upper_left" and band.left < 0):
        return True
    return band.alignment != "other" and proven_nonnegative(place.key_length - place.query_length, ())
