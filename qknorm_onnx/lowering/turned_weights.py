"""Turns a weight that a head shares with an embedding, so that the head's product reads an initializer."""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

_SWAPPED: Final = [1, 0]
_TURNED: Final = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


class TurnSharedWeightsPass(ir.passes.InPlacePass):
    """MatMul(x, Transpose(w)), with w (V, D) a float initializer, becomes MatMul(x, w'), with w' (D, V) the initializer.

    A tied head is written the first way, and tools that quantise weights look for the second one: onnxruntime's MatMulNBits
    and dynamic quantisation take a MatMul whose right side is an initializer, and pass over Gemm. The weight stays stored
    once: its lookups read Transpose(w'), which runtimes compute when they load the file, as they did for the head.

    A weight that anything else reads than lookups and products of its Transpose is left alone.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run on `model` in place; `modified` says whether a weight was turned."""
        turned = [_turn(model.graph, weight) for weight in list(model.graph.initializers.values())]
        return ir.passes.PassResult(model, any(turned))


def _turn(graph: ir.Graph, weight: ir.Value) -> bool:
    tensor, readers = weight.const_value, [node for node, _ in weight.uses()]
    turns = [node for node in readers if _is_turn(node)]
    lookups = [node for node in readers if _is_lookup(node, weight)]
    if tensor is None or len(tensor.shape) != 2 or tensor.dtype not in _TURNED:
        return False
    if not turns or len(turns) + len(lookups) != len(readers) or any(node.graph is not graph for node in readers):
        return False
    if weight.is_graph_input() or weight.is_graph_output():
        return False
    name = _free_name(graph, f"{weight.name}/turned")
    turned = ir.Value(
        name=name, shape=ir.Shape(reversed(tensor.shape.numpy())), type=weight.type, const_value=_turned(tensor, name)
    )
    graph.register_initializer(turned)
    for node in turns:
        ir.convenience.replace_all_uses_with(node.outputs[0], turned)
        graph.remove(node, safe=True)
    graph.initializers.pop(str(weight.name))
    if lookups:
        _turn_back(graph, weight, turned, lookups)
    return True


def _is_turn(node: ir.Node) -> bool:
    """Whether `node` is a Transpose that only products read, from their right."""
    if node.op_type != "Transpose" or node.domain not in ("", "ai.onnx") or node.outputs[0].is_graph_output():
        return False
    order = node.attributes.get("perm")
    uses = list(node.outputs[0].uses())
    products = all(user.op_type == "MatMul" and user.graph is node.graph and index == 1 for user, index in uses)
    return bool(uses) and products and (order is None or list(order.as_ints()) == _SWAPPED)


def _is_lookup(node: ir.Node, weight: ir.Value) -> bool:
    return node.op_type == "Gather" and node.inputs[0] is weight and node.inputs[1] is not weight


def _turned(tensor: ir.TensorProtocol, name: str) -> ir.TensorProtocol:
    """The transposed numbers, as a view: nothing is copied before they are written."""
    return ir.Tensor(np.swapaxes(tensor.numpy(), 0, 1), dtype=tensor.dtype, name=name)


def _turn_back(graph: ir.Graph, weight: ir.Value, turned: ir.Value, lookups: list[ir.Node]) -> None:
    """Let `lookups` read the Transpose of `turned`."""
    back = ir.node("Transpose", [turned], {"perm": _SWAPPED}, name=_free_name(graph, f"{weight.name}/turned_back"))
    output = back.outputs[0]
    output.name, output.type, output.shape = weight.name, weight.type, weight.shape
    first = next(node for node in graph if node in lookups)
    graph.insert_before(first, back)
    for node in lookups:
        node.replace_input_with(0, output)


def _free_name(graph: ir.Graph, name: str) -> str:
    taken = {value.name for value in (*graph.inputs, *graph.initializers.values())}
    taken.update(node.name for node in graph)
    taken.update(output.name for node in graph for output in node.outputs)
    while name in taken:
        name += "_"
    return name
