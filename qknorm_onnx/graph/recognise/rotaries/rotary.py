"""Rotary embeddings in front of a core, told by what they compute and not by how they are written."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from qknorm_onnx.graph.match.fragments import Rotary
from qknorm_onnx.graph.match.located import Dim, Located, Unreadable
from qknorm_onnx.graph.recognise.rotaries.channels import CHANNEL_RULES, ChannelReader
from qknorm_onnx.graph.recognise.rotaries.operator import read_rotary_operator
from qknorm_onnx.graph.recognise.rotaries.pairs import read_turn
from qknorm_onnx.graph.recognise.rotaries.projection import on_projection, read_on_projection
from qknorm_onnx.graph.recognise.rotaries.terms import NotLinearError
from qknorm_onnx.graph.recognise.rotaries.unrotated import read_unrotated_ends
from qknorm_onnx.graph.walk.constants import producer, rank_of
from qknorm_onnx.graph.walk.layout import dims_of
from qknorm_onnx.graph.walk.limits import ROTARY_CANDIDATES, ROTARY_STEPS
from qknorm_onnx.graph.walk.readings import described, gave_up

ROOM = "rotaries"
NO_PAIRS = "its values are no pairs (a cos - b sin, b cos + a sin) of those of"


def read_rotary(located: Located) -> tuple[Rotary, Located] | Unreadable | None:
    """The rotary embedding that makes `located`, in whatever spelling, and what it rotates."""
    operator = read_rotary_operator(located)
    if operator is not None:
        return operator
    if not located.layout or located.layout[-1] not in ("D", "HD"):
        return None
    if producer(located.value, *OUTPUT_OPERATORS) is None:
        return None
    between = read_unrotated_ends(located, read_rotary)
    if between is not None:
        return between
    behind = _behind(located.value)
    candidates = _fitting(behind, len(located.layout), dims_of(located.value)) if located.layout[-1] == "D" else []
    found = (_from_candidate(located, candidate) for candidate in candidates)
    first = next((item for item in found if item is not None), None)
    if first is not None:
        return first
    heads, size = located.static("H"), located.static("D")
    merged = on_projection(located)
    candidates = _fitting(behind, len(merged), (heads * size,)) if merged and heads is not None and size is not None else []
    whole = (read_on_projection(located, candidate) for candidate in candidates)
    return next((item for item in whole if item is not None), None)


# What can stand last in a rotary embedding.
OUTPUT_OPERATORS = ("Add", "Concat", "Reshape", "Cast")


def _behind(value: ir.Value) -> tuple[ir.Value, ...]:
    """The values behind `value` through operators of rotary embeddings, nearest first."""
    seen: dict[ir.Value, None] = {}
    layer = [value]
    for _ in range(ROTARY_STEPS):
        behind: dict[ir.Value, None] = {}
        for item in layer:
            node = item.producer()
            if node is not None and (node.domain, node.op_type) in CHANNEL_RULES:
                behind.update(dict.fromkeys(operand for operand in node.inputs if operand is not None))
        layer = [item for item in behind if item not in seen and item.const_value is None]
        seen.update(dict.fromkeys(layer))
    return tuple(seen)


def _fitting(values: Sequence[ir.Value], rank: int, dims: Sequence[Dim] | None) -> list[ir.Value]:
    """Those that may be what is rotated: they have `rank` axes and as many channels as `dims` has last."""
    fitting = [item for item in values if rank_of(item) == rank and (dims_of(item) or (0,))[-1] == (dims or (0,))[-1]]
    return fitting[:ROTARY_CANDIDATES]


def _from_candidate(located: Located, candidate: ir.Value) -> tuple[Rotary, Located] | None:
    dims, target = dims_of(candidate), dims_of(located.value)
    if dims is None or target is None or len(dims) != len(target) or dims[-1] != target[-1]:
        return None
    try:
        channels = ChannelReader(candidate).read(located.value)
    except NotLinearError as error:
        why = f"seen from {described(located.at(candidate, located.layout))}: {error}, at {described(error.node)}"
        gave_up(read_rotary, located, why, ROOM)
        return None
    if channels is None or channels.ndim != 1:
        return None
    rotary = read_turn(list(channels), located)
    if rotary is None:
        why = f"{NO_PAIRS} {described(located.at(candidate, located.layout))}"
        gave_up(read_rotary, located, why, ROOM)
        return None
    return rotary, located.at(candidate, located.layout)
