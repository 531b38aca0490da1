"""Attention whose chain ended without a norm: plain, or with a norm further back that cannot be reached."""

from __future__ import annotations

import onnx_ir as ir

from qknorm_onnx.graph.match.located import Unreadable
from qknorm_onnx.graph.recognise.attention.products import SHAPES_HINT
from qknorm_onnx.graph.walk.axis_origins import is_weight
from qknorm_onnx.graph.walk.constants import input_of
from qknorm_onnx.graph.walk.layout import LAYOUT_READERS, dims_of, is_sized
from qknorm_onnx.graph.walk.limits import NORM_BEHIND_NODES

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
        "MatMulIntegerToFloat",
        "QLinearMatMul",
        "QGemm",
        "FusedMatMul",
        "FusedGemm",
        "Gather",
        "GatherND",
        "GatherBlockQuantized",
        "Attention",
    ]
)
STATIC_CACHE = (
    "its new keys are written into a buffer by index (a static cache), which is not read as a cache",
    "export with a cache that grows (transformers' DynamicCache)",
)
WRITTEN = (
    "its queries or keys are written into a tensor by index",
    "join the parts with torch.cat or torch.stack, or write at places that are constants of the graph",
)
ROUNDED = (
    "its queries or keys are rounded to a narrower type and back between norm and attention, which no node does",
    "leave the rounding out, or export the model in that type",
)
# Why, and what would make it match, by the operator.
REASONS = {
    "BatchNormalization": (
        "its queries or keys pass a BatchNormalization, which at inference is a fixed factor and not a norm",
        "this is not QK-Norm attention: fold the factor into the projection",
    ),
    "Tanh": (
        "its queries or keys pass a Tanh, which bounds values but does not normalise them",
        "this is not QK-Norm attention: nothing to do",
    ),
    "Clip": (
        "its queries or keys are clipped between norm and attention",
        "export without the clipping (clip_qkv=None), where the model was not trained with it",
    ),
    "SkipSimplifiedLayerNormalization": (
        "its queries or keys are normalised together with the sum in front of the norm",
        "optimise without the fusion of skip connections into norms (enable_skip_layer_norm=False)",
    ),
    "Tile": (
        "a Tile repeats its queries or keys behind the norm: query head h then reads key head h modulo their number",
        "repeat each key head next to itself (repeat_interleave), as query head h reads key head h // (q heads / key heads)",
    ),
}
OTHER_HINT = "move it in front of the norm or behind the attention; where it is a norm itself, write it as one operator"
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
        "ReduceMax",
        "ReduceMean",
        "ReduceSumSquare",
        "Tanh",
    }
)
SUMS = ("Add", "Sub")
MATRIX = "its rotary embedding is a product with a constant matrix that does more than turn pairs of values"
MATRIX_HINT = (
    "write it as x * cos + cat(-b, a) * sin with the halves a and b of x, or with a matrix that has one 1 or -1 for each value"
)


def norm_behind(value: ir.Value) -> Unreadable | None:
    """The first norm between `value` and its projections, as a refusal at the operator where the walk stopped; None if plain."""
    stopped = value.producer()
    waiting, seen = [value], set[ir.Value]()
    while waiting and len(seen) < NORM_BEHIND_NODES:
        item = waiting.pop(0)
        node = item.producer()
        if item in seen or node is None or (node.op_type in PROJECTIONS and not _picks(node) and not turns_pairs(node)):
            continue
        seen.add(item)
        if node.op_type in NORM_LIKE:
            return _refusal(stopped, node, sized=all(map(is_sized, seen)))
        waiting += [operand for operand in node.inputs if operand is not None]
    return None


def _picks(node: ir.Node) -> bool:
    """Whether a Gather picks one place of what is computed (`x[..., 0]`): no embedding, and no new order of heads either.

    Heads in a new order are the start of the chain: what lies behind them stays outside of the node.
    """
    data, places = input_of(node, 0), input_of(node, 1)
    if node.op_type != "Gather" or data is None or places is None:
        return False
    return data.producer() is not None and dims_of(places) == ()


def turns_pairs(node: ir.Node) -> bool:
    """Whether a MatMul multiplies pairs with 2 x 2 matrices of a table, as rotary embeddings do: no projection."""
    if node.op_type != "MatMul" or any(map(is_weight, node.inputs)):
        return False
    return any(value is not None and (dims_of(value) or ())[-2:] == (2, 2) for value in node.inputs)


def _refusal(stopped: ir.Node | None, norm: ir.Node, *, sized: bool) -> Unreadable:
    """`sized`: all shapes between both are known."""
    place = stopped if stopped is not None else norm
    known = _written(place) or _rounded(place) or REASONS.get(place.op_type) or REASONS.get(norm.op_type)
    if known is not None:
        reason, hint = known
        return Unreadable(reason, place, hint)
    if place.op_type in LAYOUT_READERS and not sized:
        return Unreadable(f"shapes between its {norm.op_type} and {place.op_type} are unknown", place, SHAPES_HINT)
    if place.op_type in SUMS and _mixes_channels(place):
        return Unreadable(MATRIX, place, MATRIX_HINT)
    reason = f"{place.op_type} stands between its {norm.op_type} and the attention, which no known form of QK-Norm has"
    return Unreadable(reason, place, OTHER_HINT)


def _written(place: ir.Node) -> tuple[str, str] | None:
    """What a write by index is: into a buffer that the caller gives, or into a tensor of this call."""
    if place.op_type not in ("ScatterND", "ScatterElements") or place.inputs[0] is None:
        return None
    buffer = place.inputs[0]
    while (node := buffer.producer()) is not None and node.op_type in LAYOUT_READERS and node.inputs[0] is not None:
        buffer = node.inputs[0]
    return STATIC_CACHE if buffer.is_graph_input() else WRITTEN


def _rounded(place: ir.Node) -> tuple[str, str] | None:
    """Whether what `place` makes goes through a narrower type: Kandinsky turns queries and keys to bfloat16 in every model."""
    (made, *_) = place.outputs
    for narrowed in (use.node for use in made.uses() if use.node.op_type == "Cast"):
        to = narrowed.outputs[0].dtype
        if made.dtype is None or to is None or not to.is_floating_point() or to.itemsize >= made.dtype.itemsize:
            continue
        if any(use.node.op_type == "Cast" and use.node.outputs[0].dtype == made.dtype for use in narrowed.outputs[0].uses()):
            return ROUNDED
    return None


def _mixes_channels(total: ir.Node) -> bool:
    """Whether a sum of factors has a product with a constant square matrix in it, as wide as the sum itself."""
    width = dims_of(total.outputs[0])
    waiting = [(value, 4) for value in total.inputs]
    while waiting and width:
        value, depth = waiting.pop()
        node = value.producer() if value is not None else None
        if node is None or depth == 0:
            continue
        if node.op_type == "MatMul" and is_weight(node.inputs[1]) and node.inputs[1] is not None:
            if dims_of(node.inputs[1]) == (width[-1], width[-1]):
                return True
        elif node.op_type in ("Mul", "Cast", "Identity", *SUMS):
            waiting += [(operand, depth - 1) for operand in node.inputs]
    return False
