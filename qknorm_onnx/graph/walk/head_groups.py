"""Heads as two axes: K heads of keys and values, and for each of them G query heads; H = K * G, K outermost.

Query head h then reads key head h // G, as grouped-query attention says. The letters K and G are used only where both axes
are larger than 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from qknorm_onnx.graph.match.located import Dim, Layout, Located, Unreadable
from qknorm_onnx.graph.walk.constants import producer
from qknorm_onnx.graph.walk.layout import dims_of, letters_of, same_size
from qknorm_onnx.graph.walk.repeats import copies_of

TILED = "query head h reads key head h modulo their number"
TILED_HINT = (
    "repeat each key head next to itself (repeat_interleave), as query head h reads key head h // (q heads / key heads), and "
    "split query heads with the heads of keys outermost"
)


def joined_heads(located: Located) -> Located:
    """`located` with K and G called H where they are one axis."""
    if not any("KG" in letters for letters in located.layout):
        return located
    return located.at(located.value, tuple(letters.replace("KG", "H") for letters in located.layout))


def with_head_axis(located: Located) -> Located:
    """`located`, whose single head is part of another axis, with the head as the axis of size 1 that it also has."""
    inner = [letters for letters in located.layout if "H" in letters and len(letters) > 1]
    if located.sizes.get("H") != 1 or len(inner) != 1 or "" not in located.layout:
        return located
    layout = [letters.replace("H", "") if letters == inner[0] else letters for letters in located.layout]
    layout[located.layout.index("")] = "H"
    return located.at(located.value, tuple(layout))


def has_tiled_heads(located: Located) -> bool:
    """Whether K and G are one axis, but in the other order."""
    return any("GK" in letters for letters in located.layout)


def tiled_refusal(located: Located) -> Unreadable:
    """For queries with `has_tiled_heads` that are normalised."""
    return Unreadable(TILED, located.value.producer(), TILED_HINT)


def has_split_heads(layout: Layout) -> bool:
    """Whether heads are two axes."""
    return bool({"K", "G"} & set(letters_of(layout)))


def head_axes(sizes: tuple[int, int], key_sizes: tuple[Dim | None, Dim | None], key: ir.Value) -> tuple[str, str]:
    """Names of two axes of heads: K is the one that keys have too. `key_sizes`: None where the keys lack the axis."""
    if sizes[0] == 1 or sizes[1] == 1:
        return ("", "H") if sizes[0] == 1 else ("H", "")
    own = [size is not None and size != 1 for size in key_sizes]
    if own == [False, True] or (all(own) and _is_expanded_first(key, sizes)):
        return "G", "K"
    return "K", "G"


def _is_expanded_first(key: ir.Value, sizes: tuple[int, int]) -> bool:
    """Whether `key` was expanded along the first of its two axes of heads."""
    moved = producer(key, "Transpose")
    copies = copies_of(moved.inputs[0] if moved is not None else key)
    return copies is not None and copies.count == sizes[0] and sizes[0] != sizes[1]


def beside_queries(value: ir.Value, layout: Layout, sizes: Mapping[str, Dim]) -> Located | None:
    """Keys or values whose axes lie beside those of queries with `sizes`; an axis of heads that serves all has size 1."""
    dims = dims_of(value)
    if dims is None or len(dims) != len(layout):
        return None
    own = tuple(
        "" if letters in ("H", "K", "G") and dim == 1 and not same_size(sizes[letters], 1) else letters
        for dim, letters in zip(dims, layout, strict=True)
    )
    letters = letters_of(own)
    if "G" in letters and "K" not in letters:
        return None
    known = {**sizes, **{name: dim for name, dim in zip(own, dims, strict=True) if name in ("S", "D")}}
    if "K" in letters and "G" not in letters:
        known["H"] = known["K"]
        own = tuple(item.replace("K", "H") for item in own)
    elif "H" not in letters and "K" not in letters:
        known["H"] = 1
    return Located(value, own, known)
