"""Element types of every value of a model, and which ports of a node are fixed to a type whatever the model's own type is.

Function bodies carry no types, and a file may lack them, while every change of a model's arithmetic needs to know
which values are floats of which width. The rules are read off the operators' ONNX schemas.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.passes.inline_functions import inline_functions

FLOAT_TYPES: Final = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})

# Attributes that name an element type. `stash_type` only says what an operator computes in and is left alone.
TYPE_ATTRIBUTES: Final = ("to", "dtype", "output_dtype", "output_datatype", "softmax_precision")

_TYPE_STRINGS: Final = {
    ir.DataType.FLOAT: "tensor(float)",
    ir.DataType.DOUBLE: "tensor(double)",
    ir.DataType.FLOAT16: "tensor(float16)",
    ir.DataType.BFLOAT16: "tensor(bfloat16)",
}


def flattened(model: ir.Model) -> ir.Model:
    """A copy of `model` without local functions and Constant nodes, every value typed; weights are shared, not copied.

    Values that a call of a function gave keep their names. Raises InputError where a function cannot be written out.
    """
    flat = model.clone()
    kept = inline_functions(flat).kept
    if kept:
        raise InputError(f"the model cannot be written out in plain operators: {kept[0]}")
    flat.opset_imports.setdefault("", _default_opset(model))
    weights = set(flat.graph.initializers)
    common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(flat)
    for graph in graphs_of(flat.graph):
        for name, value in graph.initializers.items():
            if name not in weights and value.const_value is not None:
                # A copy: the tensor was the attribute of a node of `model`, and its name would be changed there.
                value.const_value = ir.Tensor(value.const_value.numpy(), dtype=value.const_value.dtype, name=name)
        _spell_out_zeros(graph)
        _infer_graph(graph, flat.opset_imports.get("", 1))
    return flat


def _spell_out_zeros(graph: ir.Graph) -> None:
    """A ConstantOfShape without a value gives float32 zeros; as an attribute they are converted like any other constant."""
    for node in graph:
        if node.op_type == "ConstantOfShape" and "value" not in node.attributes:
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.zeros(1, np.float32)))


def graphs_of(graph: ir.Graph) -> Iterator[ir.Graph]:
    """`graph` and the bodies of its control flow, outer before inner."""
    yield graph
    for node in graph:
        for inner in subgraphs(node):
            yield from graphs_of(inner)


def subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    """The graphs that a control-flow node holds."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def schema_of(node: ir.Node, opset: int) -> onnx.defs.OpSchema | None:
    """The ONNX schema of a node of the standard domain, None for others."""
    if node.domain not in ("", "ai.onnx"):
        return None
    try:
        return onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return None


def port_allows(schema: onnx.defs.OpSchema | None, ports: str, index: int, dtype: ir.DataType) -> bool:
    """Whether input or output (`ports` is "inputs" or "outputs") number `index` may be of the float type `dtype`."""
    if schema is None:
        return True
    formal = getattr(schema, ports)
    if not formal:
        return True
    parameter = formal[min(index, len(formal) - 1)]
    return _TYPE_STRINGS[dtype] in parameter.types


def _default_opset(model: ir.Model) -> int:
    versions = [function.opset_imports.get("", 0) for function in model.functions.values()]
    return max(versions, default=0) or onnx.defs.onnx_opset_version()


def _infer_graph(graph: ir.Graph, opset: int) -> None:
    for value in graph.initializers.values():
        if value.type is None and value.const_value is not None:
            value.type = ir.TensorType(value.const_value.dtype)
    for node in graph:
        schema = schema_of(node, opset)
        for index, output in enumerate(node.outputs):
            if output.type is None:
                dtype = _output_dtype(node, schema, index)
                if dtype is not None:
                    output.type = ir.TensorType(dtype)


def _output_dtype(node: ir.Node, schema: onnx.defs.OpSchema | None, index: int) -> ir.DataType | None:
    declared = _declared_dtype(node)
    if declared is not None and index == 0:
        return declared
    if schema is None or not schema.outputs:
        return next((value.dtype for value in node.inputs if value is not None and value.dtype is not None), None)
    parameter = schema.outputs[min(index, len(schema.outputs) - 1)]
    if parameter.type_str.startswith("tensor("):
        return next(iter(_fixed_dtype(parameter.type_str)), None)
    for position, value in enumerate(node.inputs):
        formal = schema.inputs[min(position, len(schema.inputs) - 1)]
        if value is not None and formal.type_str == parameter.type_str and value.dtype is not None:
            return value.dtype
    return None


def _declared_dtype(node: ir.Node) -> ir.DataType | None:
    """The type that an attribute names, or that an operator gives by default."""
    if node.op_type == "ConstantOfShape":
        value = node.attributes.get("value")
        return ir.DataType.FLOAT if value is None else value.as_tensor().dtype
    if node.op_type == "CastLike":
        return node.inputs[1].dtype if node.inputs[1] is not None else None
    if node.op_type in ("Attention", "QuantizeLinear", "DequantizeLinear"):
        return None
    for name in TYPE_ATTRIBUTES:
        if name in node.attributes:
            return ir.DataType(node.attributes[name].as_int())
    return None


def _fixed_dtype(type_string: str) -> Iterator[ir.DataType]:
    names = {"float": "FLOAT", "double": "DOUBLE"}
    inner = type_string[len("tensor(") : -1]
    name = names.get(inner, inner.upper())
    if name in ir.DataType.__members__:
        yield ir.DataType[name]
