"""Rotary embeddings of a whole projection (..., H*D): before its heads are split, or by the same Reshape that splits pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.match.fragments import Rotary, Table
from qknorm_onnx.graph.match.located import Layout, Located
from qknorm_onnx.graph.recognise.rotaries.channels import ChannelReader
from qknorm_onnx.graph.recognise.rotaries.pairs import read_turn
from qknorm_onnx.graph.recognise.rotaries.tables import same_table
from qknorm_onnx.graph.recognise.rotaries.terms import NotLinearError, Terms
from qknorm_onnx.graph.walk.layout import dims_of
from qknorm_onnx.graph.walk.readings import described, gave_up

ROOM = "rotaries"


def on_projection(located: Located) -> Layout | None:
    """The axes of `located` with heads and values as one last axis; None where they are none."""
    if located.layout[-1:] == ("HD",):
        return located.layout
    return (*located.layout[:-2], "HD") if located.layout[-2:] == ("H", "D") else None


def read_on_projection(located: Located, candidate: ir.Value) -> tuple[Rotary, Located] | None:
    """The rotary embedding of each head, where `candidate` is what is rotated with heads and values as one axis."""
    merged = on_projection(located)
    heads, size = located.static("H"), located.static("D")
    dims = dims_of(candidate)
    if merged is None or heads is None or size is None or dims is None or len(dims) != len(merged):
        return None
    source = located.at(candidate, merged)
    try:
        channels = ChannelReader(candidate).read(located.value)
    except NotLinearError as error:
        why = f"seen from {described(source)}: {error}, at {described(error.node)}"
        gave_up(read_on_projection, located, why, ROOM)
        return None
    if channels is None or channels.size != heads * size or channels.shape not in ((heads * size,), (heads, size)):
        return None
    flat: list[Terms] = list(channels.reshape(-1))
    apart = [_of_head(flat[head * size : (head + 1) * size], head * size) for head in range(heads)]
    rotaries = [read_turn(terms, located) if _inside(terms, size) else None for terms in apart]
    rotary = _one_for_all([item for item in rotaries if item is not None], heads)
    if rotary is None:
        why = f"its values are no pairs (a cos - b sin, b cos + a sin) of those of {described(source)}, alike in each head"
        gave_up(read_on_projection, located, why, ROOM)
        return None
    return rotary, source


def _of_head(terms: Sequence[Terms], first: int) -> list[Terms]:
    """The terms of one head, their sources counted from its first value."""
    return [tuple(dataclasses.replace(term, source=term.source - first) for term in of_value) for of_value in terms]


def _inside(terms: Sequence[Terms], size: int) -> bool:
    return all(0 <= term.source < size for of_value in terms for term in of_value)


def _one_for_all(rotaries: Sequence[Rotary], heads: int) -> Rotary | None:
    """One rotary embedding, whose tables are those of the heads side by side where they differ."""
    if len(rotaries) != heads:
        return None
    first = rotaries[0]
    tables = [_side_by_side([getattr(rotary, name) for rotary in rotaries]) for name in ("cos", "sin")]
    alike = {dataclasses.replace(rotary, cos=first.cos, sin=first.sin) for rotary in rotaries}
    if len(alike) != 1 or tables[0] is None or tables[1] is None:
        return None
    return dataclasses.replace(first, cos=tables[0], sin=tables[1])


def _side_by_side(tables: Sequence[Table]) -> Table | None:
    """The table that all heads share, or their columns one head behind the other."""
    if all(same_table(table, tables[0]) for table in tables):
        return tables[0]
    values = {value for table in tables for value, _ in table.parts}
    rests = {dataclasses.replace(table, parts=(), roots=()) for table in tables}
    if len(values) != 1 or len(rests) != 1 or len({table.width for table in tables}) != 1 or "H" in tables[0].layout:
        return None
    columns = tuple(int(column) for column in np.concatenate([columns for table in tables for _, columns in table.parts]))
    roots = tuple(dict.fromkeys(root for table in tables for root in table.roots))
    return dataclasses.replace(tables[0], parts=((values.pop(), columns),), roots=roots, heads=len(tables))
