"""Target `primitive`: plain ONNX operators of opset 18 and newer, the nodes of the function body in the node's place."""

from __future__ import annotations

from typing import Final

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


PRIMITIVE: Final = Target(name="primitive", minimum_opset=MINIMUM_OPSET, known_fields=BODY_FIELDS, emit=emit)
