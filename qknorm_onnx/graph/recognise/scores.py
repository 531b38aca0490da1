"""From the input of a softmax back to the product of q and k: scale, soft cap, clamp, masks, sinks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.match import Bias, Declined, Factor, Parameter
from qknorm_onnx.graph.recognise.constants import input_of, number, producer, rank_of
from qknorm_onnx.graph.recognise.layout import dims_of
from qknorm_onnx.graph.recognise.norm import aligned
from qknorm_onnx.graph.recognise.products import PRODUCTS, folds_only, is_product
from qknorm_onnx.graph.recognise.score_windows import read_window_masks
from qknorm_onnx.graph.recognise.sinks import read_sink_column

MAX_STEPS = 24
SCORE_LAYOUT = ("B", "H", "S", "T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """What was read between the product and the softmax. `limited`: a cap or clamp stands behind what is still to be read."""

    product: ir.Node
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
    change: Callable[[Scores], Scores | Declined]


FACTOR_HINT = "multiply the queries instead, after their norm"

ScoreReader = Callable[[ir.Node], ScoreStep | None]


def read_scores(value: ir.Value) -> Scores | Declined | None:
    """`value`, the input of a softmax, as scores; None where no product of q and k is found behind it."""
    steps: list[ScoreStep] = []
    node = producer(value)
    for _ in range(MAX_STEPS):
        if node is None:
            return None
        if is_product(node):
            break
        step = next((found for reader in SCORE_READERS if (found := reader(node)) is not None), None)
        if step is None:
            return _stopped(node)
        steps.append(step)
        node = producer(step.source)
    if node is None or not is_product(node):
        return None
    scores: Scores | Declined = Scores(product=node)
    assert isinstance(scores, Scores)
    for step in reversed(steps):
        before = scores
        scores = step.change(before)
        if isinstance(scores, Declined):
            return scores
        if before.sink is not None and scores != before:
            return Declined("something happens to its logits after the sink was appended", node, "append sinks last")
    return scores


def _stopped(node: ir.Node) -> Declined | None:
    """Attention with an unknown step, or (a softmax over anything else) nothing that concerns us."""
    if any(reaches_product(operand) for operand in node.inputs if operand is not None):
        reason = f"{node.op_type} stands between its logits and its softmax"
        return Declined(reason, node, "only scale, clamp, soft cap, masks and sinks may stand there: leave it out, or move it")
    return None


def reaches_product(value: ir.Value, depth: int = MAX_STEPS) -> bool:
    """Whether a product lies behind `value`, with nothing but steps that scores may take in between."""
    node = producer(value)
    if node is None or depth == 0:
        return False
    if node.op_type in PRODUCTS:
        return is_product(node)
    if node.op_type not in SCORE_OPERATORS:
        return False
    return any(reaches_product(operand, depth - 1) for operand in node.inputs if operand is not None)


SCORE_OPERATORS = frozenset(
    ["Add", "Sub", "Mul", "Div", "Where", "Tanh", "Clip", "Min", "Max", "Cast", "Identity", "Concat", "Reshape", "Dropout"]
)


def _scores_and_other(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Of two operands, the one that is the scores, and the other."""
    first, second = input_of(node, 0), input_of(node, 1)
    if first is None or second is None:
        return None
    if reaches_product(first):
        return first, second
    return (second, first) if reaches_product(second) else None


def read_same(node: ir.Node) -> ScoreStep | None:
    """Conversions, batch and heads as one axis or two, and the maximum that is subtracted for stability."""
    source = input_of(node, 0)
    if source is None:
        return None
    if node.op_type in ("Cast", "Identity", "Dropout") or folds_only(node):
        return ScoreStep(source, lambda scores: scores)
    maximum = producer(input_of(node, 1), "ReduceMax") if node.op_type == "Sub" else None
    if maximum is not None and maximum.inputs[0] is source:
        return ScoreStep(source, lambda scores: scores)
    return None


def read_added(node: ir.Node) -> ScoreStep | None:
    """scores + bias."""
    operands = _scores_and_other(node) if node.op_type == "Add" else None
    if operands is None:
        return None
    source, bias = operands
    return _added_bias(source, _bias(node, bias))


def _added_bias(source: ir.Value, bias: Bias) -> ScoreStep:
    return ScoreStep(source, lambda scores: dataclasses.replace(scores, biases=(*scores.biases, bias)))


def _bias(node: ir.Node, value: ir.Value) -> Bias:
    """`value`, which `node` combines with scores; from before its heads were folded into the batch, if they were here."""
    if not _is_folded(node, value):
        return Bias(value)
    fold = producer(value, "Reshape")
    before = fold.inputs[0] if fold is not None and folds_only(fold) else None
    return Bias(before) if before is not None and rank_of(before) == 4 else Bias(value, folded=True)


def _is_folded(node: ir.Node, value: ir.Value) -> bool:
    """Whether `value` has one entry for each head of each row in its first axis, as the scores (B*H, S, T) of `node` have."""
    dims = dims_of(value)
    return rank_of(node.outputs[0]) == 3 and dims is not None and len(dims) == 3 and dims[0] != 1


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
            return _added_bias(source, dataclasses.replace(_bias(node, condition), negated=negated, fill=fill))
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

    def change(scores: Scores) -> Scores | Declined:
        if scores.biases or scores.softcap or scores.logit_clamp:
            return Declined("its logits are scaled after the mask, the soft cap or the clamp", node, "scale first")
        value = number(factor)
        if value is not None:
            return dataclasses.replace(scores, scale=scores.scale / value if inverse else scores.scale * value)
        if _is_folded(node, factor):
            return Declined("its logits, batch and heads as one axis, are multiplied by a factor for each", node, FACTOR_HINT)
        parameter = aligned(factor, SCORE_LAYOUT)
        if "T" in parameter.layout:
            return Declined("its logits are multiplied by a factor of their own for each key", node, FACTOR_HINT)
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

    def change(scores: Scores) -> Scores | Declined:
        if scores.biases or scores.softcap:
            reason = "its soft cap comes after the mask, where it would let hidden keys through"
            return Declined(reason, node, "cap the logits before the mask is added")
        return dataclasses.replace(scores, softcap=cap, scale=scores.scale * rest)

    return ScoreStep(divided[0], change)


def read_clamped(node: ir.Node) -> ScoreStep | None:
    """Clip(scores, -c, c)."""
    source = input_of(node, 0)
    if node.op_type != "Clip" or source is None:
        return None
    low, high = number(input_of(node, 1)), number(input_of(node, 2))

    def change(scores: Scores) -> Scores | Declined:
        if low is None or high is None or low != -high or scores.biases or scores.softcap or scores.logit_clamp:
            reason = "its logits are clipped in a way that one symmetric clamp cannot express"
            return Declined(reason, node, "clip to -c and c, before masks and soft cap")
        return dataclasses.replace(scores, logit_clamp=high)

    return ScoreStep(source, change)


def read_sinks(node: ir.Node) -> ScoreStep | None:
    """One more logit for each head."""
    found = read_sink_column(node)
    if found is None:
        return None
    source, sink = found
    return ScoreStep(source, lambda scores: dataclasses.replace(scores, sink=sink))


def read_windows(node: ir.Node) -> ScoreStep | None:
    """Masks of windows."""
    found = read_window_masks(node)
    if found is None:
        return None
    source, masks = found
    return ScoreStep(source, lambda scores: dataclasses.replace(scores, biases=(*scores.biases, *masks)))


SCORE_READERS: tuple[ScoreReader, ...] = (
    read_same,
    read_softcap,
    read_added,
    read_hidden,
    read_scaled,
    read_clamped,
    read_sinks,
    read_windows,
)
