"""A model with every float raised to float64 (or float32): the same computation without the rounding of a narrow type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy.typing as npt
import onnx_ir as ir

from qknorm_onnx.runtime.value_types import FLOAT_TYPES, TYPE_ATTRIBUTES, flattened, graphs_of, port_allows, schema_of

_NARROW: Final = FLOAT_TYPES - {ir.DataType.DOUBLE}


def raise_to_float64(model: ir.Model) -> ir.Model:
    """A copy of `model` that computes in float64: inputs, weights, casts, constants and function bodies.

    Constants keep the values that their own type gave them: this is the exact meaning of the file, not of what it was
    made from. An operator whose schema knows no float64 at a port gets a float32 cast there.
    """
    raised = flattened(model)
    raise_flattened(raised)
    return raised


def raise_flattened(raised: ir.Model, *, to: ir.DataType = ir.DataType.DOUBLE) -> None:
    """`raise_to_float64` in place, for a model that `flattened` made; with `to` FLOAT, half precision becomes float32."""
    opset = raised.opset_imports.get("", 1)
    narrow = _NARROW - {to}
    for graph in graphs_of(raised.graph):
        for value in (*graph.inputs, *graph.initializers.values()):
            _raise_value(value, narrow, to)
        for node in list(graph):
            _raise_node(node, opset, narrow, to)


def _raise_value(value: ir.Value, narrow: frozenset[ir.DataType], to: ir.DataType) -> None:
    if value.dtype in narrow:
        value.type = ir.TensorType(to)
    if value.const_value is not None and value.const_value.dtype in narrow:
        value.const_value = converted_tensor(value.const_value, to)


def _raise_node(node: ir.Node, opset: int, narrow: frozenset[ir.DataType], to: ir.DataType) -> None:
    for name, attribute in list(node.attributes.items()):
        is_type = name in TYPE_ATTRIBUTES and node.op_type != "BitCast" and attribute.type == ir.AttributeType.INT
        if is_type and attribute.as_int() in narrow:
            node.attributes[name] = ir.AttrInt64(name, int(to))
        elif attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in narrow:
            node.attributes[name] = ir.AttrTensor(name, converted_tensor(attribute.as_tensor(), to))
    schema = schema_of(node, opset)
    for index, value in enumerate(node.inputs):
        if value is not None and value.dtype == to and not port_allows(schema, "inputs", index, to):
            node.replace_input_with(index, cast_before(node, value, ir.DataType.FLOAT))
    for index, output in enumerate(node.outputs):
        if output.dtype not in narrow:
            continue
        output.type = ir.TensorType(to)
        if not port_allows(schema, "outputs", index, to):
            replace_by_chain(node, index, narrow=ir.DataType.FLOAT, dtypes=(to,))


def converted_tensor(
    tensor: ir.TensorProtocol, dtype: ir.DataType, change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]] | None = None
) -> ir.TensorProtocol:
    """`tensor` in another type, converted when it is first read: large weights are not held twice."""

    def read() -> ir.TensorProtocol:
        array = tensor.numpy()
        array = array if change is None else change(array)
        return ir.Tensor(array.astype(dtype.numpy()), name=tensor.name)

    return ir.LazyTensor(read, dtype=dtype, shape=ir.Shape(tensor.shape), name=tensor.name)  # type: ignore[arg-type]


def cast_before(node: ir.Node, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """A Cast of `value` to `dtype` in front of `node`."""
    name = f"{value.name}_as_{dtype.name.lower()}_for_{node.name or node.op_type}"
    cast = _cast(value, dtype, name=name, node_name=f"cast_{name}")
    owner = node.graph
    assert owner is not None, "the nodes of a graph have an owner"
    owner.insert_before(node, cast)
    return cast.outputs[0]


def replace_by_chain(node: ir.Node, index: int, *, narrow: ir.DataType, dtypes: tuple[ir.DataType, ...]) -> None:
    """Output `index` of `node` is of type `narrow` and passes through Casts to each of `dtypes`; its name moves to the last."""
    owner, output = node.graph, node.outputs[index]
    assert isinstance(owner, ir.Graph) and output.name is not None, "an output of a graph's node has a name"
    uses, is_graph_output = list(output.uses()), output.is_graph_output()
    name, final_type, shape = output.name, output.type, output.shape
    output.name, output.type = f"{name}_before_cast", ir.TensorType(narrow)
    last = output
    after = node
    for step, dtype in enumerate(dtypes):
        is_last = step == len(dtypes) - 1
        cast = _cast(last, dtype, name=name if is_last else f"{name}_cast_{step}", node_name=f"chained_cast_{step}_{name}")
        owner.insert_after(after, cast)
        after, last = cast, cast.outputs[0]
    last.type, last.shape = final_type, shape
    for use in uses:
        use.node.replace_input_with(use.idx, last)
    if is_graph_output:
        for position, graph_output in enumerate(owner.outputs):
            if graph_output is output:
                owner.outputs[position] = last


def _cast(value: ir.Value, dtype: ir.DataType, *, name: str, node_name: str) -> ir.Node:
    out = ir.Value(name=name, type=ir.TensorType(dtype), shape=value.shape)
    return ir.Node("", "Cast", [value], [ir.AttrInt64("to", int(dtype))], outputs=[out], name=node_name)
