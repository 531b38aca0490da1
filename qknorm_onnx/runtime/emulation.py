"""bfloat16 on a processor without it: bfloat16 values at every operator's border, float32 arithmetic inside.

ONNX Runtime's CPU provider has no bfloat16 MatMul, Add, Mul or Softmax, so a whole bfloat16 model cannot run there. This
is the same model with float32 storage in which every value is rounded to bfloat16 as it leaves its operator. The body of
a canonical node rounds only where it casts to bfloat16 itself, i.e. at its outputs. Reports call such runs `emulated`.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from qknorm_onnx.runtime.float64_twin import cast_before, converted_tensor, replace_by_chain
from qknorm_onnx.runtime.value_types import TYPE_ATTRIBUTES, flattened, graphs_of

_BFLOAT16: Final = ir.DataType.BFLOAT16
_FLOAT32: Final = ir.DataType.FLOAT

# Operators that only move or choose values: rounded inputs give rounded outputs.
_MOVES: Final = frozenset(
    {
        "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Max", "Min", "Neg",
        "Abs", "Pad", "ReduceMax", "ReduceMin", "Relu", "Reshape", "ReverseSequence", "ScatterElements", "ScatterND", "Slice",
        "SpaceToDepth", "Split", "Squeeze", "Tile", "TopK", "Transpose", "Trilu", "Unsqueeze", "Where", "If", "Loop", "Scan",
    }
)  # fmt: skip


def emulate_bfloat16(model: ir.Model) -> ir.Model:
    """A copy of `model` that any float32 runtime can run and that rounds to bfloat16 wherever `model` does.

    Its inputs and outputs are float32 where those of `model` are bfloat16; the outputs hold bfloat16 values, and so must
    the inputs.
    """
    emulated = flattened(model)
    emulate_flattened(emulated)
    return emulated


def emulate_flattened(emulated: ir.Model) -> None:
    """`emulate_bfloat16` in place, for a model that `flattened` made."""
    for graph in graphs_of(emulated.graph):
        for value in (*graph.inputs, *graph.initializers.values()):
            _widen(value)
        for node in list(graph):
            _emulate(node)


def _widen(value: ir.Value) -> None:
    if value.dtype == _BFLOAT16:
        value.type = ir.TensorType(_FLOAT32)
    if value.const_value is not None and value.const_value.dtype == _BFLOAT16:
        value.const_value = converted_tensor(value.const_value, _FLOAT32)


def _emulate(node: ir.Node) -> None:
    if node.op_type == "Cast" and node.attributes["to"].as_int() == _BFLOAT16:
        _round_cast(node)
        return
    for name, attribute in list(node.attributes.items()):
        if name in TYPE_ATTRIBUTES and attribute.as_int() == _BFLOAT16:
            node.attributes[name] = ir.AttrInt64(name, int(_FLOAT32))
        elif attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == _BFLOAT16:
            node.attributes[name] = ir.AttrTensor(name, converted_tensor(attribute.as_tensor(), _FLOAT32))
    for index, output in enumerate(node.outputs):
        if output.dtype == _BFLOAT16:
            output.type = ir.TensorType(_FLOAT32)
            if node.op_type not in _MOVES:
                replace_by_chain(node, index, narrow=_FLOAT32, dtypes=(_BFLOAT16, _FLOAT32))


def _round_cast(node: ir.Node) -> None:
    source, output = node.inputs[0], node.outputs[0]
    assert source is not None, "Cast has an input"
    if source.dtype not in (_FLOAT32, _BFLOAT16):
        # The runtime may lack a direct way to bfloat16; through float32 it is one rounding for what float32 holds.
        node.replace_input_with(0, cast_before(node, source, _FLOAT32))
    output.type = ir.TensorType(_FLOAT32)
    replace_by_chain(node, 0, narrow=_BFLOAT16, dtypes=(_FLOAT32,))
