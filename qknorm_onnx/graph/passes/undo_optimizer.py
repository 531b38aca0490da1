"""Undoes what onnxruntime's optimizer does inside of attentions, so that recognisers see a Softmax, and a norm of one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import onnx_ir as ir

from qknorm_onnx.graph.rewrite.node_builder import NodeBuilder, replace_value
from qknorm_onnx.graph.walk.axis_origins import reduced_axes
from qknorm_onnx.graph.walk.constants import attribute_int, attribute_or_input, input_of, number, producer, rank_of

LONGEST: Final = 8  # operators between the tensor and the Transpose
POINTWISE: Final = frozenset({"Cast", "Sqrt", "Reciprocal", "Abs", "Clip", "Pow"})
Order = tuple[int, ...]


class CloseSoftmaxPass(ir.passes.InPlacePass):
    """The optimizer opens each softmax of a type that its provider has no kernel for, float16 on the CPU above all.

    With e = Exp(x - ReduceMax(x)), e / ReduceSum(e) becomes Softmax(x) where both run over the same one axis.

    Without the maximum it stays: a row whose keys all have finite but low logits is then divided by zero, which Softmax never is.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run on `model` in place."""
        graphs = (model.graph, *model.graph.subgraphs())
        closed = [_close(node) for graph in graphs for node in list(graph) if (node.domain, node.op_type) == ("", "Div")]
        return ir.passes.PassResult(model, any(closed))


def _close(node: ir.Node) -> bool:
    parts = _parts(node)
    if parts is None or not isinstance(node.graph, ir.Graph):
        return False
    logits, axis, inside = parts
    output = node.outputs[0]
    assert logits.shape is not None
    builder = NodeBuilder(f"{output.name}/closed")
    axes = [ir.AttrInt64("axis", axis - len(logits.shape))]
    closed = builder.apply("Softmax", [logits], dims=list(logits.shape), attributes=axes)
    made = closed.producer()
    assert made is not None
    made.name = node.name
    builder.insert_before(node)
    replace_value(output, closed)
    for step in (node, *inside):
        if not any(value.uses() or value.is_graph_output() for value in step.outputs) and step.graph is not None:
            step.graph.remove(step, safe=True)
    return True


def _parts(node: ir.Node) -> tuple[ir.Value, int, tuple[ir.Node, ...]] | None:
    """The logits, the axis from 0, and the nodes between them and `node`, last one first."""
    exponential = producer(node.inputs[0], "Exp")
    total = producer(node.inputs[1], "ReduceSum")
    if exponential is None or total is None or total.inputs[0] is not node.inputs[0]:
        return None
    lowered = producer(exponential.inputs[0], "Sub")
    highest = producer(lowered.inputs[1], "ReduceMax") if lowered is not None else None
    logits = lowered.inputs[0] if lowered is not None else None
    if lowered is None or highest is None or logits is None or highest.inputs[0] is not logits:
        return None
    rank = rank_of(logits)
    if rank is None or not all(attribute_int(step, "keepdims", 1) for step in (total, highest)):
        return None
    axes = reduced_axes(total, rank)
    if len(axes) != 1 or axes != reduced_axes(highest, rank):
        return None
    return logits, next(iter(axes)), (total, exponential, lowered, highest)


class ReduceTransposedPass(ir.passes.InPlacePass):
    """Transpose(size(x)) becomes size(Transpose(x)) where the graph has Transpose(x) in that order already.

    size: one reduction that keeps its axes, and operators around it that work on each value alone. x / size(x) then reads one
    tensor, as it did before the optimizer moved the Transpose of x behind one of its two readers.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run on `model` in place."""
        graphs = (model.graph, *model.graph.subgraphs())
        moved = [_move(node) for graph in graphs for node in list(graph) if (node.domain, node.op_type) == ("", "Transpose")]
        return ir.passes.PassResult(model, any(moved))


def _move(node: ir.Node) -> bool:
    order = _order(node)
    found = _steps_to(node, order) if order is not None else None
    if order is None or found is None or not isinstance(node.graph, ir.Graph):
        return False
    steps, source = found
    builder = NodeBuilder(f"{node.outputs[0].name}/moved")
    value = builder.transpose(source, order)  # the same as the other one, and made one with it afterwards
    for step in steps:
        value = _again(builder, step, value, order)
    builder.insert_before(node)
    replace_value(node.outputs[0], value)
    for old in (node, *reversed(steps)):
        if not any(result.uses() or result.is_graph_output() for result in old.outputs) and old.graph is not None:
            old.graph.remove(old, safe=True)
    return True


def _steps_to(node: ir.Node, order: Order) -> tuple[list[ir.Node], ir.Value] | None:
    """The operators in front of `node`, first one first, and the tensor that they are applied to."""
    steps: list[ir.Node] = []
    value = node.inputs[0]
    while value is not None and len(steps) <= LONGEST:
        reduced = sum(step.op_type.startswith("Reduce") for step in steps)
        if reduced == 1 and value.shape is not None and _is_transposed(value, order, node):
            return steps[::-1], value
        maker = value.producer()
        if maker is None or not _is_step(maker):
            return None
        steps.append(maker)
        value = maker.inputs[0]
    return None


def _is_step(node: ir.Node) -> bool:
    if node.domain != "" or node.graph is None or len(node.outputs) != 1:
        return False
    if node.op_type.startswith("Reduce"):
        return bool(attribute_int(node, "keepdims", 1)) and attribute_or_input(node, "axes", 1) is not None
    others = [value for value in node.inputs[1:] if value is not None]
    return node.op_type in POINTWISE and all(number(value) is not None for value in others)


def _is_transposed(value: ir.Value, order: Order, node: ir.Node) -> bool:
    """Whether another node than `node` puts `value` in this order."""
    readers = [usage.node for same in _equal_casts(value) for usage in same.uses()]
    others = [reader for reader in readers if reader is not node and reader.op_type == "Transpose"]
    return any(other.graph is node.graph and _order(other) == order for other in others)


def _equal_casts(value: ir.Value) -> list[ir.Value]:
    """`value`, and where it was converted, what is converted alike; equal nodes are made one afterwards only."""
    maker = value.producer()
    source = maker.inputs[0] if maker is not None and maker.op_type == "Cast" else None
    if source is None:
        return [value]
    casts = [usage.node.outputs[0] for usage in source.uses() if usage.node.op_type == "Cast"]
    return [cast for cast in casts if cast.dtype == value.dtype]


def _again(builder: NodeBuilder, step: ir.Node, value: ir.Value, order: Order) -> ir.Value:
    """What `step` makes of the transposed value."""
    result = step.outputs[0]
    dims = [result.shape[axis] for axis in order] if result.shape is not None else []
    attributes: list[ir.Attr] = [attribute for name, attribute in step.attributes.items() if name != "axes"]
    inputs: Sequence[ir.Value | None] = (value, *step.inputs[1:])
    if step.op_type.startswith("Reduce"):
        axes = sorted(order.index(axis) for axis in reduced_axes(step, len(order)))
        inputs = (value, builder.integers(axes, "axes"))
        if input_of(step, 1) is None:
            attributes.append(ir.AttrInt64s("axes", axes))
            inputs = (value,)
    made = builder.apply(step.op_type, inputs, dims=dims, attributes=attributes, dtype=result.dtype)  # type: ignore[arg-type]
    if result.shape is None:
        made.shape = None
    return made


def _order(node: ir.Node) -> Order | None:
    rank = rank_of(node.outputs[0])
    if "perm" in node.attributes:
        return tuple(node.attributes["perm"].as_ints())
    return tuple(reversed(range(rank))) if rank is not None else None
