"""Target `primitive`: plain ONNX operators of opset 18 and newer, the nodes of the function body in the node's place."""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from qknorm_onnx.graph.canonical.body_builder import BodyBuilder
from qknorm_onnx.graph.canonical.function_body import MINIMUM_OPSET, emit_attention, emit_rotary
from qknorm_onnx.graph.canonical.known_fields import BODY_FIELDS
from qknorm_onnx.lowering.emit.target import Emitted, LoweringRequest, Target
from qknorm_onnx.spec.qk_norm_spec import QKNormSpec


def emit(body: BodyBuilder, request: LoweringRequest) -> Emitted:
    """The nodes of the function body."""
    if isinstance(request.spec, QKNormSpec):
        return Emitted(outputs=emit_attention(body, request.spec, request.inputs, request.signature))
    return Emitted(outputs=emit_rotary(body, request.spec, request.inputs, request.signature))


def forget_named_sizes(model: ir.Model) -> None:
    """Inner values keep shapes of numbers only; those with named sizes any runtime finds again from the inputs.

    tract takes a name for a size of its own, other than the number that it was given for the input with the same name.
    """
    for graph in model.graphs():
        outputs = set(graph.outputs)
        for node in graph:
            for value in node.outputs:
                if value not in outputs and value.shape is not None and not value.shape.is_static():
                    value.shape = None


PRIMITIVE: Final = Target(name="primitive", minimum_opset=MINIMUM_OPSET, known_fields=BODY_FIELDS, emit=emit)
