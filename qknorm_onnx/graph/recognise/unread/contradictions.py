"""Reshapes that cannot be done at any size: files that never run, of which no attention can be read."""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from qknorm_onnx.graph.match.located import Unreadable
from qknorm_onnx.graph.symbolic.dimensions import form_of_dim
from qknorm_onnx.graph.symbolic.products import Factors, factors_of, product_of
from qknorm_onnx.graph.walk.layout import is_sized
from qknorm_onnx.graph.walk.limits import CONTRADICTION_NODES

HINT: Final = (
    "this file runs at no size: export the model again, with torch.onnx.export(..., dynamo=True) if it was written with "
    "dynamo=False, which in torch writes repeat_interleave over a negative axis wrong"
)


def contradiction_behind(core: ir.Node) -> Unreadable | None:
    """A refusal at a Reshape behind an attention's `core` whose result has another number of values than what it is made of."""
    waiting, seen = list(core.inputs), set[ir.Value]()
    while waiting and len(seen) < CONTRADICTION_NODES:
        value = waiting.pop(0)
        node = value.producer() if value is not None else None
        if value is None or node is None or value in seen:
            continue
        seen.add(value)
        source = node.inputs[0] if node.op_type == "Reshape" else None
        if source is not None and _differ(source, value):
            made, given = (str(item.shape).replace(",", ", ") for item in (value, source))
            return Unreadable(f"its shapes contradict each other: a Reshape makes {made} of {given}", node, HINT)
        waiting += node.inputs
    return None


def _differ(first: ir.Value, second: ir.Value) -> bool:
    """Whether two tensors have other numbers of values at every size."""
    (number, factors), (other, others) = _number_of_values(first), _number_of_values(second)
    return number > 0 and other > 0 and number != other and factors == others


def _number_of_values(value: ir.Value) -> tuple[int, Factors]:
    """A number and sizes that are multiplied; no number where a size is unknown."""
    forms = [form_of_dim(dim) for dim in value.shape or ()]
    known = [form for form in forms if form is not None]
    return factors_of(product_of(known)) if is_sized(value) and len(known) == len(forms) else (0, Factors())
