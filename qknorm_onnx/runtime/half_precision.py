"""A float32 model in float16 or bfloat16, the way PyTorch modules and their kernels compute in half precision.

A float32 export does not show where the module's own code goes up to float32: `x.float()` leaves no trace there. So two
kinds of values stay float32, as they do in PyTorch: what is computed from positions (`inv_freq * position` and its
cosine), and the statistics of norms together with the division by them. Everything else is stored in the narrow type.
A float16 file that was exported from the half-precision module needs none of this and is the better one to judge.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.passes.inline_functions import inline_functions
from qknorm_onnx.runtime.float64_twin import cast_before, converted_tensor
from qknorm_onnx.runtime.value_types import FLOAT_TYPES, flattened, port_allows, schema_of, subgraphs
from qknorm_onnx.spec.signature import DOMAIN, Dtype

_NARROW: Final = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
_FLOAT32: Final = ir.DataType.FLOAT
_STATISTICS: Final = frozenset({"ReduceMean", "ReduceSum", "ReduceL2", "ReduceSumSquare"})
_STATISTIC_ARITHMETIC: Final = frozenset(
    {"Add", "Sub", "Mul", "Div", "Max", "Min", "Clip", "Sqrt", "Reciprocal", "Pow", "Expand", "Unsqueeze", "Reshape"}
)


def convert_dtype(model: ir.Model, dtype: Dtype) -> ir.Model:
    """A copy of the float32 `model` whose weights, inputs, outputs and activations are `dtype`.

    Weights are rounded once; finite constants beyond the type's range become its largest value (a mask of float32's
    minimum stays a mask, not minus infinity). Canonical nodes get the body of the new type.

    Raises:
        InputError: the model has control flow, whose branches may mix types.
    """
    narrow = _NARROW[dtype]
    converted = _without_foreign_functions(model)
    for node in converted.graph:
        if next(subgraphs(node), None) is not None:
            raise InputError(f"node {node.name} ({node.op_type}) is control flow; export the model in {dtype} instead")
    _Conversion(graph=converted.graph, narrow=narrow, opset=converted.opset_imports.get("", 1)).run()
    _attach_bodies(converted)
    return converted


def _attach_bodies(model: ir.Model) -> None:
    if any(node.domain == DOMAIN for node in model.graph):
        from qknorm_onnx.graph.passes.attach_bodies import AttachBodiesPass

        AttachBodiesPass()(model)


def _without_foreign_functions(model: ir.Model) -> ir.Model:
    """A flattened copy in which the calls of canonical operators are left, without their bodies."""
    copy = model.clone()
    inline_functions(copy, lambda function: function.domain != DOMAIN)
    for key in [key for key in copy.functions if key[0] == DOMAIN]:
        del copy.functions[key]
    return flattened(copy)


@dataclasses.dataclass
class _Conversion:
    """One run over a graph in topological order; `wide` holds the values that stay float32, `statistics` those of norms."""

    graph: ir.Graph
    narrow: ir.DataType
    opset: int
    wide: set[ir.Value] = dataclasses.field(default_factory=set)
    statistics: set[ir.Value] = dataclasses.field(default_factory=set)
    positions: set[ir.Value] = dataclasses.field(default_factory=set)
    casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = dataclasses.field(default_factory=dict)

    def run(self) -> None:
        for value in self.graph.inputs:
            if value.dtype == _FLOAT32:
                value.type = ir.TensorType(self.narrow)
        nodes = list(self.graph)
        islands = [self._is_island(node) for node in nodes]
        for node, island in zip(nodes, islands, strict=True):
            self._convert(node, island)
        for position, value in enumerate(self.graph.outputs):
            if value in self.wide:
                self.graph.outputs[position] = self._as_output(value)
        self._drop_unused_weights()

    def _is_island(self, node: ir.Node) -> bool:
        """Whether `node` computes in float32; records what its outputs are."""
        outputs = [output for output in node.outputs if output.dtype == _FLOAT32]
        if node.op_type == "Cast":
            source = node.inputs[0]
            if outputs and source is not None and source.dtype not in FLOAT_TYPES:
                self.positions.update(outputs)
                return True
        floats = [value for value in node.inputs if value is not None and value.dtype == _FLOAT32]
        varying = [value for value in floats if not value.is_initializer()]
        if not outputs or not floats or node.domain not in ("", "ai.onnx"):
            return False
        if varying and all(value in self.positions for value in varying):
            self.positions.update(outputs)
            return True
        if _is_statistic(node):
            self.statistics.update(outputs)
            return True
        if node.op_type in _STATISTIC_ARITHMETIC and any(value in self.statistics for value in floats):
            if all(value in self.statistics or _is_scalar(value) for value in floats):
                self.statistics.update(outputs)
            return True
        return _feeds_only_statistics(node)

    def _convert(self, node: ir.Node, island: bool) -> None:
        schema = schema_of(node, self.opset)
        for index, value in enumerate(node.inputs):
            if value is None or value.dtype not in (_FLOAT32, self.narrow):
                continue
            wide = island or not port_allows(schema, "inputs", index, self.narrow)
            if node.op_type == "Cast":  # an explicit cast takes what it is given
                wide = value in self.wide
            node.replace_input_with(index, self._as(value, _FLOAT32 if wide else self.narrow, node))
        if not island:
            _convert_attributes(node, self.narrow)
        for index, output in enumerate(node.outputs):
            if output.dtype != _FLOAT32:
                continue
            if island or _is_explicit_float32(node) or not port_allows(schema, "outputs", index, self.narrow):
                self.wide.add(output)
            else:
                output.type = ir.TensorType(self.narrow)

    def _as(self, value: ir.Value, dtype: ir.DataType, node: ir.Node) -> ir.Value:
        """`value` in `dtype` for `node`: itself, a converted weight, or a Cast that all its readers share."""
        if value.const_value is None and ((value in self.wide) == (dtype == _FLOAT32)):
            return value
        if (value, dtype) not in self.casts:
            if value.const_value is not None:
                self.casts[value, dtype] = self._weight(value, dtype)
            else:
                self.casts[value, dtype] = cast_before(node, value, dtype)
        return self.casts[value, dtype]

    def _weight(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """A weight rounded to the narrow type, also where it is used in float32. Scalars in float32 are code, not weights."""
        tensor = value.const_value
        assert tensor is not None, "only called for initializers"
        rounded = tensor if dtype == _FLOAT32 and _is_scalar(value) else converted_tensor(tensor, self.narrow, self._clamped)
        if dtype == _FLOAT32 and rounded is not tensor:
            rounded = converted_tensor(rounded, _FLOAT32)
        name = f"{value.name}_{dtype.name.lower()}" if dtype == _FLOAT32 else value.name
        if dtype == self.narrow:
            value.name = f"{value.name}_original"
            self.graph.initializers.pop(str(name), None)
        weight = ir.Value(name=name, type=ir.TensorType(dtype), shape=value.shape, const_value=rounded)
        self.graph.register_initializer(weight)
        return weight

    def _clamped(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        limit = _largest_value(self.narrow)
        return np.where(np.isfinite(array), np.clip(array, -limit, limit), array)

    def _as_output(self, value: ir.Value) -> ir.Value:
        name, producer = value.name, value.producer()
        assert producer is not None, "graph outputs that are inputs are never wide"
        value.name = f"{name}_float32"
        out = ir.Value(name=name, type=ir.TensorType(self.narrow), shape=value.shape)
        cast = ir.Node("", "Cast", [value], [ir.AttrInt64("to", int(self.narrow))], outputs=[out], name=f"cast_{name}")
        self.graph.append(cast)
        return out

    def _drop_unused_weights(self) -> None:
        outputs = set(self.graph.outputs)
        for name, value in list(self.graph.initializers.items()):
            if not value.uses() and value not in outputs:
                del self.graph.initializers[name]


def _largest_value(dtype: ir.DataType) -> float:
    return float(ml_dtypes.finfo(dtype.numpy()).max)  # type: ignore[no-untyped-call]


def _is_scalar(value: ir.Value) -> bool:
    return value.const_value is not None and value.const_value.size == 1


def _feeds_only_statistics(node: ir.Node) -> bool:
    """Squares, deviations and absolute values that only a statistic reads (LayerNorm's deviations are read twice)."""
    square = node.op_type in ("Pow", "Abs") or (node.op_type == "Mul" and node.inputs[0] is node.inputs[1])
    readers = [use.node for use in node.outputs[0].uses()]
    return square and bool(readers) and all(_is_statistic(reader) for reader in readers)


def _is_statistic(node: ir.Node) -> bool:
    """A mean, a sum, or the largest magnitude of a row (a softmax looks for the largest value instead)."""
    if node.op_type != "ReduceMax":
        return node.op_type in _STATISTICS
    source = node.inputs[0].producer() if node.inputs[0] is not None else None
    return source is not None and source.op_type == "Abs"


def _is_explicit_float32(node: ir.Node) -> bool:
    return node.op_type == "Cast" and node.attributes["to"].as_int() == _FLOAT32


def _convert_attributes(node: ir.Node, narrow: ir.DataType) -> None:
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == _FLOAT32:
            node.attributes[name] = ir.AttrTensor(name, converted_tensor(attribute.as_tensor(), narrow))
        elif name == "dtype" and attribute.as_int() == _FLOAT32:
            node.attributes[name] = ir.AttrInt64(name, int(narrow))
