"""Target `ort`: ONNX Runtime's own operators, for people who cannot ship a library.

Norm and rotary as SimplifiedLayerNormalization, LayerNormalization and RotaryEmbedding, attention as GroupQueryAttention or
MultiHeadAttention. A norm or rotary that they cannot say is made of plain operators, and the outcome says which one and
why; an attention that they cannot say is refused. On CUDA see `contrib_on_cuda`.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from qknorm_onnx.graph.canonical.body_builder import BodyBuilder
from qknorm_onnx.graph.canonical.function_body import MINIMUM_OPSET, precision_of
from qknorm_onnx.graph.canonical.known_fields import BODY_FIELDS
from qknorm_onnx.lowering.contrib.attention import choose_core, emit_core
from qknorm_onnx.lowering.contrib.on_cuda import emit_attention_on_cuda, prologue_refusal
from qknorm_onnx.lowering.contrib.preparation import has_contrib_stage
from qknorm_onnx.lowering.contrib.sides import plain_stages_of, prepare_side, served_by, side_of, sides_of, tables_of
from qknorm_onnx.lowering.emit.target import Emitted, LoweringRequest, RefusedLoweringError, Target
from qknorm_onnx.spec.qk_norm_spec import QKNormRotarySpec, QKNormSpec
from qknorm_onnx.spec.signature import ROTARY_OP


def emit(body: BodyBuilder, request: LoweringRequest) -> Emitted:
    """ONNX Runtime's operators for the node. Refuses an attention, or a lone norm and rotary, that has none."""
    if isinstance(request.spec, QKNormRotarySpec):
        return _emit_rotary(body, request.spec, request)
    if request.provider == "cuda":
        return emit_attention_on_cuda(body, request.spec, request)
    return _emit_attention(body, request.spec, request)


def _emit_attention(body: BodyBuilder, spec: QKNormSpec, request: LoweringRequest) -> Emitted:
    core = choose_core(body, request)
    sides = sides_of(body, spec, request)
    tables = tables_of(body, sides[0], request)
    query, key = (prepare_side(body, side, tables, request) for side in sides)
    outputs = emit_core(core, query, key, request)
    return Emitted(outputs=outputs, note=served_by(core.operator, plain=plain_stages_of(sides, tables)))


def _emit_rotary(body: BodyBuilder, spec: QKNormRotarySpec, request: LoweringRequest) -> Emitted:
    precision = precision_of(request.signature)
    if precision.compute == ir.DataType.DOUBLE:
        raise RefusedLoweringError("the contrib operators have no float64")
    side = side_of(body, spec, request)
    if request.provider == "cuda" and not prologue_refusal(side, request):
        return Emitted(outputs=None, note=ROTARY_OP)
    tables = tables_of(body, side, request)
    plain = plain_stages_of((side,), tables)
    if not has_contrib_stage([spec], tables, side.head_size):
        raise RefusedLoweringError("; ".join(plain) or "there is neither a norm nor a rotary")
    x = prepare_side(body, side, tables, request)
    return Emitted(outputs=[body.cast(x.as_flat(), precision.io)], note=served_by("", plain=plain))


ORT_CONTRIB: Final = Target(name="ort", minimum_opset=MINIMUM_OPSET, known_fields=BODY_FIELDS, emit=emit, fallback="onnx")
