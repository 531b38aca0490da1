"""What happens to projected queries or keys before the dot product: norm, gain, bias, rotary and scale, in the spec's order."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from qknorm_onnx.graph.canonical.body_builder import KEEP, BodyBuilder, Dim
from qknorm_onnx.graph.canonical.body_norm import Precision, normalize
from qknorm_onnx.graph.canonical.body_rotary import RotaryTables, rotate
from qknorm_onnx.spec.qk_norm_spec import QKNormRotarySpec, rotates_after_norm, rotates_before_norm, spans_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparationInputs:
    """The values of one preparation: x (B, S, H*D); `factor` multiplies the result and is folded into a parameter."""

    x: ir.Value
    weight: ir.Value | None = None
    bias: ir.Value | None = None
    scale: ir.Value | None = None
    tables: RotaryTables | None = None
    factor: float = 1.0


def prepare(
    body: BodyBuilder, spec: QKNormRotarySpec, given: PreparationInputs, *, head_size: Dim, precision: Precision, tag: str
) -> ir.Value:
    """Prepared x as (B, H, S, D) in the compute type: `reference.prepare` times `given.factor`."""
    x = body.cast(given.x, precision.compute)
    if not spans_heads(spec.axis):
        x = body.reshape(x, KEEP, KEEP, spec.num_heads, head_size, name=f"{tag}_bshd")
    if rotates_before_norm(spec.rotary.order):
        x = _rotated(body, spec, x, given, head_size=head_size, tag=tag)
    x = normalize(body, spec, x, head_size=head_size, precision=precision, tag=tag)
    # The gain and what follows it are linear: the factor goes into a parameter, where it is folded when that is constant.
    in_gain = given.factor if given.weight is not None else 1.0
    x = gain_and_bias(body, x, given, factor=in_gain, head_size=head_size, compute=precision.compute, tag=tag)
    if rotates_after_norm(spec.rotary.order):
        x = _rotated(body, spec, x, given, head_size=head_size, tag=tag)
    x_bhsd = body.op("Transpose", x, name=f"{tag}_bhsd", perm=[0, 2, 1, 3])
    rest = 1.0 if given.weight is not None else given.factor
    scale = scale_times_factor(body, given.scale, rest, compute=precision.compute, tag=tag)
    return x_bhsd if scale is None else body.op("Mul", x_bhsd, scale, name=f"{tag}_scaled_bhsd")


def gain_and_bias(
    body: BodyBuilder,
    x_bshd: ir.Value,
    given: PreparationInputs,
    *,
    factor: float,
    head_size: Dim,
    compute: ir.DataType,
    tag: str,
) -> ir.Value:
    """x * weight * factor + bias * factor; parameters of shape (D), (H, D) or (H*D)."""
    for op_type, name, parameter in (("Mul", "weight", given.weight), ("Add", "bias", given.bias)):
        if parameter is None:
            continue
        per_head = body.reshape(body.cast(parameter, compute), 1, 1, -1, head_size, name=f"{tag}_{name}_per_head")
        if factor != 1.0:
            per_head = body.op("Mul", per_head, body.scalar(factor, compute), name=f"{tag}_{name}_scaled")
        x_bshd = body.op(op_type, x_bshd, per_head, name=f"{tag}_{'gained' if op_type == 'Mul' else 'biased'}")
    return x_bshd


def _rotated(
    body: BodyBuilder, spec: QKNormRotarySpec, x_bshd: ir.Value, given: PreparationInputs, *, head_size: Dim, tag: str
) -> ir.Value:
    assert given.tables is not None, "the caller makes the tables where the spec rotates"
    return rotate(body, spec.rotary, x_bshd, given.tables, head_size=head_size, tag=tag)


def scale_times_factor(
    body: BodyBuilder, scale: ir.Value | None, factor: float, *, compute: ir.DataType, tag: str
) -> ir.Value | None:
    """What multiplies the prepared values last, None where that is nothing."""
    if scale is None:
        return None if factor == 1.0 else body.scalar(factor, compute)
    scale = body.cast(scale, compute)
    return scale if factor == 1.0 else body.op("Mul", scale, body.scalar(factor, compute), name=f"{tag}_scale_factor")
