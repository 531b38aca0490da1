"""Channels as pairs of values that are turned: which ones, by which tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from qknorm_onnx.graph.match.fragments import Rotary, Table
from qknorm_onnx.graph.match.located import Layout, Located
from qknorm_onnx.graph.recognise.rotaries.matrix import read_matrices, tables_of
from qknorm_onnx.graph.recognise.rotaries.table_sources import with_sources
from qknorm_onnx.graph.recognise.rotaries.tables import make_table
from qknorm_onnx.graph.recognise.rotaries.terms import Term, Terms


@dataclasses.dataclass(frozen=True)
class Pair:
    """y_first = x_first * cos - x_second * sin, y_second = x_second * cos + x_first * sin, `reversed`: with -sin."""

    first: int
    second: int
    reversed: bool


def read_turn(channels: Sequence[Terms], located: Located) -> Rotary | None:
    """The rotary embedding that maps x to `channels`, whichever tables it comes with."""
    found = read_pairs(channels, located) or read_rotations(channels, located)
    sourced = with_sources(channels, located.layout) if found is None else None
    return found if sourced is None else read_pairs(sourced, located)


def read_pairs(channels: Sequence[Terms], located: Located) -> Rotary | None:
    """The rotary embedding that maps x to `channels`, if it is one."""
    turned = {index: _split_terms(terms, index) for index, terms in enumerate(channels) if terms != (Term(1, index),)}
    if not turned or any(split is None for split in turned.values()):
        return None
    parts = {index: split for index, split in turned.items() if split is not None}
    offset, size = min(parts), len(parts)
    if max(parts) != offset + size - 1 or size % 2:
        return None
    pairs = _pairs(parts)
    if pairs is None or len({pair.reversed for pair in pairs}) != 1:
        return None
    arrangement = _arrangement(pairs, offset, size)
    if arrangement is None:
        return None
    interleaved, sections = arrangement
    order = [index for pair in pairs for index in (pair.first, pair.second)]
    layout = _table_layout(located.layout)
    cos = make_table({index: parts[index][0] for index in order}, pairs=[(p.first, p.second) for p in pairs], layout=layout)
    sin = make_table({index: parts[index][1] for index in order}, pairs=[(p.first, p.second) for p in pairs], layout=layout)
    if cos is None or sin is None:
        return None
    cos, sin = _same_width(cos, sin, parts, layout)
    if pairs[0].reversed:
        sin = dataclasses.replace(sin, negated=True)
    whole = offset == 0 and size == len(channels)
    return Rotary(
        cos=cos,
        sin=sin,
        interleaved=interleaved,
        size=0 if whole else size,
        offset=offset,
        sections=sections,
        node=located.value.producer(),
    )


def read_rotations(channels: Sequence[Terms], located: Located) -> Rotary | None:
    """As `read_pairs`, where sines carry their sign in a constant of 2 x 2 matrices; the whole head is rotated."""
    parts = read_matrices(channels)
    if parts is None:
        return None
    pairs = [Pair(index, parts[index][1].source, False) for index in parts if index < parts[index][1].source]
    arrangement = _arrangement(pairs, 0, len(channels)) if 2 * len(pairs) == len(channels) else None
    tables = tables_of(parts, [(pair.first, pair.second) for pair in pairs]) if arrangement is not None else None
    if arrangement is None or tables is None:
        return None
    cos, sin = tables
    node = located.value.producer()
    return Rotary(cos=cos, sin=sin, interleaved=arrangement[0], size=0, offset=0, sections=arrangement[1], node=node)


def _split_terms(terms: Terms, index: int) -> tuple[Term, Term] | None:
    """The cosine's and the sine's term of output `index`."""
    if len(terms) != 2 or any(term.table is None for term in terms):
        return None
    own = [term for term in terms if term.source == index]
    other = [term for term in terms if term.source != index]
    return (own[0], other[0]) if len(own) == 1 and own[0].sign == 1 else None


def _pairs(parts: dict[int, tuple[Term, Term]]) -> list[Pair] | None:
    pairs = []
    for first in sorted(parts):
        second = parts[first][1].source
        if second not in parts or parts[second][1].source != first:
            return None
        signs = parts[first][1].sign, parts[second][1].sign
        if signs[0] == signs[1]:
            return None
        if first < second:
            pairs.append(Pair(first, second, signs[0] == 1))
    return pairs


def _arrangement(pairs: Sequence[Pair], offset: int, size: int) -> tuple[bool, int] | None:
    """Whether pairs are neighbours, and the number of sections in which they are halves."""
    distances = {pair.second - pair.first for pair in pairs}
    if len(distances) != 1:
        return None
    distance = distances.pop()
    firsts = [pair.first - offset for pair in pairs]
    if distance == 1 and size > 2:
        return (True, 1) if firsts == list(range(0, size, 2)) else None
    block = 2 * distance
    if size % block or firsts != [start + index for start in range(0, size, block) for index in range(distance)]:
        return None
    return False, size // block


def _table_layout(layout: Layout) -> Layout:
    return (*layout[:-1], "W")


def _same_width(cos: Table, sin: Table, parts: dict[int, tuple[Term, Term]], layout: Layout) -> tuple[Table, Table]:
    """Both tables with one factor per value, if only one of them could be had with one per pair."""
    if cos.width == sin.width:
        return cos, sin
    wide = [make_table({index: parts[index][side] for index in sorted(parts)}, pairs=(), layout=layout) for side in (0, 1)]
    assert wide[0] is not None and wide[1] is not None, "a table with one factor per value can always be made"
    return wide[0], wide[1]
