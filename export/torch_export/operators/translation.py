"""What `torch.onnx.export` needs to know about the torch operators: each is one node of the `ai.qknorm` domain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import onnx
import onnxscript
import torch

from qknorm_onnx.spec.attributes import attribute_fields, to_attributes
from qknorm_onnx.spec.qk_norm_spec import QKNormRotarySpec, QKNormSpec
from qknorm_onnx.spec.signature import (
    ATTENTION_INPUTS,
    ATTENTION_OP,
    ATTENTION_OUTPUTS,
    DOMAIN,
    ROTARY_INPUTS,
    ROTARY_OP,
    ROTARY_OUTPUTS,
    VERSION,
    TensorSignature,
)
from qknorm_onnx.torch_export.operators import torch_op

_FLOAT_TYPES: Final = ("tensor(float)", "tensor(double)", "tensor(float16)", "tensor(bfloat16)")
_TYPES: Final = {
    "T or float": _FLOAT_TYPES,
    "bool, T or float": ("tensor(bool)", *_FLOAT_TYPES),
    "int64": ("tensor(int64)",),
}
_ATTRIBUTE_TYPES: Final = {
    int: onnx.defs.OpSchema.AttrType.INT,
    bool: onnx.defs.OpSchema.AttrType.INT,
    float: onnx.defs.OpSchema.AttrType.FLOAT,
    str: onnx.defs.OpSchema.AttrType.STRING,
}


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """For `torch.onnx.export(..., custom_translation_table=qk.translation_table())`.

    The exporter inlines functions, so each operator becomes a bare node of the `ai.qknorm` domain, which no runtime knows
    by itself: `qk.fuse` gives it the function body that every runtime can run.
    """
    operators = torch.ops.qknorm
    one_output, all_outputs = (_attention_translation(ATTENTION_OUTPUTS[:count]) for count in (1, 3))
    return {
        operators.attention.default: one_output,
        operators.attention_with_present.default: all_outputs,
        operators.rotary.default: _rotary_translation(),
    }


def _attention_translation(outputs: Sequence[TensorSignature]) -> Callable[..., Any]:
    node = _node_builder(ATTENTION_OP, QKNormSpec, ATTENTION_INPUTS, outputs)

    def qk_norm_attention(*inputs: Any, spec: str) -> Any:
        return node(*_without_trailing_none(inputs), **to_attributes(torch_op.decode_attention_spec(spec)))

    return qk_norm_attention


def _rotary_translation() -> Callable[..., Any]:
    node = _node_builder(ROTARY_OP, QKNormRotarySpec, ROTARY_INPUTS, ROTARY_OUTPUTS)

    def qk_norm_rotary(*inputs: Any, spec: str) -> Any:
        return node(*_without_trailing_none(inputs), **to_attributes(torch_op.decode_rotary_spec(spec)))

    return qk_norm_rotary


def _without_trailing_none(inputs: Sequence[Any]) -> Sequence[Any]:
    used = max((index + 1 for index, value in enumerate(inputs) if value is not None), default=0)
    return inputs[:used]


def _node_builder(
    op: str,
    spec_type: type[QKNormSpec] | type[QKNormRotarySpec],
    inputs: Sequence[TensorSignature],
    outputs: Sequence[TensorSignature],
) -> onnxscript.values.Op:
    """Appends one `op` node to the graph that the exporter is writing; it asks for a schema, made here from the signature."""
    schema = onnx.defs.OpSchema(
        op,
        DOMAIN,
        VERSION,
        inputs=[_parameter(tensor) for tensor in inputs],
        outputs=[_parameter(tensor) for tensor in outputs],
        type_constraints=[
            ("T", _FLOAT_TYPES, "type of the activations"),
            *((_type_variable(t), _TYPES[t.constraint], t.doc) for t in inputs if t.constraint != "T"),
        ],
        attributes=[
            onnx.defs.OpSchema.Attribute(field.onnx_name, _ATTRIBUTE_TYPES[field.type], field.doc, required=True)
            for field in attribute_fields(spec_type)
        ],
    )
    return onnxscript.values.Op(onnxscript.values.Opset(DOMAIN, VERSION), op, schema)


def _parameter(tensor: TensorSignature) -> onnx.defs.OpSchema.FormalParameter:
    option = onnx.defs.OpSchema.FormalParameterOption
    kind = option.Optional if tensor.optional else option.Single
    return onnx.defs.OpSchema.FormalParameter(tensor.name, _type_variable(tensor), tensor.doc, param_option=kind)


def _type_variable(tensor: TensorSignature) -> str:
    return "T" if tensor.constraint == "T" else f"T_{tensor.name}"
