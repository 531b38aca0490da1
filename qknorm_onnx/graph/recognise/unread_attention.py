"""Attention that no core reader knows: it must not vanish from the report where its queries or keys are normalised."""

from __future__ import annotations

import onnx_ir as ir

from qknorm_onnx.graph.match import Declined
from qknorm_onnx.graph.recognise.group_query_attention import normalises_inside
from qknorm_onnx.graph.recognise.lookalikes import norm_behind
from qknorm_onnx.graph.recognise.products import SHAPES_HINT

PRODUCTS = frozenset({"MatMul", "Einsum", "Gemm"})
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
        "IsNaN",
        "IsInf",
        "Sigmoid",
        "Pow",
        "ReduceSum",
    ]
)
MAX_NODES = 40
HINT = "write the scores as a matrix product of (batch, heads, positions, values), then softmax, then a matrix product"


def unread_attention(softmax: ir.Node) -> Declined | None:
    """A refusal for a softmax between two products whose operands are normalised; None for all other softmaxes."""
    if softmax.op_type != "Softmax" or softmax.inputs[0] is None:
        return None
    product = _product_behind(softmax.inputs[0])
    if product is None or _product_after(softmax.outputs[0]) is None or not normalises_operands(softmax):
        return None
    if softmax.inputs[0].shape is None:
        return Declined("the shapes of its logits are unknown", softmax, SHAPES_HINT)
    odd = product if product.op_type == "Einsum" else softmax
    return Declined(f"its scores or probabilities are written in a form that is not known, around {odd.op_type}", odd, HINT)


def normalises_operands(core: ir.Node) -> bool:
    """Whether something like a norm lies between a core's queries or keys and their projections, or they are not found."""
    node = _product_behind(core.inputs[0]) if core.op_type == "Softmax" and core.inputs[0] is not None else core
    if node is None or normalises_inside(node):
        return True
    operands = [operand for operand in node.inputs[:2] if operand is not None]
    return any(norm_behind(operand) is not None for operand in operands)


def _product_behind(logits: ir.Value) -> ir.Node | None:
    """The nearest product of two computed tensors; a product with a weight is a router or a classifier."""
    waiting, seen = [logits], set[ir.Value]()
    while waiting and len(seen) < MAX_NODES:
        value = waiting.pop(0)
        node = value.producer()
        if node is None or value in seen:
            continue
        seen.add(value)
        if node.op_type in PRODUCTS:
            if len(node.inputs) == 2 and not any(_is_weight(operand) for operand in node.inputs):
                return node
        elif node.op_type in BETWEEN:
            waiting += [operand for operand in node.inputs if operand is not None]
    return None


def _product_after(probabilities: ir.Value) -> ir.Node | None:
    waiting, seen = [probabilities], set[ir.Value]()
    while waiting and len(seen) < MAX_NODES:
        value = waiting.pop(0)
        if value in seen:
            continue
        seen.add(value)
        for usage in value.uses():
            if usage.node.op_type in PRODUCTS:
                return usage.node
            if usage.node.op_type in BETWEEN:
                waiting += list(usage.node.outputs)
    return None


def _is_weight(value: ir.Value | None) -> bool:
    """A constant, or one behind a transpose or a dequantisation."""
    for _ in range(3):
        if value is None or value.const_value is not None or value.is_initializer():
            return True
        node = value.producer()
        if node is None or node.op_type not in ("Transpose", "DequantizeLinear", "Cast", "Identity"):
            return False
        value = node.inputs[0]
    return False
