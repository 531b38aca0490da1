"""Softmaxes between two products where shapes are unknown: no axis can be followed there, but they are not passed over."""

from __future__ import annotations

import onnx_ir as ir

from qknorm_onnx.graph.match import Declined
from qknorm_onnx.graph.recognise.axis_origins import is_weight
from qknorm_onnx.graph.recognise.lookalikes import PROJECTIONS, norm_behind
from qknorm_onnx.graph.recognise.products import PRODUCTS, SHAPES_HINT

MAX_NODES = 40


def unshaped_attention(softmax: ir.Node) -> Declined | None:
    """A refusal where a shape between `softmax` and a product of normalised activations is unknown; None otherwise."""
    if softmax.inputs[0] is None or not _reaches_product(softmax.outputs[0]):
        return None
    waiting, seen = [softmax.inputs[0]], set[ir.Value]()
    while waiting and len(seen) < MAX_NODES:
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
            return Declined("the shapes of its logits are unknown", unknown.producer(), SHAPES_HINT)
        if node.op_type not in PROJECTIONS:
            waiting += [operand for operand in node.inputs if operand is not None]
    return None


def _reaches_product(probabilities: ir.Value) -> bool:
    waiting, seen = [probabilities], set[ir.Value]()
    while waiting and len(seen) < MAX_NODES:
        value = waiting.pop(0)
        if value in seen:
            continue
        seen.add(value)
        for usage in value.uses():
            if usage.node.op_type in PRODUCTS:
                return not any(map(is_weight, usage.node.inputs))
            waiting += list(usage.node.outputs)
    return False
