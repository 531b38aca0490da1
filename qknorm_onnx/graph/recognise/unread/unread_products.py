"""Softmaxes between products that no other reader said a word about: declined where normalised, else plain.

Most of these products are quantised. Those of known operators are in an order, or over an axis, that nothing reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import onnx_ir as ir

from qknorm_onnx.graph.match.located import Unreadable
from qknorm_onnx.graph.match.qk_norm_match import Plain
from qknorm_onnx.graph.recognise.unread.lookalikes import norm_behind
from qknorm_onnx.graph.walk.axis_origins import is_weight
from qknorm_onnx.graph.walk.constants import input_of
from qknorm_onnx.graph.walk.limits import UNREAD_PRODUCT_NODES
from qknorm_onnx.graph.walk.naming import node_name

SOFTMAXES: Final = frozenset({"Softmax", "LogSoftmax", "QLinearSoftmax", "BiasSoftmax"})
# The inputs of each product that hold its factors. A product with a weight is a projection.
FACTORS: Final = {
    "MatMul": (0, 1),
    "Gemm": (0, 1),
    "Einsum": (0, 1),
    "FusedMatMul": (0, 1),
    "TransposeMatMul": (0, 1),
    "FusedGemm": (0, 1),
    "GemmFloat8": (0, 1),
    "MatMulInteger": (0, 1),
    "MatMulInteger16": (0, 1),
    "MatMulIntegerToFloat": (0, 1),
    "DynamicQuantizeMatMul": (0, 1),
    "QLinearMatMul": (0, 3),
    "QGemm": (0, 3),
    "MatMulNBits": (0, 1),
}
READ: Final = frozenset({"MatMul", "Einsum", "Softmax", "LogSoftmax"})
CONVOLUTIONS: Final = frozenset({"Conv", "ConvTranspose", "ConvInteger", "QLinearConv"})  # projections, as products with weights
HINT: Final = (
    "quantise the weights of projections only (nodes_to_exclude names other products), "
    "or fuse the file before it is quantised or optimised"
)
FORM: Final = "its softmax stands between two products in a form that is not known"
FORM_HINT: Final = "write the scores as a matrix product of (batch, heads, positions, values), with a softmax over the last axis"


def unread_product(softmax: ir.Node, reported: set[ir.Node]) -> Unreadable | Plain | None:
    """What a softmax between two products of computed tensors is, which no reader knew; None if it is none such.

    `reported` are products of queries and keys about which something was said before.
    """
    if softmax.op_type not in SOFTMAXES or not softmax.inputs:
        return None
    scores = next(_behind(softmax.inputs[0]), None)
    weighed = _ahead(softmax.outputs[0])
    if scores is None or weighed is None or scores in reported:
        return None
    if not any(norm_behind(value) is not None for value in factors_of(scores) if value is not None):
        return Plain(node_name(softmax))
    reported.add(scores)
    parts = ((scores, "its scores are"), (weighed, "its product with the values is"), (softmax, "its softmax is"))
    for node, what in parts:
        if node.op_type not in READ:
            return Unreadable(f"{what} made by {node.op_type}, which is not read there", node, HINT)
    return Unreadable(FORM, softmax, FORM_HINT)


def factors_of(node: ir.Node) -> tuple[ir.Value | None, ...]:
    """Both factors of a product of two computed tensors; nothing for all other nodes."""
    factors = tuple(input_of(node, index) for index in FACTORS.get(node.op_type, ()))
    return () if not factors or any(map(is_weight, factors)) else factors


def _behind(value: ir.Value | None) -> Iterator[ir.Node]:
    """Products of two computed tensors behind `value`, nearest first."""
    waiting, seen = [value], set[ir.Value]()
    while waiting and len(seen) < UNREAD_PRODUCT_NODES:
        here = waiting.pop(0)
        node = here.producer() if here is not None else None
        if here is None or node is None or here in seen:
            continue
        seen.add(here)
        if factors_of(node):
            yield node
        elif node.op_type not in FACTORS and node.op_type not in ("Shape", "Size", *CONVOLUTIONS):
            waiting += node.inputs


def _ahead(value: ir.Value) -> ir.Node | None:
    """The nearest product of two computed tensors that `value` is a factor of."""
    waiting, seen = [value], set[ir.Value]()
    while waiting and len(seen) < UNREAD_PRODUCT_NODES:
        here = waiting.pop(0)
        for usage in here.uses() if here not in seen else ():
            node = usage.node
            if factors_of(node):
                return node
            if node.op_type not in FACTORS and node.op_type not in ("Shape", "Size", *SOFTMAXES, *CONVOLUTIONS):
                waiting += node.outputs
        seen.add(here)
    return None
