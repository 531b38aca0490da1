"""Attention whose products lie further from its softmax than any reader walks: it must not vanish from the report either.

What other readers of unknown attention follow are axes, a few dozen operators far. Here it is only asked whether there is a
product at all, each value of the graph once: a chain of any length takes as long as it has operators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import onnx_ir as ir

from qknorm_onnx.graph.match.located import Unreadable
from qknorm_onnx.graph.recognise.attention.paths import ENDS, SOFTMAX
from qknorm_onnx.graph.recognise.unread.lookalikes import PROJECTIONS, norm_behind
from qknorm_onnx.graph.recognise.unread.unread import STEP_HINT
from qknorm_onnx.graph.walk.axis_origins import MULTIPLIERS, is_weight

REASON = "more operators stand between its softmax and its products than any reader walks over"


@dataclasses.dataclass
class Answers:
    """What was found out of values of one graph: the product that each is made of, and the one that it goes into; or none."""

    behind: dict[ir.Value, ir.Node | None] = dataclasses.field(default_factory=dict)
    ahead: dict[ir.Value, ir.Node | None] = dataclasses.field(default_factory=dict)


def distant_attention(node: ir.Node, reported: set[ir.Node], answers: Answers) -> Unreadable | None:
    """A refusal for a softmax over what a product of normalised activations makes, and of which a product is made."""
    if node.op_type not in SOFTMAX or node.inputs[0] is None:
        return None
    product = _first(node.inputs[0], answers.behind, _made_of)
    if product is None or product in reported or not any(norm_behind(value) is not None for value in product.inputs if value):
        return None
    if _first(node.outputs[0], answers.ahead, _goes_into) is None:
        return None
    reported.add(product)
    return Unreadable(REASON, node, STEP_HINT)


Step = Callable[[ir.Value], tuple[ir.Node | None, Iterable[ir.Value]]]


def _first(value: ir.Value, known: dict[ir.Value, ir.Node | None], step: Step) -> ir.Node | None:
    """The product that `step` finds at `value`, or at the values that it leads on to; without recursion."""
    waiting = [value]
    while waiting:
        item = waiting[-1]
        if item in known:
            waiting.pop()
            continue
        product, onward = step(item)
        further = list(onward) if product is None else []
        open_values = [other for other in further if other not in known]
        if open_values:
            waiting += open_values
            continue
        known[item] = product or next((found for other in further if (found := known[other]) is not None), None)
        waiting.pop()
    return known[value]


def _made_of(value: ir.Value) -> tuple[ir.Node | None, Iterable[ir.Value]]:
    node = value.producer()
    if node is None or node.op_type in SOFTMAX or node.op_type in ENDS:
        return None, ()
    if _is_product(node):
        return node, ()
    if node.op_type in PROJECTIONS:
        return None, ()
    return None, [operand for operand in node.inputs if operand is not None and operand.producer() is not None]


def _goes_into(value: ir.Value) -> tuple[ir.Node | None, Iterable[ir.Value]]:
    users = [usage.node for usage in value.uses()]
    product = next((node for node in users if _is_product(node)), None)
    if product is not None:
        return product, ()
    passing = [node for node in users if node.op_type not in (*SOFTMAX, *ENDS) and node.op_type not in PROJECTIONS]
    return None, [output for node in passing for output in node.outputs]


def _is_product(node: ir.Node) -> bool:
    """Of two activations."""
    return (
        node.op_type in MULTIPLIERS
        and len(node.inputs) == 2
        and not any(value is None or is_weight(value) for value in node.inputs)
    )
