"""Norm and rotary as RMSNormalization, LayerNormalization and RotaryEmbedding (ONNX 23), where those say what the spec means.

All of them run in the compute type (float32 for half precision tensors): in the tensors' type RMSNormalization would round
the normalised row before the gain, which is only one of the two meanings.
"""

from __future__ import annotations

import dataclasses
from typing import assert_never

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.canonical.body_builder import BodyBuilder, Dim
from qknorm_onnx.graph.canonical.body_norm import Precision, normalize
from qknorm_onnx.graph.canonical.body_preparation import PreparationInputs, gain_and_bias
from qknorm_onnx.graph.canonical.body_rotary import RotaryTables, make_tables, rotary_size, rotate
from qknorm_onnx.graph.canonical.body_signature import BodySignature
from qknorm_onnx.lowering.emit.head_layout import HeadTensor
from qknorm_onnx.spec.qk_norm_spec import (
    EpsilonMode,
    NormKind,
    QKNormRotarySpec,
    RotarySpec,
    normalises,
    rounds_before_weight,
    spans_heads,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StandardTables:
    """Tables for RotaryEmbedding, (B, S, R/2), or (`decomposed`) for the rotary of plain operators."""

    cos_bsr: ir.Value | None = None
    sin_bsr: ir.Value | None = None
    decomposed: RotaryTables | None = None
    reason: str = ""  # why RotaryEmbedding cannot do it


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormParameters:
    """The gain and bias of a norm and the names of their inputs."""

    weight: str
    bias: str
    given: PreparationInputs


def norm_refusal(spec: QKNormRotarySpec, head_size: Dim) -> str:
    """Why no standard operator is this norm; empty where one is, or where there is no norm."""
    if not normalises(spec.kind):
        return ""
    reason = _kind_refusal(spec.kind) or _epsilon_mode_refusal(spec.epsilon_mode)
    if reason:
        return reason
    if spec.epsilon == 0:
        return "a standard norm with epsilon 0 makes NaN of a zero row"
    if spec.groups != 1:
        return f"no standard norm has {spec.groups} groups"
    return "" if isinstance(head_size, int) else "a standard norm without gain needs the head size as a number"


def _kind_refusal(kind: NormKind) -> str:
    match kind:
        case "none" | "rms" | "layer":
            return ""
        case "l2":
            return f"no standard operator has norm kind {kind}"
        case _:
            assert_never(kind)


def _epsilon_mode_refusal(mode: EpsilonMode) -> str:
    match mode:
        case "inside_sqrt":
            return ""
        case "clamp" | "outside_sqrt":
            return f"no standard norm has epsilon_mode {mode}"
        case _:
            assert_never(mode)


def rotary_refusal(spec: RotarySpec, cos: ir.Value, sin: ir.Value, *, head_size: Dim, compute: ir.DataType) -> str:
    """Why RotaryEmbedding is not this rotary; empty where it is."""
    if compute == ir.DataType.DOUBLE:
        return "RotaryEmbedding has no float64"
    if spec.offset or spec.sections != 1:
        return "RotaryEmbedding has neither an offset nor sections"
    if not all(_serves_all_heads(table) for table in (cos, sin)):
        return "RotaryEmbedding has no tables per head"
    size = rotary_size(spec, head_size)
    if any(table.shape is None or table.shape[-1] != size // 2 for table in (cos, sin)):
        return "RotaryEmbedding has one factor per pair, and the two halves of these tables may differ"
    return ""


def _serves_all_heads(table: ir.Value) -> bool:
    """Whether the table is (S, W), (B, S, W) or (B, 1, S, W)."""
    return table.shape is not None and (table.shape.rank() < 4 or table.shape[1] == 1)


def standard_tables(
    body: BodyBuilder,
    spec: RotarySpec,
    cos: ir.Value,
    sin: ir.Value,
    *,
    batch: ir.Value,
    signature: BodySignature,
    head_size: Dim,
    compute: ir.DataType,
) -> StandardTables:
    """The tables, for the operator where it fits, else for plain operators. `batch` is the batch size, one int64."""
    reason = rotary_refusal(spec, cos, sin, head_size=head_size, compute=compute)
    if reason:
        plain = make_tables(body, spec, cos, sin, signature=signature, head_size=head_size, compute=compute)
        return StandardTables(decomposed=plain, reason=reason)
    # Tables of batch size 1 are refused at run time for a larger batch: they are repeated for each row.
    shape = body.op("Concat", batch, body.ints(1, 1), name="table_shape", axis=0)
    by_row = []
    for name, table in (("cos", cos), ("sin", sin)):
        given, row = signature[name], body.cast(table, compute)
        if given is not None and given.rank == 4:
            row = body.op("Squeeze", row, body.ints(1), name=f"{name}_bsr")
        by_row.append(body.op("Expand", row, shape, name=f"{name}_by_row"))
    return StandardTables(cos_bsr=by_row[0], sin_bsr=by_row[1])


def standard_rotate(spec: RotarySpec, x: HeadTensor, tables: StandardTables) -> HeadTensor:
    """x with the values that the spec names rotated."""
    body = x.body
    if tables.decomposed is not None:
        return x.replaced(bshd=rotate(body, spec, x.as_bshd(), tables.decomposed, head_size=x.head_size, tag=x.tag))
    rotated = body.op(
        "RotaryEmbedding",
        x.as_flat(),
        tables.cos_bsr,
        tables.sin_bsr,
        name=f"{x.tag}_rotated",
        num_heads=x.num_heads,
        interleaved=int(spec.interleaved),
        rotary_embedding_dim=0 if spec.embedding_dim == x.head_size else spec.embedding_dim,
    )
    return x.replaced(flat=rotated)


def standard_normalize(
    spec: QKNormRotarySpec,
    x: HeadTensor,
    parameters: NormParameters,
    signature: BodySignature,
    precision: Precision,
    *,
    rms_operator: str = "RMSNormalization",
) -> HeadTensor:
    """x over its statistics, times gain, plus bias. `rms_operator` takes the inputs and attributes of RMSNormalization."""
    body, given = x.body, parameters.given
    hidden = spans_heads(spec.axis)
    if not normalises(spec.kind) or norm_refusal(spec, x.head_size):
        rows = x.as_flat() if hidden else x.as_bshd()
        normed = normalize(body, spec, rows, head_size=x.head_size, precision=precision, tag=x.tag)
        return _with_gain(x.replaced(bshd=normed), given, precision)
    assert isinstance(x.head_size, int), "norm_refusal asks for a number"
    width = x.num_heads * x.head_size if hidden else x.head_size
    exact = rounds_before_weight(spec.weight_order) and precision.io != precision.compute
    weight = None if exact else _one_row(body, parameters.weight, given.weight, signature, width, precision)
    both = given.weight is None or weight is not None
    operator, has_bias = _operator_of(spec.kind, rms_operator)
    bias = _one_row(body, parameters.bias, given.bias, signature, width, precision) if both and has_bias else None
    scale = weight or body.constant(np.ones(width, dtype=precision.compute.numpy()), name="ones")
    operands = [x.as_flat() if hidden else x.as_bshd(), scale, *([bias] if bias is not None else [])]
    normed = body.op(
        operator, *operands, name=f"{x.tag}_normed", axis=-1, epsilon=spec.epsilon, stash_type=_stash_type(precision)
    )
    if rounds_before_weight(spec.weight_order):
        normed = body.cast(body.cast(normed, precision.io), precision.compute)
    out = x.replaced(flat=normed) if hidden else x.replaced(bshd=normed)
    left = dataclasses.replace(given, weight=None if weight else given.weight, bias=None if bias else given.bias)
    return _with_gain(out, left, precision)


def _operator_of(kind: NormKind, rms_operator: str) -> tuple[str, bool]:
    """The standard operator of a kind that norm_refusal lets pass, and whether it has a bias."""
    match kind:
        case "rms":
            return rms_operator, False
        case "layer":
            return "LayerNormalization", True
        case "none" | "l2":
            raise AssertionError(f"norm_refusal refuses {kind}")
        case _:
            assert_never(kind)


def _stash_type(precision: Precision) -> int | None:
    """The type of the statistics where it is not the operators' default, float32."""
    return int(ir.DataType.DOUBLE) if precision.compute == ir.DataType.DOUBLE else None


def _with_gain(x: HeadTensor, given: PreparationInputs, precision: Precision) -> HeadTensor:
    if given.weight is None and given.bias is None:
        return x
    size, compute = x.head_size, precision.compute
    return x.replaced(bshd=gain_and_bias(x.body, x.as_bshd(), given, factor=1.0, head_size=size, compute=compute, tag=x.tag))


def _one_row(
    body: BodyBuilder,
    name: str,
    parameter: ir.Value | None,
    signature: BodySignature,
    width: int,
    precision: Precision,
) -> ir.Value | None:
    """The parameter as one factor for each value of a normalised row, None where it is not known to be that."""
    given = signature[name]
    if parameter is None or given is None or given.last_dim is None or given.rank is None:
        return None
    parameter = body.cast(parameter, precision.compute)
    if given.rank == 1 and given.last_dim == width:
        return parameter
    per_head = given.rank == 2 and width != given.last_dim  # (H, D), the rows hold all heads
    return body.op("Reshape", parameter, body.ints(-1), name=f"{name}_row") if per_head else None
