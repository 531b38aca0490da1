"""Types and shapes of one node's results: by ONNX's own rules, by those of contrib operators, or by our operators' spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import onnx
import onnx_ir as ir

from qknorm_onnx.graph.canonical.qk_norm_node import inferred_outputs, is_attention_node, is_rotary_node
from qknorm_onnx.graph.shapes.contrib import Results, contrib_results
from qknorm_onnx.graph.symbolic.dimensions import plain_dims
from qknorm_onnx.graph.symbolic.expression import IndexReader, constant_of
from qknorm_onnx.graph.symbolic.tensor import integers
from qknorm_onnx.graph.walk.constants import ONNX_DOMAINS
from qknorm_onnx.spec.qk_norm_spec import SpecError

# ONNX's rules read axes, pads, repeats and shapes; no larger constant is any of them.
LARGEST_READ: Final = 64

# How ONNX says that it knows no such operator, type or combination of shapes.
REFUSALS: Final = (
    onnx.defs.SchemaError,
    onnx.shape_inference.InferenceError,
    onnx.checker.ValidationError,
    RuntimeError,
    ValueError,
    KeyError,
)


def node_results(node: ir.Node, opsets: Mapping[str, int], reader: IndexReader) -> Results:
    """Type and dimensions of each output, as far as they are known; `reader` knows the numbers that small inputs hold."""
    if is_attention_node(node) or is_rotary_node(node):
        try:
            return [(node.inputs[0].dtype if node.inputs[0] is not None else None, dims) for dims in inferred_outputs(node)]
        except SpecError:
            return []
    found = contrib_results(node)
    return found if found is not None else _by_onnx(node, opsets, reader)


def _by_onnx(node: ir.Node, opsets: Mapping[str, int], reader: IndexReader) -> Results:
    version = opsets.get(node.domain, opsets.get("ai.onnx", 0) if node.domain in ONNX_DOMAINS else 0)
    types = {value.name: _type_of(value) for value in node.inputs if value is not None}
    if not version or any(kind is None for kind in types.values()):
        return []

    def infer() -> Mapping[str, onnx.TypeProto]:
        return onnx.shape_inference.infer_node_outputs(
            onnx.defs.get_schema(node.op_type, version, node.domain),
            ir.serde.serialize_node(node),
            types,  # type: ignore[arg-type]
            _read_data(node, reader),
            opset_imports=[onnx.helper.make_opsetid(domain, number) for domain, number in opsets.items()],
        )

    try:
        found = infer()
    except REFUSALS:
        # Some operators lack bfloat16 in ONNX's list of types (Einsum), and run in it all the same: shapes are float16's.
        narrow = [_swapped(kind, ir.DataType.BFLOAT16, ir.DataType.FLOAT16) for kind in types.values() if kind is not None]
        if not any(narrow):
            return []  # what does not fit together is for the runtime to refuse, where it matters
        try:
            found = infer()
        except REFUSALS:
            return []
        for kind in found.values():
            _swapped(kind, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    return [_result(found.get(str(value.name))) for value in node.outputs]


def _swapped(kind: onnx.TypeProto, old: ir.DataType, new: ir.DataType) -> bool:
    """Make a tensor type that is `old` one of `new`; whether it was."""
    if kind.tensor_type.elem_type != old:
        return False
    kind.tensor_type.elem_type = int(new)
    return True


def _result(found: onnx.TypeProto | None) -> tuple[ir.DataType | None, list[int | str | None] | None]:
    if found is None or not found.HasField("tensor_type"):
        return None, None
    kind = ir.DataType(found.tensor_type.elem_type) if found.tensor_type.elem_type else None
    return kind, plain_dims(ir.serde.deserialize_type_proto_for_shape(found))


def _type_of(value: ir.Value) -> onnx.TypeProto | None:
    if value.type is None:
        return None
    proto = ir.serde.serialize_type(value.type)
    if value.shape is not None:
        ir.serde.serialize_shape_into(proto, value.shape)
    return proto


def _read_data(node: ir.Node, reader: IndexReader) -> dict[str, onnx.TensorProto]:
    data = {}
    for value in node.inputs:
        array = _numbers(value, reader) if value is not None else None
        if array is not None and value is not None:
            data[str(value.name)] = onnx.numpy_helper.from_array(array, str(value.name))
    return data


def _numbers(value: ir.Value, reader: IndexReader) -> np.ndarray | None:
    tensor = constant_of(value)
    if tensor is not None:
        return np.asarray(tensor.numpy()) if tensor.size <= LARGEST_READ else None
    if value.dtype != ir.DataType.INT64 or not _is_short_vector(value.shape):
        return None
    found = integers(reader.read(value))
    assert value.shape is not None
    return np.asarray(found, dtype=np.int64).reshape([len(found)] * len(value.shape)) if found is not None else None


def _is_short_vector(shape: ir.Shape | None) -> bool:
    return shape is not None and len(shape) <= 1 and all(isinstance(size, int) and size <= LARGEST_READ for size in shape)
