"""The axes of logits and probabilities between the two products, and what is added to logits as a bias with known axes."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from qknorm_onnx.graph.match.attention_core import Bias, GroupedAxes
from qknorm_onnx.graph.match.located import Dim, Layout
from qknorm_onnx.graph.walk.constants import input_of, producer, rank_of
from qknorm_onnx.graph.walk.layout import dims_of, is_named, letters_of, regroup, same_size

SCORE_LAYOUT: Layout = ("B", "H", "S", "T")
FOLDED_SCORES: Layout = ("BH", "S", "T")
MOVES = ("Reshape", "Transpose")


def moved(layout: Layout, node: ir.Node, sizes: Mapping[str, Dim]) -> Layout | None:
    """The axes behind `node`, a Reshape or Transpose of a tensor with the axes `layout`; None where they fall apart."""
    if node.op_type == "Transpose":
        perm = node.attributes["perm"].as_ints() if "perm" in node.attributes else range(len(layout))[::-1]
        return tuple(layout[axis] for axis in perm)
    if folds_only(node) and layout in (SCORE_LAYOUT, FOLDED_SCORES):
        rank = rank_of(node.outputs[0])
        return layout if rank == len(layout) else FOLDED_SCORES if rank == 3 else SCORE_LAYOUT
    source = input_of(node, 0)
    before, after = (dims_of(value) if value is not None else None for value in (source, node.outputs[0]))
    if before is None or after is None or len(before) != len(layout):
        return None
    own = {letters: dim for letters, dim in zip(layout, before, strict=True) if len(letters) == 1 and is_named(dim)}
    return regroup(letters_of(layout), after, {**sizes, **own})


def folds_only(node: ir.Node) -> bool:
    """Whether a Reshape of scores or probabilities only merges or splits batch and heads."""
    source = input_of(node, 0)
    before, after = (dims_of(value) if value is not None else None for value in (source, node.outputs[0]))
    if node.op_type != "Reshape" or before is None or after is None or {len(before), len(after)} - {3, 4}:
        return False
    return all(map(same_size, before[-2:], after[-2:]))


def bias_beside(value: ir.Value, layout: Layout, sizes: Mapping[str, Dim], *, negated: bool, fill: float | None) -> Bias | None:
    """`value`, which is broadcast against logits of `layout`; None where no mask (B, H, S, T) means the same."""
    if layout == SCORE_LAYOUT:
        return Bias(value, negated, fill)
    if layout == FOLDED_SCORES:
        return _of_folded(value, negated=negated, fill=fill)
    dims = dims_of(value)
    if dims is None or len(dims) > len(layout):
        return None
    own = layout[len(layout) - len(dims) :]
    varying = {letters for letters, dim in zip(own, dims, strict=True) if dim != 1}
    if any(len(letters) != 1 for letters in varying):
        return None
    if varying & {"K", "G"}:
        kv_heads, group = sizes.get("K"), sizes.get("G")
        if not isinstance(kv_heads, int) or not isinstance(group, int):
            return None
        axes = tuple(letters if letters in varying else "" for letters in own)
        return Bias(value, negated, fill, grouped=GroupedAxes(axes, kv_heads, group))
    if own == SCORE_LAYOUT[len(SCORE_LAYOUT) - len(own) :]:
        return Bias(value, negated, fill)
    used = {letters: axis for axis, letters in enumerate(own) if letters in varying or letters in ("S", "T")}
    return Bias(value, negated, fill, axes=tuple(used.get(letter) for letter in SCORE_LAYOUT))


def _of_folded(value: ir.Value, *, negated: bool, fill: float | None) -> Bias:
    """From before its heads were folded into the batch, if they were here."""
    dims = dims_of(value)
    if dims is None or len(dims) != 3 or dims[0] == 1:
        return Bias(value, negated, fill)
    fold = producer(value, "Reshape")
    before = fold.inputs[0] if fold is not None and folds_only(fold) else None
    if before is not None and rank_of(before) == 4:
        return Bias(before, negated, fill)
    return Bias(value, negated, fill, folded=True)
