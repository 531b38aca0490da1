"""A spec as ONNX operators: the function body of a canonical node, from opset 18 on, with the meaning of `reference.py`.

A body is made for a spec, the types of a node's inputs and the inputs that are there. Batch, lengths and cache sizes stay
dynamic, empty ones included. Norm, rotary, logits and softmax run in the compute type, the wider of float32 and the
tensors' type T; what leaves the body, the cache included, is cast to T.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import onnx_ir as ir

from qknorm_onnx.graph.canonical.body_attention import (
    AttentionOperands,
    Bias,
    Mask,
    attend,
    limits_view,
    logit_factor,
    make_mask,
    rows_see_something,
    visible_keys,
    widened_bias,
    without_unused_entries,
)
from qknorm_onnx.graph.canonical.body_builder import KEEP, BodyBuilder, Dim, RuntimeSize
from qknorm_onnx.graph.canonical.body_cache import KeyPositions, append, key_positions, used_entries
from qknorm_onnx.graph.canonical.body_norm import Precision, compute_type
from qknorm_onnx.graph.canonical.body_preparation import PreparationInputs, prepare
from qknorm_onnx.graph.canonical.body_rotary import RotaryTables, make_tables
from qknorm_onnx.graph.canonical.body_signature import BodySignature
from qknorm_onnx.graph.canonical.known_fields import BODY_FIELDS, unknown_fields
from qknorm_onnx.spec.attributes import Spec, to_attributes
from qknorm_onnx.spec.qk_norm_spec import (
    AttentionSpec,
    QKNormRotarySpec,
    QKNormSpec,
    RotarySpec,
    SpecError,
    needs_float64,
    rotates,
)
from qknorm_onnx.spec.signature import ATTENTION_OP, DOMAIN, ROTARY_OP

MINIMUM_OPSET: Final = 18

Inputs = Mapping[str, ir.Value]  # the inputs that are there, by the operator's names


def attention_body(spec: QKNormSpec, signature: BodySignature, *, opset: int, name: str = ATTENTION_OP) -> ir.Function:
    """The function `name` of a `QKNormAttention` with this spec and these inputs, for a model of ONNX opset `opset`.

    Raises:
        SpecError: `opset` is older than 18, or a size that decides about the nodes is not known.
    """

    def emit(body: BodyBuilder, inputs: Inputs) -> Sequence[ir.Value]:
        return emit_attention(body, spec, inputs, signature)

    return _function(name, spec, signature, emit, opset=opset)


def rotary_body(spec: QKNormRotarySpec, signature: BodySignature, *, opset: int, name: str = ROTARY_OP) -> ir.Function:
    """The function `name` of a `QKNormRotary`; as `attention_body`."""

    def emit(body: BodyBuilder, inputs: Inputs) -> Sequence[ir.Value]:
        return emit_rotary(body, spec, inputs, signature)

    return _function(name, spec, signature, emit, opset=opset)


def require_known(spec: Spec) -> None:
    """Raises SpecError where `spec` has a field that the body would ignore, or a value that no spec has."""
    spec.check()
    unknown = unknown_fields(spec, BODY_FIELDS)
    if unknown:
        raise SpecError(f"function bodies do not know {', '.join(unknown)}")


def precision_of(signature: BodySignature, spec: AttentionSpec | None = None) -> Precision:
    """The types that a body with these inputs computes in."""
    first = signature.inputs[0]
    assert first is not None, "the first input is required"
    compute = compute_type(first.dtype)
    attention = ir.DataType.DOUBLE if spec is not None and needs_float64(spec.softmax_precision) else compute
    return Precision(io=first.dtype, compute=compute, attention=attention)


def emit_rotary(body: BodyBuilder, spec: QKNormRotarySpec, inputs: Inputs, signature: BodySignature) -> Sequence[ir.Value]:
    """Appends the nodes of a `QKNormRotary` and returns its output."""
    require_known(spec)
    precision = precision_of(signature)
    head_size = head_size_of(body, signature, "x", inputs["x"], spec.num_heads)
    given = PreparationInputs(
        x=inputs["x"],
        weight=inputs.get("weight"),
        bias=inputs.get("bias"),
        scale=inputs.get("scale"),
        tables=rotary_tables(body, spec.rotary, inputs, signature, head_size=head_size, precision=precision),
    )
    x_bhsd = prepare(body, spec, given, head_size=head_size, precision=precision, tag="x")
    return [merge_heads(body, x_bhsd, body.times(head_size, spec.num_heads), io=precision.io)]


def emit_attention(body: BodyBuilder, spec: QKNormSpec, inputs: Inputs, signature: BodySignature) -> Sequence[ir.Value]:
    """Appends the nodes of a `QKNormAttention` and returns Y, present_key and present_value."""
    require_known(spec)
    precision = precision_of(signature, spec.attention)
    head_size = head_size_of(body, signature, "query", inputs["query"], spec.attention.q_num_heads)
    tables = rotary_tables(body, spec.rotary, inputs, signature, head_size=head_size, precision=precision)
    query, key = (
        prepare(body, preparation, given, head_size=head_size, precision=precision, tag=tag)
        for tag, preparation, given in (
            ("q", spec.query_preparation, query_inputs(inputs, tables, factor=logit_factor(spec.attention))),
            ("k", spec.key_preparation, key_inputs(inputs, tables)),
        )
    )
    return emit_core(body, spec.attention, query, key, inputs, signature)


def emit_core(
    body: BodyBuilder,
    spec: AttentionSpec,
    query_bhsd: ir.Value,
    key_bhsd: ir.Value,
    inputs: Inputs,
    signature: BodySignature,
) -> Sequence[ir.Value]:
    """Cache, softmax and values of prepared (and scaled) queries and keys: Y, present_key and present_value."""
    precision = precision_of(signature, spec)
    positions = key_positions(
        body,
        key=inputs["key"],
        past_key=inputs.get("past_key"),
        cache_length=inputs.get("cache_length"),
        query_offset=inputs.get("query_offset"),
    )
    value_size = head_size_of(body, signature, "value", inputs["value"], spec.kv_num_heads)
    value_bhsd = heads_first(body, inputs["value"], spec.kv_num_heads, value_size, tag="v")
    keep_key = signature.num_outputs > 1 or "past_key" in inputs
    new_key = body.cast(key_bhsd, precision.io, name="new_key") if keep_key else key_bhsd
    present_key = append(body, inputs.get("past_key"), new_key, positions, tag="key")
    present_value = append(body, inputs.get("past_value"), value_bhsd, positions, tag="value")
    used = used_entries(body, present_key, positions)
    sink = inputs.get("head_sink")
    operands = AttentionOperands(
        query_bhsd=body.cast(query_bhsd, precision.attention),
        key_bhtd=body.cast(present_key, precision.attention),
        value_bhtd=without_unused_entries(body, body.cast(present_value, precision.attention), used),
        num_queries=body.size(inputs["query"], 1, name="num_queries"),
        used=used,
        head_sink=None if sink is None else body.cast(sink, precision.attention),
    )
    mask = _mask(body, spec, operands, positions, inputs, signature)
    y_bhsd = attend(body, spec, operands, mask)
    width = body.times(value_size, spec.q_num_heads)
    return [merge_heads(body, y_bhsd, width, io=precision.io, name="y"), present_key, present_value][: signature.num_outputs]


def head_size_of(body: BodyBuilder, signature: BodySignature, name: str, value: ir.Value, num_heads: int) -> Dim:
    """Size of one head of the projection `name` (B, S, heads * size): a number where the node says it."""
    given = signature[name]
    if given is not None and given.last_dim is not None:
        return given.last_dim // num_heads
    return body.divide(body.size(value, 2, name=f"{name}_width"), num_heads, name=f"{name}_head_size")


def rotary_tables(
    body: BodyBuilder, spec: RotarySpec, inputs: Inputs, signature: BodySignature, *, head_size: Dim, precision: Precision
) -> RotaryTables | None:
    """The tables of the inputs cos and sin, None where the spec rotates nothing."""
    if not rotates(spec.order):
        return None
    cos, sin = inputs["cos"], inputs["sin"]
    return make_tables(body, spec, cos, sin, signature=signature, head_size=head_size, compute=precision.compute)


def query_inputs(inputs: Inputs, tables: RotaryTables | None, *, factor: float) -> PreparationInputs:
    """What prepares the queries of a `QKNormAttention`."""
    return PreparationInputs(
        x=inputs["query"],
        weight=inputs.get("q_norm_weight"),
        bias=inputs.get("q_norm_bias"),
        scale=inputs.get("q_scale"),
        tables=tables,
        factor=factor,
    )


def key_inputs(inputs: Inputs, tables: RotaryTables | None) -> PreparationInputs:
    """What prepares the keys of a `QKNormAttention`."""
    return PreparationInputs(x=inputs["key"], weight=inputs.get("k_norm_weight"), bias=inputs.get("k_norm_bias"), tables=tables)


def heads_first(body: BodyBuilder, x: ir.Value, num_heads: int, size: Dim, *, tag: str) -> ir.Value:
    """(B, S, H*size) -> (B, H, S, size)."""
    x_bshd = body.reshape(x, KEEP, KEEP, num_heads, size, name=f"{tag}_bshd")
    return body.op("Transpose", x_bshd, name=f"{tag}_bhsd", perm=[0, 2, 1, 3])


def merge_heads(body: BodyBuilder, x_bhsd: ir.Value, width: Dim, *, io: ir.DataType, name: str = "merged") -> ir.Value:
    """(B, H, S, size) -> (B, S, H*size) in the tensors' type."""
    x_bshd = body.op("Transpose", body.cast(x_bhsd, io), name=f"{name}_bshd", perm=[0, 2, 1, 3])
    return body.reshape(x_bshd, KEEP, KEEP, width, name=name)


def bias_of_rows(
    body: BodyBuilder, inputs: Inputs, signature: BodySignature, *, dtype: ir.DataType, num_keys: RuntimeSize | None
) -> Bias:
    """The attention bias with at least one axis, in `dtype` unless it is bool. `num_keys`: T, where it may lack columns."""
    bias, given = inputs.get("attention_bias"), signature["attention_bias"]
    if bias is None:
        return Bias()
    if given is not None and given.rank == 0:
        bias = body.op("Unsqueeze", bias, body.ints(0), name="attention_bias_row")
    bias = bias if bias.dtype == ir.DataType.BOOL else body.cast(bias, dtype)
    return Bias(value=bias) if num_keys is None else widened_bias(body, bias, num_keys)


def _mask(
    body: BodyBuilder,
    spec: AttentionSpec,
    operands: AttentionOperands,
    positions: KeyPositions,
    inputs: Inputs,
    signature: BodySignature,
) -> Mask:
    num_keys = body.size(operands.key_bhtd, 2, name="num_keys") if limits_view(spec, positions) else None
    dtype = precision_of(signature, spec).attention
    bias = bias_of_rows(body, inputs, signature, dtype=dtype, num_keys=num_keys if "cache_length" in inputs else None)
    visible = None
    if num_keys is not None:
        visible = visible_keys(body, spec, positions, num_queries=operands.num_queries, num_keys=num_keys, columns=bias.columns)
    sees = bias.value is None and rows_see_something(spec, positions, per_row_positions="query_offset" in inputs)
    return make_mask(body, visible, bias.value, dtype=dtype, may_be_empty=not sees)


def _function(
    name: str,
    spec: Spec,
    signature: BodySignature,
    emit: Callable[[BodyBuilder, Inputs], Sequence[ir.Value]],
    *,
    opset: int,
) -> ir.Function:
    if opset < MINIMUM_OPSET:
        raise SpecError(f"the model has ONNX opset {opset}; function bodies need {MINIMUM_OPSET} or newer: convert the model")
    parameters = [
        ir.Value(name=name, type=None if given is None else ir.TensorType(given.dtype))
        for name, given in zip(signature.names, signature.inputs, strict=True)
    ]
    present = {
        name: parameter
        for name, parameter, given in zip(signature.names, parameters, signature.inputs, strict=True)
        if given is not None
    }
    body = BodyBuilder(taken=set(signature.names))
    outputs = emit(body, present)
    graph = ir.Graph(parameters, outputs, nodes=body.nodes_for(outputs), opset_imports={"": opset}, name=name)
    attributes = [ir.Attr(name, ir.AttributeType.UNDEFINED, None) for name in to_attributes(spec)]
    return ir.Function(DOMAIN, name, graph=graph, attributes=attributes)
