"""The norm stage of a function body: `reference.normalize` in ONNX operators that exist from opset 18 on."""

from __future__ import annotations

import dataclasses
import math
from typing import Final, assert_never

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.canonical.body_builder import KEEP, BodyBuilder, Dim
from qknorm_onnx.spec.qk_norm_spec import (
    EpsilonMode,
    NormKind,
    QKNormRotarySpec,
    normalises,
    rounds_before_weight,
    spans_heads,
)

# Types of which no square overflows or vanishes in the compute type: their rows need no scaling.
_SQUARES_FIT: Final = frozenset({ir.DataType.FLOAT16})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """Types of a body: `io` of the tensors (T), `compute` of norm and rotary (C), `attention` of logits and softmax."""

    io: ir.DataType
    compute: ir.DataType
    attention: ir.DataType


def compute_type(io: ir.DataType) -> ir.DataType:
    """The wider of float32 and `io`."""
    return ir.DataType.DOUBLE if io == ir.DataType.DOUBLE else ir.DataType.FLOAT


def smallest_normal(dtype: ir.DataType) -> float:
    """The lower bound of a norm's denominator in compute type `dtype`, which turns all-zero rows into zeros."""
    return float(np.finfo(dtype.numpy()).tiny)


def normalize(
    body: BodyBuilder, spec: QKNormRotarySpec, x: ir.Value, *, head_size: Dim, precision: Precision, tag: str
) -> ir.Value:
    """x over its statistics, without gain and bias.

    x is (B, S, H*D) for norm axis `hidden`, (B, S, H, D) for `head`; the result is (B, S, H, D) for both.
    """
    split: list[Dim] = [KEEP, KEEP, spec.num_heads, head_size]
    if not normalises(spec.kind):
        return body.reshape(x, *split, name=f"{tag}_bshd") if spans_heads(spec.axis) else x
    rows = _rows(body, spec, x, head_size=head_size, tag=tag)
    if _is_centred(spec.kind):
        rows = _centre(body, rows, tag=tag)
    if precision.io in _SQUARES_FIT:
        normed = _divide_by_size(body, spec, rows, tag=tag)
    else:
        normed = _divide_by_scaled_size(body, spec, rows, tag=tag)
    if spans_heads(spec.axis) or spec.groups > 1:
        normed = body.reshape(normed, *split, name=f"{tag}_normed_bshd")
    if rounds_before_weight(spec.weight_order):
        normed = body.cast(body.cast(normed, precision.io), precision.compute)
    return normed


def _rows(body: BodyBuilder, spec: QKNormRotarySpec, x: ir.Value, *, head_size: Dim, tag: str) -> ir.Value:
    """x with the values that share one statistic on the last axis."""
    if spec.groups == 1:
        return x
    hidden = spans_heads(spec.axis)
    width = body.times(head_size, spec.num_heads) if hidden else head_size
    group = body.divide(width, spec.groups, name=f"{tag}_group_size")
    kept: list[Dim] = [KEEP, KEEP] if hidden else [KEEP, KEEP, KEEP]
    return body.reshape(x, *kept, spec.groups, group, name=f"{tag}_groups")


def _is_centred(kind: NormKind) -> bool:
    match kind:
        case "none" | "rms" | "l2":
            return False
        case "layer":
            return True
        case _:
            assert_never(kind)


def _centre(body: BodyBuilder, rows: ir.Value, *, tag: str) -> ir.Value:
    """rows - mean(rows). The first value is subtracted before, so that a constant row becomes exactly zero."""
    last = body.ints(-1)
    first = body.op("Slice", rows, body.ints(0), body.ints(1), last, name=f"{tag}_first")
    shifted = body.op("Sub", rows, first, name=f"{tag}_shifted")
    mean = body.op("ReduceMean", shifted, last, name=f"{tag}_mean", keepdims=1)
    return body.op("Sub", shifted, mean, name=f"{tag}_centred")


def _mean_or_sum(body: BodyBuilder, spec: QKNormRotarySpec, rows: ir.Value, *, tag: str) -> ir.Value:
    """The mean (`l2`: the sum) of the squares of each row."""
    squares = body.op("Mul", rows, rows, name=f"{tag}_squares")
    match spec.kind:
        case "none" | "rms" | "layer":
            reduce = "ReduceMean"
        case "l2":
            reduce = "ReduceSum"
        case _:
            assert_never(spec.kind)
    return body.op(reduce, squares, body.ints(-1), name=f"{tag}_mean_square", keepdims=1)


def _divide_by_size(body: BodyBuilder, spec: QKNormRotarySpec, rows: ir.Value, *, tag: str) -> ir.Value:
    """rows / denominator, where no square can leave the range of the compute type."""
    dtype = _dtype(rows)
    mean_square = _mean_or_sum(body, spec, rows, tag=tag)
    bound = smallest_normal(dtype)
    match _mode_in_effect(spec):
        case "inside_sqrt":
            total = body.op("Add", mean_square, body.scalar(spec.epsilon, dtype), name=f"{tag}_total")
            return body.op("Div", rows, body.op("Sqrt", total, name=f"{tag}_denominator"), name=f"{tag}_normed")
        case "outside_sqrt":
            size = body.op("Sqrt", mean_square, name=f"{tag}_size")
            size = body.op("Add", size, body.scalar(spec.epsilon, dtype), name=f"{tag}_total")
        case "clamp":
            size = body.op("Sqrt", mean_square, name=f"{tag}_size")
            bound = max(spec.epsilon, bound)
        case _ as unknown:
            assert_never(unknown)
    lowest = body.scalar(bound, dtype)
    return body.op("Div", rows, body.op("Max", size, lowest, name=f"{tag}_denominator"), name=f"{tag}_normed")


def _divide_by_scaled_size(body: BodyBuilder, spec: QKNormRotarySpec, rows: ir.Value, *, tag: str) -> ir.Value:
    """rows / denominator, computed on u = rows / m with m = max|row|, or epsilon's own size where that is larger.

    |u| <= 1, so that no square overflows; and what vanishes among the squares would vanish next to epsilon too. With
    q = epsilon's size / m <= 1 the denominator of u is sqrt(mean(u^2) + q^2), max(sqrt(mean(u^2)), q) or
    sqrt(mean(u^2)) + q. Without an epsilon it is the second, with the smallest normal number in epsilon's place.
    """
    dtype = _dtype(rows)
    tiny = smallest_normal(dtype)
    mode = _mode_in_effect(spec)
    bound = body.scalar(max(_size_of_epsilon(spec.epsilon, mode), tiny), dtype)
    magnitude = body.op("Abs", rows, name=f"{tag}_magnitude")
    largest = body.op("ReduceMax", magnitude, body.ints(-1), name=f"{tag}_largest", keepdims=1)
    divisor = body.op("Max", largest, bound, name=f"{tag}_divisor")
    scaled = body.op("Div", rows, divisor, name=f"{tag}_scaled")
    share = body.op("Div", bound, divisor, name=f"{tag}_epsilon_share")
    mean_square = _mean_or_sum(body, spec, scaled, tag=tag)
    denominator = _with_share(body, mean_square, share, mode, tag=tag)
    return body.op("Div", scaled, denominator, name=f"{tag}_normed")


def _with_share(body: BodyBuilder, mean_square: ir.Value, share: ir.Value, mode: EpsilonMode, *, tag: str) -> ir.Value:
    """The denominator of u, from the mean of its squares and epsilon's share q."""
    match mode:
        case "inside_sqrt":
            share = body.op("Mul", share, share, name=f"{tag}_epsilon_share_squared")
            return body.op("Sqrt", body.op("Add", mean_square, share, name=f"{tag}_total"), name=f"{tag}_denominator")
        case "clamp":
            return body.op("Max", body.op("Sqrt", mean_square, name=f"{tag}_size"), share, name=f"{tag}_denominator")
        case "outside_sqrt":
            return body.op("Add", body.op("Sqrt", mean_square, name=f"{tag}_size"), share, name=f"{tag}_denominator")
        case _:
            assert_never(mode)


def _mode_in_effect(spec: QKNormRotarySpec) -> EpsilonMode:
    """An epsilon of 0 is a lower bound of nothing in every mode."""
    return spec.epsilon_mode if spec.epsilon > 0 else "clamp"


def _size_of_epsilon(epsilon: float, mode: EpsilonMode) -> float:
    """What epsilon is beside the size of a row, not beside its square."""
    match mode:
        case "inside_sqrt":
            return math.sqrt(epsilon)
        case "clamp" | "outside_sqrt":
            return epsilon
        case _:
            assert_never(mode)


def _dtype(value: ir.Value) -> ir.DataType:
    assert value.dtype is not None, "the builder types every value"
    return value.dtype
