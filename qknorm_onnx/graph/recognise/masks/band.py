"""Fits the conditions of a mask into one band along the diagonal: causal, window sizes and the offset of the queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from qknorm_onnx.graph.recognise.masks.clipping import Clipping
from qknorm_onnx.graph.recognise.masks.conjuncts import Part, hides
from qknorm_onnx.graph.recognise.masks.limits import Limit, limits_of
from qknorm_onnx.graph.symbolic.algebra import negate, substitute
from qknorm_onnx.graph.symbolic.expression import IndexReader
from qknorm_onnx.graph.symbolic.tensor import plain
from qknorm_onnx.graph.symbolic.terms import NUMBERS, ONE, Element, Linear, Real, Select, Truth, index

Alignment: TypeAlias = Literal["none", "both", "upper_left", "lower_right", "other"]


@dataclass(frozen=True)
class Place:
    """Where queries and keys lie in a mask: two axes, counted from the front, their sizes, and what those say of other sizes."""

    query_axis: int
    key_axis: int
    query_length: Linear
    key_length: Linear
    clipping: Clipping


@dataclass(frozen=True)
class Finding:
    """What one part of a mask says: limits, and a reason where it says more than they do."""

    part: Part
    limits: tuple[Limit, ...]
    reason: str

    @staticmethod
    def of(reader: IndexReader, part: Part, place: Place) -> Finding:
        """Read one part of a mask."""
        truth, fill = _truth(reader, part)
        if truth is None:
            what = "a bias that is added to the scores" if not part.boolean else "a mask"
            return Finding(part, (), f"'{part.value.name}' is {what} whose values are not known")
        reason = _misfit(reader, part, place)
        if reason is not None:
            return Finding(part, (), reason)
        aligned = {axis: index(outer) for outer, axis in enumerate(part.axes) if axis is not None}
        condition = substitute(truth, aligned)
        assert not isinstance(condition, NUMBERS)
        limits, reasons = limits_of(
            condition, query_axis=place.query_axis, key_axis=place.key_axis, single_query=place.query_length == ONE
        )
        return Finding(replace(part, fill=fill), tuple(limits), "; ".join(f"'{part.value.name}': {text}" for text in reasons))


def _truth(reader: IndexReader, part: Part) -> tuple[Truth | None, float | None]:
    """The condition under which a key is seen, and the fill; None for a float that does more than hide."""
    known = reader.read(part.value)
    flat = plain(known) if known is not None else None
    if flat is None or flat.element is None:
        return None, part.fill
    element = flat.element
    if part.boolean:
        if isinstance(element, NUMBERS):
            return None, part.fill
        return negate(element) if part.negated else element, part.fill
    if isinstance(element, Select):
        for shown, hidden, seen in (
            (element.when_true, element.when_false, element.condition),
            (element.when_false, element.when_true, negate(element.condition)),
        ):
            number = _number(hidden)
            if shown == Linear() and number is not None and hides(number, known.dtype if known is not None else None):
                return seen, number
    return None, part.fill


def _number(element: Element) -> float | None:
    if isinstance(element, Real):
        return element.value
    return float(element.constant) if isinstance(element, Linear) and not element.terms else None


def _misfit(reader: IndexReader, part: Part, place: Place) -> str | None:
    """Why the sizes of a part are not proven to be those of the mask."""
    known = reader.read(part.value)
    for outer, wanted in ((place.query_axis, place.query_length), (place.key_axis, place.key_length)):
        axis = part.axes[outer]
        if known is not None and axis is not None and place.clipping.settled(known.extents[axis]) not in (ONE, wanted):
            return f"'{part.value.name}' has size {known.extents[axis]} where the mask has {wanted}, not proven equal"
    return None


@dataclass(frozen=True)
class Band:
    """The band that the adopted findings describe; the kept ones must stay in the graph."""

    is_causal: bool
    left: int
    right: int
    offset: Linear
    alignment: Alignment
    adopted: tuple[Finding, ...]
    kept: tuple[Finding, ...]


def fit_band(findings: Sequence[Finding], place: Place) -> Band:
    """The tightest band; a finding whose limits do not fit one offset, or leave the diagonal out, is kept as it is."""
    corner = place.key_length - place.query_length
    limits = [limit for finding in findings if not finding.reason for limit in finding.limits]
    offset = _best_offset(limits, corner)
    adopted, kept = [], []
    for finding in findings:
        misfits = [text for text in (_misplaced(limit, offset) for limit in finding.limits) if text]
        if finding.reason:
            kept.append(finding)
        elif misfits:
            kept.append(replace(finding, reason="; ".join(f"'{finding.part.value.name}': {misfit}" for misfit in misfits)))
        else:
            adopted.append(finding)
    used = [limit for finding in adopted for limit in finding.limits]
    right = min((_distance(limit, offset) for limit in used if limit.upper), default=-1)
    left = min((-_distance(limit, offset) for limit in used if not limit.upper), default=-1)
    return Band(
        is_causal=right == 0,
        left=left,
        right=-1 if right == 0 else right,
        offset=offset if used else Linear(),
        alignment=_alignment(offset, corner) if used else "none",
        adopted=tuple(adopted),
        kept=tuple(kept),
    )


def _best_offset(limits: Sequence[Limit], corner: Linear) -> Linear:
    """The query offset that most limits fit; 0 or `corner` where one does as well, of the two that with most causal limits."""

    def fitting(candidate: Linear) -> tuple[int, bool, int]:
        count = sum(_misplaced(limit, candidate) is None for limit in limits)
        causal = sum(limit.upper and limit.offset == candidate for limit in limits)
        return count, candidate in (Linear(), corner), causal

    unlike = [limit.offset for limit in limits if limit.upper and None is limit.offset.number is (limit.offset - corner).number]
    return max([Linear(), corner, *unlike], key=fitting)


def _distance(limit: Limit, offset: Linear) -> int:
    return (limit.offset - offset).constant


def _misplaced(limit: Limit, offset: Linear) -> str | None:
    """Why a limit is no causality or window around `offset`."""
    distance = (limit.offset - offset).number
    bound = f"keys {'up to' if limit.upper else 'from'} query + ({limit.offset})"
    if distance is None:
        return f"{bound}: not proven to be a constant distance from the query's own position"
    if distance < 0 if limit.upper else distance > 0:
        return f"{bound}: leaves out the query's own position, which no attribute says"
    return None


def _alignment(offset: Linear, corner: Linear) -> Alignment:
    if offset == corner:
        return "both" if offset == Linear() else "lower_right"
    return "upper_left" if offset == Linear() else "other"
