"""Queries, keys or one tensor of heads, prepared by ONNX Runtime's own operators."""

from __future__ import annotations

import dataclasses

from qknorm_onnx.graph.canonical.body_builder import BodyBuilder, Dim
from qknorm_onnx.graph.canonical.body_preparation import PreparationInputs
from qknorm_onnx.graph.canonical.function_body import head_size_of, key_inputs, precision_of, query_inputs
from qknorm_onnx.lowering.contrib.attention import operator_scale
from qknorm_onnx.lowering.contrib.preparation import ContribTables, contrib_prepare, contrib_tables, plain_stages
from qknorm_onnx.lowering.emit.head_layout import HeadTensor
from qknorm_onnx.lowering.emit.target import LoweringRequest
from qknorm_onnx.spec.qk_norm_spec import QKNormRotarySpec, QKNormSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContribSide:
    """One tensor of heads with what prepares it; `prefix` is that of its norm's inputs."""

    tag: str
    prefix: str
    spec: QKNormRotarySpec
    given: PreparationInputs
    head_size: Dim


def sides_of(body: BodyBuilder, spec: QKNormSpec, request: LoweringRequest) -> tuple[ContribSide, ContribSide]:
    """Queries and keys of a `QKNormAttention`. The queries' factor is what the operators' `scale` cannot say."""
    inputs, attention = request.inputs, spec.attention
    size = head_size_of(body, request.signature, "query", inputs["query"], attention.q_num_heads)
    factor = attention.scale / operator_scale(attention)
    return (
        ContribSide(
            tag="q",
            prefix="q_norm_",
            spec=spec.query_preparation,
            given=query_inputs(inputs, None, factor=factor),
            head_size=size,
        ),
        ContribSide(tag="k", prefix="k_norm_", spec=spec.key_preparation, given=key_inputs(inputs, None), head_size=size),
    )


def side_of(body: BodyBuilder, spec: QKNormRotarySpec, request: LoweringRequest) -> ContribSide:
    """The one tensor of a `QKNormRotary`."""
    inputs = request.inputs
    size = head_size_of(body, request.signature, "x", inputs["x"], spec.num_heads)
    given = PreparationInputs(x=inputs["x"], weight=inputs.get("weight"), bias=inputs.get("bias"), scale=inputs.get("scale"))
    return ContribSide(tag="x", prefix="", spec=spec, given=given, head_size=size)


def tables_of(body: BodyBuilder, side: ContribSide, request: LoweringRequest) -> ContribTables | None:
    """The rotary tables, which all sides of a node share; None where nothing is rotated."""
    rotary, x = side.spec.rotary, side.given.x
    return contrib_tables(body, rotary, x, request.inputs, request.signature, head_size=side.head_size)


def prepare_side(body: BodyBuilder, side: ContribSide, tables: ContribTables | None, request: LoweringRequest) -> HeadTensor:
    """The prepared tensor in the compute type."""
    x = raw_side(body, side)
    x = x.replaced(flat=body.cast(side.given.x, precision_of(request.signature).compute))
    return contrib_prepare(side.spec, x, side.given, side.prefix, tables, request.signature)


def raw_side(body: BodyBuilder, side: ContribSide) -> HeadTensor:
    """The tensor as it comes."""
    return HeadTensor(body, side.spec.num_heads, side.head_size, side.tag, flat=side.given.x)


def plain_stages_of(sides: tuple[ContribSide, ...], tables: ContribTables | None) -> list[str]:
    """Why stages of the sides are made of plain operators."""
    return plain_stages([side.spec for side in sides], tables, sides[0].head_size)


def served_by(operators: str, *, plain: list[str]) -> str:
    """What an outcome says: the operators that serve a node, and which stages are plain ones, with the reasons."""
    partly = f"partly plain operators: {'; '.join(plain)}" if plain else ""
    return "; ".join(filter(None, [operators, partly]))
