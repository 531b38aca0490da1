"""Target `onnx`: RMSNormalization, LayerNormalization, RotaryEmbedding and Attention of opset 23 and newer.

A stage that the standard operators cannot say is made of plain operators, and the outcome says which one and why. Limits
of the operators themselves: a row whose squares overflow float32 is not scaled first, and ONNX Runtime's Attention (1.32)
refuses empty batches and lengths.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import onnx_ir as ir

from qknorm_onnx.graph.canonical.body_attention import Mask, logit_factor
from qknorm_onnx.graph.canonical.body_builder import BodyBuilder, Dim
from qknorm_onnx.graph.canonical.body_norm import Precision
from qknorm_onnx.graph.canonical.body_preparation import PreparationInputs, scale_times_factor
from qknorm_onnx.graph.canonical.body_signature import BodySignature
from qknorm_onnx.graph.canonical.function_body import (
    Inputs,
    emit_core,
    head_size_of,
    key_inputs,
    merge_heads,
    precision_of,
    query_inputs,
)
from qknorm_onnx.graph.canonical.known_fields import BODY_FIELDS
from qknorm_onnx.lowering.emit.head_layout import HeadTensor
from qknorm_onnx.lowering.emit.target import Emitted, LoweringRequest, RefusedLoweringError, Target
from qknorm_onnx.lowering.emit.whole_mask import whole_mask
from qknorm_onnx.lowering.standard.preparation import (
    NormParameters,
    StandardTables,
    norm_refusal,
    standard_normalize,
    standard_rotate,
    standard_tables,
)
from qknorm_onnx.spec.qk_norm_spec import (
    AttentionSpec,
    QKNormRotarySpec,
    QKNormSpec,
    RotarySpec,
    normalises,
    rotates,
    rotates_after_norm,
    rotates_before_norm,
)

MINIMUM_OPSET: Final = 23


@dataclasses.dataclass(frozen=True, kw_only=True)
class StandardCore:
    """How one Attention operator says an attention: attributes, and what multiplies q in front of it."""

    scale: float
    query_factor: float
    is_causal: bool


def emit(body: BodyBuilder, request: LoweringRequest) -> Emitted:
    """Standard operators for the node. Refuses where not one of its stages has one."""
    if isinstance(request.spec, QKNormSpec):
        return _emit_attention(body, request.spec, request)
    return _emit_rotary(body, request.spec, request)


def core_refusal(spec: AttentionSpec, inputs: Inputs) -> str:
    """Why the Attention operator is not this attention; empty where it is."""
    if spec.logit_clamp:
        return "Attention cannot clamp logits"
    if "head_sink" in inputs:
        return "Attention has no sink"
    if "cache_length" in inputs:
        return "Attention has no fixed-size cache with a length per row"
    return ""


def standard_core(spec: AttentionSpec, inputs: Inputs, attention_type: ir.DataType) -> StandardCore:
    """The attributes of the Attention operator.

    Causality is left to the operator only where nothing else hides keys: a row that a bias and causality empty together
    must be found, to make it zero on every runtime. The function body that stands in for a missing float64 kernel takes
    the root of the scale in float32, so that it is 1 there; and it takes a root at all, so that it cannot be negative.
    """
    only_causal = spec.left_window_size < 0 and "query_offset" not in inputs and "attention_bias" not in inputs
    folded = attention_type == ir.DataType.DOUBLE or spec.scale <= 0
    return StandardCore(
        scale=1.0 if folded else spec.scale,
        query_factor=spec.scale if folded else 1.0,
        is_causal=only_causal and (spec.is_causal or spec.right_window_size == 0),
    )


def _emit_attention(body: BodyBuilder, spec: QKNormSpec, request: LoweringRequest) -> Emitted:
    inputs, signature = request.inputs, request.signature
    precision = precision_of(signature, spec.attention)
    head_size = head_size_of(body, signature, "query", inputs["query"], spec.attention.q_num_heads)
    refusal = core_refusal(spec.attention, inputs)
    core = standard_core(spec.attention, inputs, precision.attention)
    factor = logit_factor(spec.attention) if refusal else core.query_factor
    tables = _tables(body, spec.rotary, inputs["query"], inputs, signature, head_size=head_size)
    sides = (("q", spec.query_preparation, spec.attention.q_num_heads), ("k", spec.key_preparation, spec.attention.kv_num_heads))
    plain = [tables.reason] if tables is not None else []
    plain += [norm_refusal(preparation, head_size) for _, preparation, _ in sides]
    reasons = list(dict.fromkeys(reason for reason in (*plain, refusal) if reason))
    if refusal and not _has_standard_stage([preparation for _, preparation, _ in sides], tables, head_size):
        raise RefusedLoweringError("; ".join(reasons))
    prepared = []
    for tag, preparation, num_heads in sides:
        given = query_inputs(inputs, None, factor=factor) if tag == "q" else key_inputs(inputs, None)
        x = HeadTensor(body, num_heads, head_size, tag, flat=body.cast(given.x, precision.compute))
        prepared.append(_prepare(preparation, x, given, f"{tag}_norm_", tables, signature))
    if refusal:
        outputs = emit_core(body, spec.attention, prepared[0].as_bhsd(), prepared[1].as_bhsd(), inputs, signature)
    else:
        outputs = _emit_core(spec.attention, core, prepared[0], prepared[1], inputs, signature)
    return Emitted(outputs=outputs, note=_note(reasons))


def _emit_rotary(body: BodyBuilder, spec: QKNormRotarySpec, request: LoweringRequest) -> Emitted:
    inputs, signature = request.inputs, request.signature
    precision = precision_of(signature)
    head_size = head_size_of(body, signature, "x", inputs["x"], spec.num_heads)
    tables = _tables(body, spec.rotary, inputs["x"], inputs, signature, head_size=head_size)
    refusals = [norm_refusal(spec, head_size), tables.reason if tables is not None else ""]
    reasons = [reason for reason in refusals if reason]
    if not _has_standard_stage([spec], tables, head_size):
        raise RefusedLoweringError("; ".join(reasons) or "there is neither a norm nor a rotary")
    given = PreparationInputs(x=inputs["x"], weight=inputs.get("weight"), bias=inputs.get("bias"), scale=inputs.get("scale"))
    x = HeadTensor(body, spec.num_heads, head_size, "x", flat=body.cast(given.x, precision.compute))
    y = _prepare(spec, x, given, "", tables, signature)
    return Emitted(outputs=[body.cast(y.as_flat(), precision.io)], note=_note(reasons))


def _tables(
    body: BodyBuilder, spec: RotarySpec, x: ir.Value, inputs: Inputs, signature: BodySignature, *, head_size: Dim
) -> StandardTables | None:
    if not rotates(spec.order):
        return None
    return standard_tables(
        body,
        spec,
        inputs["cos"],
        inputs["sin"],
        batch=body.size(x, 0, name="batch").vector,
        signature=signature,
        head_size=head_size,
        compute=precision_of(signature).compute,
    )


def _has_standard_stage(specs: list[QKNormRotarySpec], tables: StandardTables | None, head_size: Dim) -> bool:
    rotary = tables is not None and not tables.reason
    return rotary or any(normalises(spec.kind) and not norm_refusal(spec, head_size) for spec in specs)


def _prepare(
    spec: QKNormRotarySpec,
    x: HeadTensor,
    given: PreparationInputs,
    prefix: str,
    tables: StandardTables | None,
    signature: BodySignature,
) -> HeadTensor:
    """Norm, rotary and scale, in the spec's order."""
    precision = precision_of(signature)
    parameters = NormParameters(weight=f"{prefix}weight", bias=f"{prefix}bias", given=given)
    if rotates_before_norm(spec.rotary.order) and tables is not None:
        x = standard_rotate(spec.rotary, x, tables)
    x = standard_normalize(spec, x, parameters, signature, precision)
    if rotates_after_norm(spec.rotary.order) and tables is not None:
        x = standard_rotate(spec.rotary, x, tables)
    scale = scale_times_factor(x.body, given.scale, given.factor, compute=precision.compute, tag=x.tag)
    return x if scale is None else x.replaced(bhsd=x.body.op("Mul", x.as_bhsd(), scale, name=f"{x.tag}_scaled_bhsd"))


def _emit_core(
    spec: AttentionSpec, core: StandardCore, query: HeadTensor, key: HeadTensor, inputs: Inputs, signature: BodySignature
) -> list[ir.Value]:
    """Cache, softmax and values in one Attention operator."""
    body, precision = query.body, precision_of(signature, spec)
    kind = precision.attention
    mask = Mask() if core.is_causal else whole_mask(body, spec, inputs, signature, dtype=kind, four_axes=False)
    value_size = head_size_of(body, signature, "value", inputs["value"], spec.kv_num_heads)
    value = HeadTensor(body, spec.kv_num_heads, value_size, "v", flat=inputs["value"])
    by_heads = mask.empty_rows is not None  # rows are made zero per head
    operands = [body.cast(x.as_bhsd() if by_heads else x.as_flat(), kind) for x in (query, key, value)]
    has_past = "past_key" in inputs
    past = [body.cast(inputs[name], kind) for name in ("past_key", "past_value")] if has_past else []
    names = ["attention", *(["all_keys", "all_values"] if has_past else [])]
    outputs = body.ops(
        "Attention",
        *operands,
        *([mask.added] if mask.added is not None or has_past else []),
        *past,
        names=names,
        scale=core.scale,
        softcap=spec.softcap or None,
        is_causal=int(core.is_causal) or None,
        q_num_heads=None if by_heads else spec.q_num_heads,
        kv_num_heads=None if by_heads else spec.kv_num_heads,
    )
    y = _y(spec, outputs[0], mask, value, precision)
    if has_past:
        present = [body.cast(output, precision.io) for output in outputs[1:]]
    else:
        present = [body.cast(key.as_bhsd(), precision.io), value.as_bhsd()] if signature.num_outputs > 1 else []
    return [y, *present][: signature.num_outputs]


def _y(spec: AttentionSpec, output: ir.Value, mask: Mask, value: HeadTensor, precision: Precision) -> ir.Value:
    body = value.body
    if mask.empty_rows is None:
        return body.cast(output, precision.io, name="y")
    zero = body.scalar(0.0, precision.attention)
    y_bhsd = body.op("Where", mask.empty_rows, zero, output, name="y_of_seeing_rows", dtype=precision.attention)
    return merge_heads(body, y_bhsd, body.times(value.head_size, spec.q_num_heads), io=precision.io, name="y")


def _note(reasons: list[str]) -> str:
    return f"partly plain operators: {'; '.join(reasons)}" if reasons else ""


STANDARD: Final = Target(name="onnx", minimum_opset=MINIMUM_OPSET, known_fields=BODY_FIELDS, emit=emit, fallback="primitive")
