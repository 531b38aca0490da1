"""Softmaxes between two products where shapes are unknown: no axis can be followed there, but they are not passed over."""

from __future__ import annotations

import onnx_ir as ir

from qknorm_onnx.graph.match.located import Unreadable
from qknorm_onnx.graph.recognise.attention.products import PRODUCTS, SHAPES_HINT
from qknorm_onnx.graph.recognise.unread.lookalikes import PROJECTIONS, norm_behind
from qknorm_onnx.graph.walk.axis_origins import is_weight
from qknorm_onnx.graph.walk.limits import UNSHAPED_MOVES, UNSHAPED_NODES

MOVES = frozenset({"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Cast", "Identity", "Add", "Mul", "Div", "Dropout"})


def unshaped_attention(softmax: ir.Node) -> Unreadable | None:
    """A refusal where a shape between `softmax` and a product of normalised activations is unknown; None otherwise."""
    if softmax.inputs[0] is None or not _reaches_product(softmax.outputs[0]):
        return None
    waiting, seen = [softmax.inputs[0]], set[ir.Value]()
    while waiting and len(seen) < UNSHAPED_NODES:
        value = waiting.pop(0)
        node = value.producer()
        if node is None or value in seen:
            continue
        seen.add(value)
        if node.op_type in PRODUCTS and not any(map(is_weight, node.inputs)):
            unknown = next((item for item in seen if item.shape is None), None)
            normalised = any(operand is not None and norm_behind(operand) is not None for operand in node.inputs)
            if unknown is None or not normalised:
                return None
            return Unreadable("the shapes of its logits are unknown", unknown.producer(), SHAPES_HINT)
        if node.op_type not in PROJECTIONS or _mixes_heads(node):
            waiting += [operand for operand in node.inputs if operand is not None]
    return None


def _mixes_heads(node: ir.Node) -> bool:
    """Whether a product with a weight stands behind a product of activations, with no other projection in between."""
    value = next((operand for operand in node.inputs if not is_weight(operand)), None)
    before = value.producer() if value is not None else None
    for _ in range(UNSHAPED_MOVES):
        if before is None or before.op_type in PROJECTIONS or not before.inputs:
            break
        value = before.inputs[0]
        before = value.producer() if value is not None else None
    return before is not None and before.op_type in PRODUCTS and not any(map(is_weight, before.inputs))


def _reaches_product(probabilities: ir.Value) -> bool:
    """Whether probabilities meet values; one product with a weight may stand in between, with nothing but moved axes."""
    waiting, seen = [(probabilities, False)], set[ir.Value]()
    while waiting and len(seen) < UNSHAPED_NODES:
        value, mixed = waiting.pop(0)
        if value in seen:
            continue
        seen.add(value)
        for usage in value.uses():
            is_product = usage.node.op_type in PRODUCTS
            if is_product and not any(map(is_weight, usage.node.inputs)):
                return True
            if is_product and (mixed or not _moved_only(value, probabilities)):
                return False
            if is_product or not mixed or usage.node.op_type in MOVES:
                waiting += [(output, mixed or is_product) for output in usage.node.outputs]
    return False


def _moved_only(value: ir.Value, start: ir.Value) -> bool:
    """Whether `value` is `start` with its axes moved."""
    for _ in range(UNSHAPED_MOVES):
        if value is start:
            return True
        node = value.producer()
        if node is None or node.op_type not in MOVES or node.inputs[0] is None:
            return False
        value = node.inputs[0]
    return False
