"""Norm, rotary and scale of q or k in ONNX Runtime's own operators: SimplifiedLayerNormalization and its RotaryEmbedding.

Both need no newer ONNX opset, unlike their standard twins. They run in float32: in a narrow type the first would round
only after the gain, which is one of two meanings.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from qknorm_onnx.graph.canonical.body_builder import BodyBuilder, Dim
from qknorm_onnx.graph.canonical.body_preparation import PreparationInputs, scale_times_factor
from qknorm_onnx.graph.canonical.body_rotary import RotaryTables, make_tables, rotate
from qknorm_onnx.graph.canonical.body_signature import BodySignature
from qknorm_onnx.graph.canonical.function_body import Inputs, precision_of
from qknorm_onnx.graph.onnxruntime_release import CONTRIB_DOMAIN
from qknorm_onnx.lowering.emit.head_layout import HeadTensor, same_size
from qknorm_onnx.lowering.standard.preparation import NormParameters, norm_refusal, rotary_refusal, standard_normalize
from qknorm_onnx.spec.qk_norm_spec import (
    QKNormRotarySpec,
    RotarySpec,
    normalises,
    rotates,
    rotates_after_norm,
    rotates_before_norm,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContribTables:
    """Tables (rows, R/2) for RotaryEmbedding and the row of each token, or (`decomposed`) for the rotary of plain operators."""

    cos: ir.Value | None = None
    sin: ir.Value | None = None
    position_ids: ir.Value | None = None
    decomposed: RotaryTables | None = None
    reason: str = ""  # why RotaryEmbedding cannot do it


def contrib_tables(
    body: BodyBuilder, spec: RotarySpec, x: ir.Value, inputs: Inputs, signature: BodySignature, *, head_size: Dim
) -> ContribTables | None:
    """The tables of the inputs cos and sin for tokens of x (B, S, ...); None where nothing is rotated."""
    if not rotates(spec.order):
        return None
    compute = precision_of(signature).compute
    cos, sin = inputs["cos"], inputs["sin"]
    reason = rotary_refusal(spec, cos, sin, head_size=head_size, compute=compute)
    if reason:
        plain = make_tables(body, spec, cos, sin, signature=signature, head_size=head_size, compute=compute)
        return ContribTables(decomposed=plain, reason=reason)
    rows = [_rows(body, body.cast(table, compute), table, name=name) for name, table in (("cos", cos), ("sin", sin))]
    return ContribTables(cos=rows[0], sin=rows[1], position_ids=_row_of_token(body, rows[0], cos, x))


def shared_by_rows(table: ir.Value) -> bool:
    """Whether all rows of the batch are known to use one table."""
    assert table.shape is not None, "rotary_refusal asks for the shape"
    return table.shape.rank() == 2 or table.shape[0] == 1


def _rows(body: BodyBuilder, table: ir.Value, given: ir.Value, *, name: str) -> ir.Value:
    """A table (S, W), (1 or B, S, W) or (1 or B, 1, S, W) as (S, W) or (B*S, W)."""
    assert given.shape is not None, "rotary_refusal asks for the shape"
    rank = given.shape.rank()
    if shared_by_rows(given):
        return one_table(body, table, rank, name=name)
    if rank == 4:
        table = body.op("Squeeze", table, body.ints(1), name=f"{name}_bsr")
    return body.op("Flatten", table, name=f"{name}_rows", axis=2)


def one_table(body: BodyBuilder, table: ir.Value, rank: int, *, name: str) -> ir.Value:
    """A table that all rows share, (S, W) with axes of size 1 in front up to `rank`, as (S, W)."""
    if rank == 2:
        return table
    return body.op("Squeeze", table, body.ints(*range(rank - 2)), name=f"{name}_rows")


def _row_of_token(body: BodyBuilder, rows: ir.Value, given: ir.Value, x: ir.Value) -> ir.Value:
    """The row of a table for each token, (B, S), or where one table serves all rows of the batch its first row, (1)."""
    if shared_by_rows(given):
        return body.ints(0)
    sizes = [body.size(x, axis, name=name).vector for axis, name in ((0, "batch"), (1, "num_tokens_of_row"))]
    shape = body.op("Concat", *sizes, name="batch_and_length", axis=0)
    count = body.op("ReduceProd", shape, name="num_tokens", keepdims=0)
    zero, one = (body.scalar(number, ir.DataType.INT64) for number in (0, 1))
    token = body.op("Range", zero, count, one, name="token")
    if not same_size(given, x, axis=0):  # the table may be one for all: its rows are then taken again and again
        num_rows = body.op("Max", body.size(rows, 0, name="num_table_rows").vector, body.ints(1), name="table_rows_or_1")
        token = body.op("Mod", token, num_rows, name="table_row")
    return body.op("Reshape", token, shape, name="position_ids", allowzero=1)


def contrib_prepare(
    spec: QKNormRotarySpec,
    x: HeadTensor,
    given: PreparationInputs,
    prefix: str,
    tables: ContribTables | None,
    signature: BodySignature,
) -> HeadTensor:
    """Norm, rotary and scale, in the spec's order; the names of the norm's inputs start with `prefix`."""
    parameters = NormParameters(weight=f"{prefix}weight", bias=f"{prefix}bias", given=given)
    precision = precision_of(signature)
    if rotates_before_norm(spec.rotary.order) and tables is not None:
        x = _rotate(spec.rotary, x, tables)
    x = standard_normalize(spec, x, parameters, signature, precision, rms_operator="SimplifiedLayerNormalization")
    if rotates_after_norm(spec.rotary.order) and tables is not None:
        x = _rotate(spec.rotary, x, tables)
    scale = scale_times_factor(x.body, given.scale, given.factor, compute=precision.compute, tag=x.tag)
    if scale is None:
        return x
    shape = None if given.scale is None else given.scale.shape
    return _scaled(x, scale, 0 if given.scale is None else None if shape is None else shape.rank())


def has_contrib_stage(specs: list[QKNormRotarySpec], tables: ContribTables | None, head_size: Dim) -> bool:
    """Whether one of the preparations has an operator of its own for its norm or its rotary."""
    rotary = tables is not None and not tables.reason
    return rotary or any(normalises(spec.kind) and not norm_refusal(spec, head_size) for spec in specs)


def plain_stages(specs: list[QKNormRotarySpec], tables: ContribTables | None, head_size: Dim) -> list[str]:
    """Why stages of the preparations are made of plain operators, each reason once."""
    found = [tables.reason] if tables is not None else []
    found += [norm_refusal(spec, head_size) for spec in specs]
    return list(dict.fromkeys(reason for reason in found if reason))


def _rotate(spec: RotarySpec, x: HeadTensor, tables: ContribTables) -> HeadTensor:
    body = x.body
    if tables.decomposed is not None:
        return x.replaced(bshd=rotate(body, spec, x.as_bshd(), tables.decomposed, head_size=x.head_size, tag=x.tag))
    partial = spec.embedding_dim != 0 and spec.embedding_dim != x.head_size
    rotated = body.op(
        "RotaryEmbedding",
        x.as_flat(),
        tables.position_ids,
        tables.cos,
        tables.sin,
        name=f"{x.tag}_rotated",
        domain=CONTRIB_DOMAIN,
        interleaved=int(spec.interleaved),
        num_heads=x.num_heads if partial else None,  # else the tables say the size of a head
        rotary_embedding_dim=spec.embedding_dim if partial else None,
    )
    return x.replaced(flat=rotated)


def _scaled(x: HeadTensor, scale: ir.Value, rank: int | None) -> HeadTensor:
    """x * scale, for a scale that broadcasts to (B, H, S, D): the scale's axes are brought to the order of x, not x to its."""
    body = x.body
    if rank is None:
        return x.replaced(bhsd=body.op("Mul", x.as_bhsd(), scale, name=f"{x.tag}_scaled_bhsd"))
    if rank == 2:
        scale = body.op("Unsqueeze", scale, body.ints(1), name=f"{x.tag}_scale_s1d")
    if rank > 2:
        perm = [*range(rank - 3), rank - 2, rank - 3, rank - 1]
        scale = body.op("Transpose", scale, name=f"{x.tag}_scale_bshd", perm=perm)
    return x.replaced(bshd=body.op("Mul", x.as_bshd(), scale, name=f"{x.tag}_scaled"))
