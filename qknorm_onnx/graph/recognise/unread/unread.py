"""Attention that no core reader knows: it must not vanish from the report where its queries or keys are normalised."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from qknorm_onnx.graph.match.located import Unreadable
from qknorm_onnx.graph.recognise.attention.group_query import normalises_inside
from qknorm_onnx.graph.recognise.attention.paths import (
    SOFTMAX,
    ScorePath,
    score_paths,
    summed_axis,
    values_path,
)
from qknorm_onnx.graph.recognise.unread.lookalikes import PROJECTIONS, norm_behind
from qknorm_onnx.graph.recognise.unread.operators import normalises_inputs
from qknorm_onnx.graph.recognise.unread.unshaped import unshaped_attention
from qknorm_onnx.graph.walk.constants import ONNX_DOMAINS, attribute_int
from qknorm_onnx.graph.walk.layout import dims_of
from qknorm_onnx.graph.walk.limits import UNREAD_NODES

# What may lie between a product and its softmax, and between the softmax and the product with the values.
BETWEEN = frozenset(
    [
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Where",
        "Cast",
        "Identity",
        "Tanh",
        "Clip",
        "Min",
        "Max",
        "Neg",
        "Reshape",
        "Transpose",
        "Squeeze",
        "Unsqueeze",
        "Expand",
        "Slice",
        "Concat",
        "Dropout",
    ]
)
NORMS_OF_ROWS = frozenset({"ReduceL2", "ReduceSumSquare", "LpNormalization"})
HINT = "write the scores as a matrix product of (batch, heads, positions, values), then softmax, then a matrix product"
STEP_HINT = "only scale, clamp, soft cap, masks and sinks may stand there: leave it out, or move it"
QUANTISED_HINT = (
    "its products are quantised, and one node would not be: quantise products with weights only (nodes_to_exclude names the "
    "others), or fuse the file before it is quantised"
)
SOFTMAX_HINT = "write it as one Softmax over the last axis; what is added to its sum, as a sink appended to the logits"
QUERIES = "its softmax does not run over the keys, along which its product with the values sums"
QUERIES_HINT = "this is not softmax attention: take the softmax over the keys, if that was meant"
DIVIDED_HINT = "normalise queries and keys before their product"


def unread_attention(node: ir.Node, reported: set[ir.Node]) -> Unreadable | None:
    """A refusal for a softmax between two products whose operands are normalised; None for all other nodes.

    `reported` are the products of queries and keys for which this was said before: a softmax written by hand has several parts.
    """
    place = _normalised_axis(node)
    if place is None or node.inputs[0] is None:
        return unshaped_attention(node) if node.op_type in SOFTMAX else None
    paths = list(score_paths(node.inputs[0], place))
    if not paths and node.op_type in SOFTMAX:
        return unshaped_attention(node)
    for path in paths:
        behind_another = any(step.op_type in SOFTMAX for step in path.steps)
        if path.node in reported or behind_another or not _is_normalised(path):
            continue
        if node.op_type in SOFTMAX:
            after = values_path(node.outputs[0], frozenset([place]), through_softmax=True)
        else:
            after = values_path(path.node.outputs[0], path.key_axes, through_softmax=False)
        if after is not None:
            reported.add(path.node)
            return _refusal(node, path, after)
        if node.op_type in SOFTMAX and _weighs_along_another_axis(node, place):
            reported.add(path.node)
            return Unreadable(QUERIES, node, QUERIES_HINT)
    return None


def _weighs_along_another_axis(softmax: ir.Node, place: int) -> bool:
    """Whether probabilities over axis `place` are summed along the other axis of the scores' matrices."""
    rank = len(dims_of(softmax.outputs[0]) or ())
    others = frozenset({rank - 1, rank - 2} - {place})
    return rank >= 2 and values_path(softmax.outputs[0], others, through_softmax=False) is not None


def _normalised_axis(node: ir.Node) -> int | None:
    """The axis, from 0, over which `node` makes probabilities."""
    if node.domain not in ONNX_DOMAINS:
        return None
    if node.op_type not in SOFTMAX:
        return summed_axis(node)
    dims = dims_of(node.outputs[0])
    return attribute_int(node, "axis", -1) % len(dims) if dims else None


def _refusal(node: ir.Node, path: ScorePath, after: tuple[ir.Node, ...]) -> Unreadable:
    """At what is least like attention: a strange step, then the product, then the softmax itself."""
    for steps, place in ((path.steps, "its logits and its softmax"), (after[:-1], "its softmax and the product with its values")):
        odd = next((step for step in steps if step.op_type not in BETWEEN), None) if node.op_type == "Softmax" else None
        if odd is not None:
            hint = QUANTISED_HINT if odd.op_type in ("QuantizeLinear", "DequantizeLinear") else STEP_HINT
            return Unreadable(f"{odd.op_type} stands between {place}", odd, hint)
    for product, what in ((path.node, "its scores are"), (after[-1], "its product with the values is")):
        if product.op_type == "ReduceSum":
            return Unreadable(f"{what} written as a ReduceSum over products of single values", product, HINT)
    if node.op_type != "Softmax":
        how = "LogSoftmax" if node.op_type == "LogSoftmax" else f"{node.op_type} and a sum"
        return Unreadable(f"its softmax is written by hand, with {how}", node, SOFTMAX_HINT)
    odd = path.node if path.node.op_type == "Einsum" else node
    return Unreadable(f"its scores or probabilities are written in a form that is not known, around {odd.op_type}", odd, HINT)


def normalises_operands(core: ir.Node) -> bool:
    """Whether something like a norm lies between a core's queries or keys and their projections, or they are not found."""
    place = _normalised_axis(core)
    named = normalises_inputs(core)
    if named is not None:
        return named
    if place is None and core.op_type != "Softmax":
        return normalises_inside(core) or _have_norms(core.inputs[:2])
    if place is None or core.inputs[0] is None:
        return True
    paths = list(score_paths(core.inputs[0], place))
    return not paths or any(map(_is_normalised, paths))


def divided_by_norms(core: ir.Node) -> Unreadable | None:
    """A refusal for logits that are divided by the norms of queries or keys, which is QK-Norm behind the product."""
    dims = dims_of(core.inputs[0]) if core.op_type == "Softmax" and core.inputs[0] is not None else None
    if core.inputs[0] is None or not dims:
        return None
    for path in score_paths(core.inputs[0], len(dims) - 1):
        step = _division(path)
        if step is not None:
            reason = "its logits, and not its queries and keys, are divided by the norms of these"
            return Unreadable(reason, step, DIVIDED_HINT)
    return None


def _is_normalised(path: ScorePath) -> bool:
    return _have_norms(path.operands) or _division(path) is not None


def _have_norms(operands: Sequence[ir.Value | None]) -> bool:
    return any(operand is not None and norm_behind(operand) is not None for operand in operands)


def _division(path: ScorePath) -> ir.Node | None:
    """The step at which the scores are multiplied with, or divided by, what holds a norm of the product's own operands."""
    rows = _ancestors(path.operands)
    for step in path.steps:
        if step.op_type in ("Mul", "Div"):
            others = [value for value in step.inputs if value is not None and value.producer() not in (path.node, *path.steps)]
            for value in _ancestors(others):
                node = value.producer()
                if node is not None and _is_norm_of_rows(node) and _ancestors(node.inputs) & rows:
                    return step
    return None


def _is_norm_of_rows(node: ir.Node) -> bool:
    """A norm, or a sum or mean of squares."""
    if node.op_type in NORMS_OF_ROWS:
        return True
    inner = node.inputs[0].producer() if node.op_type in ("ReduceSum", "ReduceMean") and node.inputs[0] is not None else None
    return inner is not None and (inner.op_type == "Pow" or (inner.op_type == "Mul" and inner.inputs[0] is inner.inputs[1]))


def _ancestors(values: Sequence[ir.Value | None]) -> set[ir.Value]:
    """What `values` are computed from, back to projections and products; constants are left out."""
    waiting, seen = [value for value in values if value is not None], set[ir.Value]()
    while waiting and len(seen) < UNREAD_NODES:
        value = waiting.pop(0)
        node = value.producer()
        if value in seen or value.const_value is not None or value.is_initializer():
            continue
        seen.add(value)
        if node is not None and node.op_type not in PROJECTIONS and node.op_type not in ("Shape", "Constant"):
            waiting += [operand for operand in node.inputs if operand is not None]
    return seen
