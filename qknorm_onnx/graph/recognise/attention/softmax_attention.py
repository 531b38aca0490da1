"""Attention cores: where softmax(q.k) meets v. One function per spelling; `CORE_READERS` lists them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import onnx_ir as ir

from qknorm_onnx.graph.match.attention_core import Bias, Core
from qknorm_onnx.graph.match.located import Located, Unreadable
from qknorm_onnx.graph.recognise.attention.axes import MOVES, moved
from qknorm_onnx.graph.recognise.attention.einsum import read_einsum_values
from qknorm_onnx.graph.recognise.attention.group_query import read_group_query_attention
from qknorm_onnx.graph.recognise.attention.multi_head import read_multi_head_attention
from qknorm_onnx.graph.recognise.attention.products import SHAPES_HINT, read_matrix_values
from qknorm_onnx.graph.recognise.attention.scores import AXES_HINT, Scores, read_scores
from qknorm_onnx.graph.recognise.attention.sinks import cuts_last_column
from qknorm_onnx.graph.walk.constants import attribute_float, attribute_int, input_of, number, producer, rank_of, unconverted
from qknorm_onnx.graph.walk.layout import dims_of
from qknorm_onnx.graph.walk.limits import PROBABILITY_STEPS
from qknorm_onnx.graph.walk.readings import first_answer

CoreReader = Callable[[ir.Node], Core | Unreadable | None]


def read_core(node: ir.Node) -> Core | Unreadable | None:
    """The core whose softmax (or fused operator) `node` is; None where it is no attention at all."""
    return first_answer(CORE_READERS, node, "attention", begins=True)


def read_softmax(node: ir.Node) -> Core | Unreadable | None:
    """MatMul > scale, soft cap, masks > Softmax > MatMul."""
    if node.domain != "" or node.op_type != "Softmax" or node.inputs[0] is None:
        return None
    rank = rank_of(node.inputs[0])
    if rank is None or attribute_int(node, "axis", -1) not in (-1, rank - 1):
        return None
    product = _value_product(node.outputs[0])
    scores = read_scores(node.inputs[0]) if product is not None else None
    if product is None or scores is None:
        return None
    if isinstance(product, Unreadable) or isinstance(scores, Unreadable):
        return product if isinstance(product, Unreadable) else scores  # type: ignore[return-value]
    if product.cut != (scores.sink is not None):
        reason = "its softmax has a column more or less than its values"
        return Unreadable(reason, node, "append sinks as one column of logits, and cut exactly that one off behind the softmax")
    return _softmax_core(node, scores, product)


def _softmax_core(node: ir.Node, scores: Scores, product: ValueProduct) -> Core | Unreadable | None:
    operands, layout = scores.product, scores.layout
    for step in product.moves:
        after = moved(layout, step, operands.sizes)
        if after is None:
            return Unreadable(f"{step.op_type} stands between its softmax and the product with its values", step, AXES_HINT)
        layout = after
    if scores.layout[-1] != "T" or layout[-1] != "T":
        return None  # its softmax, or that product, sums over something else
    if product.node.op_type == "Einsum":
        weighed = read_einsum_values(product.node, product.probabilities, layout, operands)
    else:
        weighed = read_matrix_values(product.node, layout, operands)
    if isinstance(weighed, Unreadable):
        return weighed
    value, output = weighed
    return Core(
        node=node,
        query=operands.query,
        key=operands.key,
        value=value,
        output=output,
        scale=scores.scale,
        factors=scores.factors,
        softcap=scores.softcap,
        logit_clamp=scores.logit_clamp,
        biases=scores.biases,
        sink=scores.sink,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueProduct:
    """The product that weighs the values, the probabilities that it reads, and what lies between them and the softmax.

    moves: what moves axes there. cut: whether a column was cut off.
    """

    node: ir.Node
    probabilities: ir.Value
    moves: tuple[ir.Node, ...]
    cut: bool


def _value_product(probabilities: ir.Value) -> ValueProduct | Unreadable | None:
    """The product that weighs the values; casts and the guard against NaN rows may lie in front of it."""
    cut, moves = False, list[ir.Node]()
    for _ in range(PROBABILITY_STEPS):
        consumers = [usage.node for usage in probabilities.uses() if usage.node.op_type != "Shape"]
        products = [node for node in consumers if _weighs(node, probabilities)]
        results = products or [node for node in consumers if not _is_test(node)]
        if products and (len(consumers) > 1 or probabilities.is_graph_output()):
            return Unreadable("its attention probabilities are used elsewhere too", products[0], PROBABILITIES_HINT)
        if products:
            return ValueProduct(node=products[0], probabilities=probabilities, moves=tuple(moves), cut=cut)
        if len(results) != 1 or probabilities.is_graph_output():
            return None
        result = results[0]
        if result.op_type == "Slice" and cuts_last_column(result):
            cut = True
        elif result.op_type in MOVES and result.inputs[0] is probabilities:
            moves.append(result)
        elif result.op_type not in PROBABILITY_OPERATORS or not _is_guard(result, probabilities):
            return None
        probabilities = result.outputs[0]
    return None


PROBABILITIES_HINT = "export without returning the attention probabilities (output_attentions=False)"


def _weighs(node: ir.Node, probabilities: ir.Value) -> bool:
    if node.op_type == "Einsum":
        return len(node.inputs) == 2
    return node.op_type == "MatMul" and node.inputs[0] is probabilities


def _is_guard(node: ir.Node, probabilities: ir.Value) -> bool:
    """Where(IsNaN(p), 0, p), or an operator that hands p on."""
    if node.op_type != "Where":
        return True
    test = producer(node.inputs[0], "IsNaN")
    tested = test.inputs[0] if test is not None else None
    return tested is not None and unconverted(tested) is unconverted(probabilities) and number(node.inputs[1]) == 0.0


def _is_test(node: ir.Node) -> bool:
    """IsNaN, or a conversion of what nothing else reads."""
    if node.op_type != "Cast":
        return node.op_type == "IsNaN"
    result = node.outputs[0]
    return not result.is_graph_output() and bool(result.uses()) and all(_is_test(usage.node) for usage in result.uses())


PROBABILITY_OPERATORS = ("IsNaN", "Where", "Cast", "Identity", "Dropout")


def read_attention_operator(node: ir.Node) -> Core | Unreadable | None:
    """ONNX Attention (opset 23 and newer) on operands with four axes."""
    if node.domain != "" or node.op_type != "Attention":
        return None
    operands = [input_of(node, index) for index in range(3)]
    shapes = [dims_of(item) if item is not None else None for item in operands]
    if any(shape is None for shape in shapes):
        return Unreadable("the shapes of its operands are unknown", node, SHAPES_HINT)
    if attribute_int(node, "qk_matmul_output_mode", 0) or len(node.outputs) > 3:
        return Unreadable("it also returns its logits", node, "export without the output qk_matmul_output")
    if input_of(node, 6) is not None:
        return Unreadable("it reads a padded cache (nonpad_kv_seqlen)", node, "hide the padding with a mask instead")
    located = [_operand(node, value, name) for value, name in zip(operands, ("q", "kv", "kv"), strict=True)]
    if any(item is None for item in located):
        reason = "its operands have neither three nor four axes, or their number of heads is not fixed"
        return Unreadable(
            reason, node, "export with a fixed number of heads; give q_num_heads and kv_num_heads where there are three axes"
        )
    query, key, value = (item for item in located if item is not None)
    head_size = query.static("D")
    if head_size is None:
        return Unreadable("the size of its heads is not fixed", node, "export with a fixed size of the heads")
    scale = attribute_float(node, "scale", 0.0) or head_size**-0.5
    mask, past_key, past_value = input_of(node, 3), input_of(node, 4), input_of(node, 5)
    presents = (node.outputs[1], node.outputs[2]) if len(node.outputs) == 3 else None
    return Core(
        node=node,
        query=query,
        key=key,
        value=value,
        output=Located(node.outputs[0], query.layout, {**query.sizes, "D": value.sizes["D"]}),
        scale=scale,
        softcap=attribute_float(node, "softcap", 0.0),
        is_causal=bool(attribute_int(node, "is_causal", 0)),
        biases=(Bias(mask),) if mask is not None else (),
        past=(past_key, past_value) if past_key is not None and past_value is not None else None,
        presents=presents,
    )


def _operand(node: ir.Node, value: ir.Value | None, side: str) -> Located | None:
    dims = dims_of(value) if value is not None else None
    if value is None or dims is None:
        return None
    if len(dims) == 4 and isinstance(dims[1], int):
        return Located(value, ("B", "H", "S", "D"), dict(zip("BHSD", dims, strict=True)))
    heads = attribute_int(node, f"{side}_num_heads", 0)
    if len(dims) == 3 and heads and isinstance(dims[2], int):
        return Located(value, ("B", "S", "HD"), {"B": dims[0], "S": dims[1], "H": heads, "D": dims[2] // heads})
    return None


CORE_READERS: tuple[CoreReader, ...] = (
    read_softmax,
    read_attention_operator,
    read_multi_head_attention,
    read_group_query_attention,
)
