"""Target `ort` for CUDA: norm and rotary inside GroupQueryAttention, or in one kernel of ours in front of ONNX Runtime's.

Only CUDA's (and WebGPU's) GroupQueryAttention takes the gains of a norm. What it computes is known from its schema and
from the graph fusion that makes such nodes (onnxruntime 1.32): the RMS norm of each head with the rounding of
SimplifiedLayerNormalization, then the rotary. None of this has run on a GPU here: `docs/gpu.md` says so.
"""

from __future__ import annotations

from typing import assert_never

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.canonical.body_builder import BodyBuilder
from qknorm_onnx.graph.canonical.body_preparation import scale_times_factor
from qknorm_onnx.graph.canonical.body_signature import IR_DTYPES
from qknorm_onnx.graph.canonical.function_body import precision_of
from qknorm_onnx.graph.canonical.qk_norm_node import RotaryInputs, make_rotary_node
from qknorm_onnx.graph.onnxruntime_release import GROUPED_ATTRIBUTES
from qknorm_onnx.lowering.contrib.attention import COS, K_WEIGHT, Q_WEIGHT, SIN, ContribCore, NormInCore, choose_core, emit_core
from qknorm_onnx.lowering.contrib.preparation import one_table, shared_by_rows
from qknorm_onnx.lowering.contrib.sides import (
    ContribSide,
    plain_stages_of,
    prepare_side,
    raw_side,
    served_by,
    sides_of,
    tables_of,
)
from qknorm_onnx.lowering.emit.head_layout import HeadTensor
from qknorm_onnx.lowering.emit.target import Emitted, LoweringRequest
from qknorm_onnx.lowering.standard.preparation import rotary_refusal
from qknorm_onnx.spec.cuda_support import cuda_refusal
from qknorm_onnx.spec.qk_norm_spec import (
    EpsilonMode,
    NormKind,
    QKNormSpec,
    normalises,
    rotates,
    rotates_before_norm,
    rounds_before_weight,
    spans_heads,
)
from qknorm_onnx.spec.signature import ROTARY_OP

OPERATOR_WITH_NORM = "GroupQueryAttention"


def emit_attention_on_cuda(body: BodyBuilder, spec: QKNormSpec, request: LoweringRequest) -> Emitted:
    """The attention with as few kernels as there are. Raises RefusedLoweringError where no operator attends as the spec says."""
    core = choose_core(body, request)
    sides = sides_of(body, spec, request)
    if not any(_needs_preparation(side) for side in sides):
        query, key = (raw_side(body, side) for side in sides)
        return Emitted(outputs=emit_core(core, query, key, request), note=core.operator)
    reason = norm_in_core_refusal(spec, core, sides, request)
    if not reason:
        query, key = (raw_side(body, side) for side in sides)
        outputs = emit_core(core, query, key, request, norm_in_core=_norm_in_core(body, spec, sides, request))
        return Emitted(outputs=outputs, note=f"{core.operator} with its own norm and rotary")
    served = [not prologue_refusal(side, request) for side in sides]
    tables = None if all(served) else tables_of(body, sides[0], request)
    query, key = (
        _prologue(body, side, request) if kernel else prepare_side(body, side, tables, request)
        for side, kernel in zip(sides, served, strict=True)
    )
    operators = f"{ROTARY_OP} and {core.operator}" if any(served) else core.operator
    plain = [] if all(served) else plain_stages_of(sides, tables)
    return Emitted(outputs=emit_core(core, query, key, request), note=served_by(f"{operators}: {reason}", plain=plain))


def _needs_preparation(side: ContribSide) -> bool:
    scaled = side.given.scale is not None or side.given.factor != 1.0
    return scaled or normalises(side.spec.kind) or rotates(side.spec.rotary.order)


def prologue_refusal(side: ContribSide, request: LoweringRequest) -> str | None:
    """Why no kernel for CUDA prepares this side in a `QKNormRotary`; None where one does."""
    names = [name for name, dtype in IR_DTYPES.items() if dtype == precision_of(request.signature).io]
    sizes = (side.head_size,) if isinstance(side.head_size, int) else ()
    return cuda_refusal(side.spec, dtype=names[0], head_sizes=sizes)


def _prologue(body: BodyBuilder, side: ContribSide, request: LoweringRequest) -> HeadTensor:
    """Norm, rotary and scale of one side in a `QKNormRotary`."""
    if not _needs_preparation(side):
        return raw_side(body, side)
    given, rotated = side.given, rotates(side.spec.rotary.order)
    compute = precision_of(request.signature).compute
    inputs = RotaryInputs(
        x=given.x,
        weight=given.weight,
        bias=given.bias,
        scale=scale_times_factor(body, given.scale, given.factor, compute=compute, tag=side.tag),
        cos=request.inputs["cos"] if rotated else None,
        sin=request.inputs["sin"] if rotated else None,
    )
    name = f"{side.tag}_prepared"
    (prepared,) = body.add(make_rotary_node(side.spec, inputs, name=name), name=name)
    return raw_side(body, side).replaced(flat=prepared)


def norm_in_core_refusal(
    spec: QKNormSpec, core: ContribCore, sides: tuple[ContribSide, ContribSide], request: LoweringRequest
) -> str:
    """Why norm and rotary are not GroupQueryAttention's own; empty where they are."""
    if core.operator != OPERATOR_WITH_NORM:
        return f"{core.operator} has neither norm nor rotary"
    if sides[0].given.scale is not None or sides[0].given.factor != 1.0:
        return f"{core.operator} scales no queries behind their norm"
    return _missing_in_release(spec, request) or _norm_refusal(spec, sides, request) or _rotary_refusal(spec, sides[0], request)


def _missing_in_release(spec: QKNormSpec, request: LoweringRequest) -> str:
    attributes = _epsilons(spec.norm.q_epsilon, spec.norm.k_epsilon) if spec.has_norm else {}
    lacking = [name for name in attributes if request.lacks(GROUPED_ATTRIBUTES[name])]
    return f"{OPERATOR_WITH_NORM} of onnxruntime {request.release} has no {lacking[0]}" if lacking else ""


def _norm_refusal(spec: QKNormSpec, sides: tuple[ContribSide, ContribSide], request: LoweringRequest) -> str:
    norm = spec.norm
    if not spec.has_norm:
        return ""
    kinds = _is_operators_kind(norm.q_kind) and _is_operators_kind(norm.k_kind)
    if not kinds or spans_heads(norm.axis) or norm.groups != 1 or not _is_under_the_root(norm.epsilon_mode):
        return f"{OPERATOR_WITH_NORM} has the root mean square of each head of q and k, with epsilon under the root"
    if not (norm.q_epsilon > 0 and norm.k_epsilon > 0):
        return f"{OPERATOR_WITH_NORM} needs a positive epsilon"
    if rounds_before_weight(norm.weight_order):
        return f"{OPERATOR_WITH_NORM} multiplies the gain before it rounds"
    if any(side.given.bias is not None for side in sides):
        return f"{OPERATOR_WITH_NORM} has no bias of the norm"
    given = [request.signature[f"{side.prefix}weight"] for side in sides]
    io, size = precision_of(request.signature).io, sides[0].head_size
    if any(weight is not None and (weight.rank, weight.last_dim, weight.dtype) != (1, size, io) for weight in given):
        return f"{OPERATOR_WITH_NORM} takes one gain for each value of a head, in the tensors' type"
    return ""


def _is_operators_kind(kind: NormKind) -> bool:
    match kind:
        case "rms":
            return True
        case "none" | "layer" | "l2":
            return False
        case _:
            assert_never(kind)


def _is_under_the_root(mode: EpsilonMode) -> bool:
    match mode:
        case "inside_sqrt":
            return True
        case "clamp" | "outside_sqrt":
            return False
        case _:
            assert_never(mode)


def _rotary_refusal(spec: QKNormSpec, side: ContribSide, request: LoweringRequest) -> str:
    rotary, inputs, size = spec.rotary, request.inputs, side.head_size
    if not rotates(rotary.order):
        return ""
    if rotates_before_norm(rotary.order):
        return f"{OPERATOR_WITH_NORM} rotates behind the norm"
    cos, sin, precision = inputs["cos"], inputs["sin"], precision_of(request.signature)
    reason = rotary_refusal(rotary, cos, sin, head_size=size, compute=precision.compute)
    if reason:
        return reason
    if not (shared_by_rows(cos) and shared_by_rows(sin)):
        return f"{OPERATOR_WITH_NORM} takes one rotary table for all rows"
    if "cache_length" in inputs:
        return f"{OPERATOR_WITH_NORM} finds the row of a rotary table by the position, and here each row has its own"
    if cos.dtype != precision.io or sin.dtype != precision.io:
        return f"{OPERATOR_WITH_NORM} takes rotary tables of the tensors' type"
    if not isinstance(size, int) or size % 16 or rotary.rotated_size(size) % 16:
        return f"{OPERATOR_WITH_NORM} rotates multiples of 16 values"
    return ""


def _norm_in_core(
    body: BodyBuilder, spec: QKNormSpec, sides: tuple[ContribSide, ContribSide], request: LoweringRequest
) -> NormInCore:
    inputs: dict[int, ir.Value] = {}
    attributes: dict[str, int | float] = {}
    if spec.has_norm:
        attributes |= _epsilons(spec.norm.q_epsilon, spec.norm.k_epsilon)
        for place, side in zip((Q_WEIGHT, K_WEIGHT), sides, strict=True):
            inputs[place] = side.given.weight or _ones(body, side, request)
    if rotates(spec.rotary.order):
        attributes |= {"do_rotary": 1, "rotary_interleaved": int(spec.rotary.interleaved)}
        for place, name in ((COS, "cos"), (SIN, "sin")):
            inputs[place] = _table_from_position_0(body, name, request)
    return NormInCore(inputs=inputs, attributes=attributes)


def _epsilons(of_query: float, of_key: float) -> dict[str, int | float]:
    if of_query == of_key:
        return {"qk_norm_epsilon": of_query}
    return {"q_norm_epsilon": of_query, "k_norm_epsilon": of_key}


def _ones(body: BodyBuilder, side: ContribSide, request: LoweringRequest) -> ir.Value:
    assert isinstance(side.head_size, int), "choose_core asks for a number"
    return body.constant(np.ones(side.head_size, dtype=precision_of(request.signature).io.numpy()), name="ones")


def _table_from_position_0(body: BodyBuilder, name: str, request: LoweringRequest) -> ir.Value:
    """The table of the new tokens behind a row for each cached one: the operator looks its rows up by position."""
    table, past = request.inputs[name], request.inputs.get("past_key")
    assert table.shape is not None, "rotary_refusal asks for the shape"
    rows = one_table(body, table, table.shape.rank(), name=name)
    if past is None:
        return rows
    in_front = body.op("Concat", body.size(past, 2, name="num_past_keys").vector, body.ints(0), name="rows_in_front", axis=0)
    return body.op("Pad", rows, in_front, None, body.ints(0), name=f"{name}_from_position_0")
