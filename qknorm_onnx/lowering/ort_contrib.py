"""Target `ort`: ONNX Runtime's contrib operators, for people who cannot ship a library. Nothing is expressed in them yet."""

from __future__ import annotations

from typing import Final

from qknorm_onnx.graph.body_builder import BodyBuilder
from qknorm_onnx.graph.function_body import MINIMUM_OPSET
from qknorm_onnx.graph.known_fields import BODY_FIELDS
from qknorm_onnx.lowering.target import Emitted, LoweringRequest, RefusedLoweringError, Target


def emit(body: BodyBuilder, request: LoweringRequest) -> Emitted:
    """Refuses every spec: the standard operators of the next target are the nearest thing."""
    del body, request
    raise RefusedLoweringError("target 'ort' is not built yet for this spec")


ORT_CONTRIB: Final = Target(name="ort", minimum_opset=MINIMUM_OPSET, known_fields=BODY_FIELDS, emit=emit, fallback="onnx")
