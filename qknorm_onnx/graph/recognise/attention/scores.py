"""From the input of a softmax back to the product of q and k: scale, soft cap, clamp, masks, sinks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.match.attention_core import Bias
from qknorm_onnx.graph.match.fragments import Factor
from qknorm_onnx.graph.match.located import Layout, Parameter, Unreadable
from qknorm_onnx.graph.recognise.attention.axes import MOVES, SCORE_LAYOUT, bias_beside, moved
from qknorm_onnx.graph.recognise.attention.einsum import read_einsum_scores
from qknorm_onnx.graph.recognise.attention.products import (
    PRODUCTS,
    SHAPES_HINT,
    ScoreProduct,
    is_product,
    read_matrix_scores,
)
from qknorm_onnx.graph.recognise.attention.sinks import read_sink_column
from qknorm_onnx.graph.recognise.attention.windows import read_window_masks
from qknorm_onnx.graph.walk.broadcasts import unrepeated
from qknorm_onnx.graph.walk.constants import input_of, number, producer
from qknorm_onnx.graph.walk.layout import dims_of, letters_of
from qknorm_onnx.graph.walk.limits import SCORE_STEPS
from qknorm_onnx.graph.walk.readings import first_answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """What was read between the product and the softmax, and the axes there."""

    product: ScoreProduct
    layout: Layout
    scale: float = 1.0
    factors: tuple[Factor, ...] = ()
    softcap: float = 0.0
    logit_clamp: float = 0.0
    biases: tuple[Bias, ...] = ()
    sink: Parameter | None = None


@dataclasses.dataclass(frozen=True)
class ScoreStep:
    """One step: `change` of the scores read so far (in the order from the product on), and the value in front."""

    source: ir.Value
    change: Callable[[Scores], Scores | Unreadable]


FACTOR_HINT = "multiply the queries instead, after their norm"
AXES_HINT = "give logits and masks the axes (batch, heads, query positions, key positions)"

ScoreReader = Callable[[ir.Node], ScoreStep | None]


def read_scores(value: ir.Value) -> Scores | Unreadable | None:
    """`value`, the input of a softmax, as scores; None where no product of q and k is found behind it."""
    steps: list[ScoreStep] = []
    node = producer(value)
    for _ in range(SCORE_STEPS):
        if node is None:
            return None
        if is_product(node):
            break
        step = first_answer(SCORE_READERS, node, "attention")
        if step is None:
            return _stopped(node)
        steps.append(step)
        node = producer(step.source)
    if node is None or not is_product(node):
        return None
    product = _read_product(node)
    if isinstance(product, Unreadable):
        return product
    scores: Scores | Unreadable = Scores(product=product, layout=product.layout)
    assert isinstance(scores, Scores)
    for step in reversed(steps):
        before = scores
        scores = step.change(before)
        if isinstance(scores, Unreadable):
            return scores
        if before.sink is not None and scores != before:
            return Unreadable("something happens to its logits after the sink was appended", node, "append sinks last")
    return scores


def _read_product(node: ir.Node) -> ScoreProduct | Unreadable:
    first, second = input_of(node, 0), input_of(node, 1)
    if first is None or second is None or dims_of(first) is None or dims_of(second) is None:
        return Unreadable("the shapes of its operands are unknown", node, SHAPES_HINT)
    return (read_einsum_scores if node.op_type == "Einsum" else read_matrix_scores)(node, first, second)


def _stopped(node: ir.Node) -> Unreadable | None:
    """Attention with an unknown step, or (a softmax over anything else) nothing that concerns us.

    Behind another softmax it is that one's attention, and said there.
    """
    if node.op_type != "Softmax" and any(reaches_product(operand) for operand in node.inputs if operand is not None):
        reason = f"{node.op_type} stands between its logits and its softmax"
        return Unreadable(reason, node, "only scale, clamp, soft cap, masks and sinks may stand there: leave it out, or move it")
    return None


def reaches_product(value: ir.Value, depth: int = SCORE_STEPS, *, transposed: bool = False) -> bool:
    """Whether a product lies behind `value`, with nothing but steps that scores may take in between; `transposed`: also those."""
    node = producer(value)
    if node is None or depth == 0:
        return False
    if node.op_type in PRODUCTS:
        return is_product(node)
    if node.op_type not in SCORE_OPERATORS and not (transposed and node.op_type == "Transpose"):
        return False
    return any(reaches_product(operand, depth - 1, transposed=transposed) for operand in node.inputs if operand is not None)


SCORE_OPERATORS = frozenset(
    ["Add", "Sub", "Mul", "Div", "Where", "Tanh", "Clip", "Min", "Max", "Cast", "Identity", "Concat", "Reshape", "Dropout"]
)


def _scores_and_other(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Of two operands, the one that is the scores, and the other."""
    first, second = input_of(node, 0), input_of(node, 1)
    if first is None or second is None:
        return None
    for transposed in (False, True):  # a bias that is computed by a product is transposed more often than scores are
        if reaches_product(first, transposed=transposed):
            return first, second
        if reaches_product(second, transposed=transposed):
            return second, first
    return None


def read_same(node: ir.Node) -> ScoreStep | None:
    """Conversions, and the maximum that is subtracted for stability."""
    source = input_of(node, 0)
    if source is None:
        return None
    if node.op_type in ("Cast", "Identity", "Dropout"):
        return ScoreStep(source, lambda scores: scores)
    maximum = producer(input_of(node, 1), "ReduceMax") if node.op_type == "Sub" else None
    if maximum is not None and maximum.inputs[0] is source:
        return ScoreStep(source, lambda scores: scores)
    return None


def read_moved(node: ir.Node) -> ScoreStep | None:
    """Axes in another order, merged or split: batch and heads as one axis, heads as two."""
    source = input_of(node, 0)
    if node.op_type not in MOVES or source is None:
        return None

    def change(scores: Scores) -> Scores | Unreadable:
        layout = moved(scores.layout, node, scores.product.sizes)
        if layout is None:
            return Unreadable(f"{node.op_type} stands between its logits and its softmax", node, AXES_HINT)
        return dataclasses.replace(scores, layout=layout)

    return ScoreStep(source, change)


def read_added(node: ir.Node) -> ScoreStep | None:
    """scores + bias."""
    operands = _scores_and_other(node) if node.op_type == "Add" else None
    if operands is None:
        return None
    source, bias = operands
    return _added_bias(source, node, bias)


def _added_bias(
    source: ir.Value, node: ir.Node, value: ir.Value, *, negated: bool = False, fill: float | None = None
) -> ScoreStep:
    """`value`, which `node` combines with scores."""

    def change(scores: Scores) -> Scores | Unreadable:
        bias = bias_beside(value, scores.layout, scores.product.sizes, negated=negated, fill=fill)
        if bias is None:
            reason = "its mask lies on logits whose axes are merged or in another order"
            return Unreadable(reason, node, AXES_HINT)
        return dataclasses.replace(scores, biases=(*scores.biases, bias))

    return ScoreStep(source, change)


def read_hidden(node: ir.Node) -> ScoreStep | None:
    """Where(hidden, fill, scores) or Where(visible, scores, fill)."""
    if node.op_type != "Where":
        return None
    condition, yes, no = (input_of(node, index) for index in range(3))
    if condition is None or yes is None or no is None:
        return None
    for source, other, negated in ((no, yes, True), (yes, no, False)):
        fill = number(other)
        if fill is not None and fill < -1e3:
            return _added_bias(source, node, condition, negated=negated, fill=fill)
    return None


def read_scaled(node: ir.Node) -> ScoreStep | None:
    """scores * factor or scores / factor: a number, or a tensor such as one factor per head."""
    if node.op_type not in ("Mul", "Div"):
        return None
    operands = _scores_and_other(node)
    if operands is None or (node.op_type == "Div" and operands[0] is not node.inputs[0]):
        return None
    source, factor = operands
    inverse = node.op_type == "Div"

    def change(scores: Scores) -> Scores | Unreadable:
        if scores.biases or scores.softcap or scores.logit_clamp:
            return Unreadable("its logits are scaled after the mask, the soft cap or the clamp", node, "scale first")
        value = number(factor)
        if value is not None:
            return dataclasses.replace(scores, scale=scores.scale / value if inverse else scores.scale * value)
        parameter = unrepeated(factor, scores.layout)
        if "T" in letters_of(parameter.layout):
            return Unreadable("its logits are multiplied by a factor of their own for each key", node, FACTOR_HINT)
        if any(len(letters) > 1 or letters in ("K", "G") for letters in parameter.layout):
            which = "batch and heads as one axis" if "BH" in parameter.layout else "heads as two axes or merged with others"
            return Unreadable(f"its logits, {which}, are multiplied by a factor for each", node, FACTOR_HINT)
        return dataclasses.replace(scores, factors=(*scores.factors, Factor(parameter, inverse, node)))

    return ScoreStep(source, change)


def read_softcap(node: ir.Node) -> ScoreStep | None:
    """cap * tanh(scores / cap), the division also as a product with the reciprocal."""
    operands = _scores_and_other(node) if node.op_type == "Mul" else None
    tanh = producer(operands[0], "Tanh") if operands is not None else None
    cap = number(operands[1]) if operands is not None else None
    inner = producer(tanh.inputs[0], "Div", "Mul") if tanh is not None else None
    divided = _scores_and_other(inner) if inner is not None else None
    if cap is None or inner is None or divided is None:
        return None
    divisor = number(divided[1])
    if divisor is None or (inner.op_type == "Div" and divided[0] is not inner.inputs[0]):
        return None
    # tanh(s * c): what c and the cap do not cancel is scale
    rest = cap / divisor if inner.op_type == "Div" else cap * divisor
    rest = 1.0 if np.isclose(rest, 1.0, rtol=1e-6) else rest

    def change(scores: Scores) -> Scores | Unreadable:
        if scores.biases or scores.softcap:
            reason = "its soft cap comes after the mask, where it would let hidden keys through"
            return Unreadable(reason, node, "cap the logits before the mask is added")
        return dataclasses.replace(scores, softcap=cap, scale=scores.scale * rest)

    return ScoreStep(divided[0], change)


def read_clamped(node: ir.Node) -> ScoreStep | None:
    """Clip(scores, -c, c)."""
    source = input_of(node, 0)
    if node.op_type != "Clip" or source is None:
        return None
    low, high = number(input_of(node, 1)), number(input_of(node, 2))

    def change(scores: Scores) -> Scores | Unreadable:
        if low is None or high is None or low != -high or scores.biases or scores.softcap or scores.logit_clamp:
            reason = "its logits are clipped in a way that one symmetric clamp cannot express"
            return Unreadable(reason, node, "clip to -c and c, before masks and soft cap")
        return dataclasses.replace(scores, logit_clamp=high)

    return ScoreStep(source, change)


def read_sinks(node: ir.Node) -> ScoreStep | None:
    """One more logit for each head."""
    found = read_sink_column(node)
    if found is None:
        return None
    source, sink = found

    def change(scores: Scores) -> Scores | Unreadable:
        if scores.layout != SCORE_LAYOUT:
            return Unreadable("its sinks are appended to logits with other axes", node, AXES_HINT)
        return dataclasses.replace(scores, sink=sink)

    return ScoreStep(source, change)


def read_windows(node: ir.Node) -> ScoreStep | None:
    """Masks of windows."""
    found = read_window_masks(node)
    if found is None:
        return None
    source, masks = found

    def change(scores: Scores) -> Scores | Unreadable:
        if scores.layout != SCORE_LAYOUT:
            return Unreadable("its masks of windows lie on logits with other axes", node, AXES_HINT)
        return dataclasses.replace(scores, biases=(*scores.biases, *masks))

    return ScoreStep(source, change)


SCORE_READERS: tuple[ScoreReader, ...] = (
    read_same,
    read_softcap,
    read_added,
    read_hidden,
    read_scaled,
    read_clamped,
    read_sinks,
    read_windows,
    read_moved,
)
