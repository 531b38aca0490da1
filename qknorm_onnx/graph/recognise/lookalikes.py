"""Attention whose chain ended without a norm: plain, or with a norm further back that cannot be reached."""

from __future__ import annotations

import onnx_ir as ir

from qknorm_onnx.graph.match import Declined

# Everything before a projection is the model's own business (block norms, embeddings).
PROJECTIONS = frozenset(
    [
        "MatMul",
        "Gemm",
        "Conv",
        "Einsum",
        "MatMulInteger",
        "MatMulNBits",
        "DynamicQuantizeMatMul",
        "Gather",
        "GatherND",
        "Attention",
    ]
)
REASONS = {
    "BatchNormalization": "its queries or keys pass a BatchNormalization, which at inference is a fixed factor and not a norm",
    "Tanh": "its queries or keys pass a Tanh, which bounds values but does not normalise them",
    "Clip": "its queries or keys are clipped between norm and attention",
}
NORM_LIKE = frozenset(
    {
        "BatchNormalization",
        "InstanceNormalization",
        "GroupNormalization",
        "LayerNormalization",
        "RMSNormalization",
        "SimplifiedLayerNormalization",
        "SkipSimplifiedLayerNormalization",
        "LpNormalization",
        "ReduceL2",
        "ReduceMean",
        "ReduceSumSquare",
        "Tanh",
    }
)
MAX_NODES = 60


def norm_behind(value: ir.Value) -> Declined | None:
    """The first norm between `value` and its projections, as a refusal at the operator where the walk stopped; None if plain."""
    stopped = value.producer()
    waiting, seen = [value], set[ir.Value]()
    while waiting and len(seen) < MAX_NODES:
        item = waiting.pop(0)
        node = item.producer()
        if item in seen or node is None or node.op_type in PROJECTIONS:
            continue
        seen.add(item)
        if node.op_type in NORM_LIKE:
            return _refusal(stopped, node)
        waiting += [operand for operand in node.inputs if operand is not None]
    return None


def _refusal(stopped: ir.Node | None, norm: ir.Node) -> Declined:
    place = stopped if stopped is not None else norm
    reason = REASONS.get(place.op_type) or REASONS.get(norm.op_type)
    if reason is None:
        reason = f"{place.op_type} stands between its {norm.op_type} and the attention, which no known form of QK-Norm has"
    return Declined(reason, place)
