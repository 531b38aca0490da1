"""Attention over normalised queries and keys whose logits pass another function than a softmax: named, never rewritten."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from qknorm_onnx.graph.match.located import Unreadable
from qknorm_onnx.graph.recognise.attention.paths import SOFTMAX, ScorePath, score_paths
from qknorm_onnx.graph.recognise.unread.lookalikes import norm_behind, turns_pairs
from qknorm_onnx.graph.walk.axis_origins import MULTIPLIERS, is_weight
from qknorm_onnx.graph.walk.layout import dims_of
from qknorm_onnx.graph.walk.limits import UNSOFTMAXED_NODES

# What makes weights of logits where no softmax does. Products of logits that pass none of these are linear attention.
ACTIVATIONS = frozenset(
    [
        "Sigmoid",
        "HardSigmoid",
        "Relu",
        "LeakyRelu",
        "ThresholdedRelu",
        "Elu",
        "Gelu",
        "Swish",
        "HardSwish",
        "Mish",
        "Softplus",
        "Softsign",
        "Tanh",
        "Exp",
        "Erf",
        "Pow",
        "Clip",
        "Max",
        "Hardmax",
    ]
)
LINEAR = "it is linear attention: no softmax stands between its queries and keys and its values"
HINT = "only softmax attention becomes a node: leave it as it is, or use a softmax, where the model was trained with one"


def unsoftmaxed_attention(node: ir.Node, reported: set[ir.Node]) -> Unreadable | None:
    """A refusal at the function that stands for the softmax, where `node` weighs values with what it makes of q . k.

    Queries and keys are normalised both. Where no function stands there it is linear attention, (q . k) v or q (k v).
    `reported` are their products about which something was said before.
    """
    for weights, axis in _summed(node):
        for path in score_paths(weights, axis):
            if path.node in reported or path.node is node or turns_pairs(path.node):
                continue
            linear = _is_linear(node, weights, path) and not _feeds_softmax(node)
            if not linear and not _both_normalised(path):
                continue
            between = _between(weights, path.node)
            if any(step.op_type in SOFTMAX for step in between):
                continue
            reported.add(path.node)
            odd = next((step for step in between if step.op_type in ACTIVATIONS), None)
            if odd is None or linear:
                return Unreadable(LINEAR, node, HINT)
            return Unreadable(f"its logits pass {odd.op_type} in place of a softmax", odd, HINT)
    return None


def _is_linear(node: ir.Node, weights: ir.Value, path: ScorePath) -> bool:
    """Whether `node` multiplies normalised queries with `weights`, which is a product of normalised keys with values."""
    others = [value for value in node.inputs if value is not None and value is not weights]
    if len(others) != 1 or norm_behind(others[0]) is None:
        return False
    return [norm_behind(operand) is not None for operand in path.operands].count(True) == 1


def _feeds_softmax(node: ir.Node) -> bool:
    """Whether a softmax is taken of what `node` makes: its operand is then no product with values, but keys that were turned."""
    waiting, seen = [node], set[ir.Node]()
    while waiting and len(seen) < UNSOFTMAXED_NODES:
        item = waiting.pop(0)
        if item.op_type in SOFTMAX:
            return True
        if item in seen or (item is not node and item.op_type in MULTIPLIERS):
            continue
        seen.add(item)
        waiting += [use.node for output in item.outputs for use in output.uses()]
    return False


def _summed(node: ir.Node) -> Iterator[tuple[ir.Value, int]]:
    """Operands of a product of two activations, and the axis of each, from 0, that is summed over."""
    if (
        node.op_type not in MULTIPLIERS
        or node.domain not in ("", "ai.onnx")
        or len(node.inputs) != 2
        or any(map(is_weight, node.inputs))
        or turns_pairs(node)
    ):
        return
    operands = [(value, dims_of(value) or ()) for value in node.inputs if value is not None]
    if node.op_type == "MatMul":
        for (value, dims), place in zip(operands, (1, 2), strict=True):
            if len(dims) >= 2:
                yield value, len(dims) - place
    elif node.op_type == "Einsum":
        left, arrow, out = node.attributes["equation"].as_string().replace(" ", "").partition("->")
        terms = left.split(",")
        for (value, dims), term in zip(operands, terms, strict=False):
            for axis in range(len(dims)) if arrow and len(term) == len(dims) and len(terms) == 2 else ():
                if term[axis] not in out:
                    yield value, axis


def _both_normalised(path: ScorePath) -> bool:
    return all(norm_behind(operand) is not None for operand in path.operands)


def _between(value: ir.Value, product: ir.Node) -> list[ir.Node]:
    """The nodes from `product`, itself left out, to `value` on all ways, nearest to `value` first."""
    behind: dict[ir.Node, None] = {}
    waiting = [value]
    while waiting and len(behind) < UNSOFTMAXED_NODES:
        node = waiting.pop(0).producer()
        if node is not None and node is not product and node not in behind:
            behind[node] = None
            waiting += [operand for operand in node.inputs if operand is not None]
    ahead = {product}
    for node in _sorted(behind):
        if any(operand is not None and operand.producer() in ahead for operand in node.inputs):
            ahead.add(node)
    return [node for node in behind if node in ahead]


def _sorted(nodes: dict[ir.Node, None]) -> list[ir.Node]:
    """Each node behind those that it is computed from."""
    done: dict[ir.Node, None] = {}

    def visit(node: ir.Node) -> None:
        for operand in node.inputs:
            before = operand.producer() if operand is not None else None
            if before is not None and before in nodes and before not in done:
                visit(before)
        done[node] = None

    for node in nodes:
        if node not in done:
            visit(node)
    return list(done)
