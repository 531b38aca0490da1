"""Attention operators of onnxruntime (domain com.microsoft), as its own tools and onnxscript's fusions leave them."""

from __future__ import annotations

import onnx_ir as ir

from qknorm_onnx.graph.match.attention_core import Bias, Core
from qknorm_onnx.graph.match.located import Located, Unreadable
from qknorm_onnx.graph.walk.constants import MICROSOFT_DOMAIN, attribute_float, attribute_int, input_of
from qknorm_onnx.graph.walk.layout import dims_of


def read_multi_head_attention(node: ir.Node) -> Core | Unreadable | None:
    """MultiHeadAttention on operands (B, S, H*D), keys and values also (B, H, S, D); H is the same for q, k and v."""
    if (node.domain, node.op_type) != (MICROSOFT_DOMAIN, "MultiHeadAttention"):
        return None
    for index, (what, hint) in UNREAD_INPUTS.items():
        if input_of(node, index) is not None:
            return Unreadable(f"its MultiHeadAttention has {what}", node, hint)
    heads = attribute_int(node, "num_heads", 0)
    operands = [_operand(input_of(node, index), heads) for index in range(3)]
    if any(operand is None for operand in operands):
        reason = "the operands of its MultiHeadAttention are packed, or their shapes are unknown"
        return Unreadable(reason, node, "give it queries, keys and values of known sizes as three inputs")
    query, key, value = (operand for operand in operands if operand is not None)
    head_size = query.static("D")
    if head_size is None:
        return Unreadable("the size of its heads is not fixed", node, "export with a fixed size of the heads")
    bias = input_of(node, 5)
    past_key, past_value = input_of(node, 6), input_of(node, 7)
    return Core(
        node=node,
        query=query,
        key=key,
        value=value,
        output=Located(node.outputs[0], ("B", "S", "HD"), {**query.sizes, "D": value.sizes["D"]}),
        scale=attribute_float(node, "scale", 0.0) or head_size**-0.5,
        is_causal=bool(attribute_int(node, "unidirectional", 0)),
        biases=(Bias(bias),) if bias is not None else (),
        past=(past_key, past_value) if past_key is not None and past_value is not None else None,
        presents=(node.outputs[1], node.outputs[2]) if len(node.outputs) > 2 else None,
    )


UNREAD_INPUTS = {
    3: ("a bias of its own", "add the bias in front of it, before the norms"),
    4: ("a key padding mask", "give the mask as its attention_bias"),
    8: ("a past length", "build the file with a cache that grows"),
    9: ("a cache of beams", "build the file without beam search inside"),
}


def _operand(value: ir.Value | None, heads: int) -> Located | None:
    dims = dims_of(value) if value is not None else None
    if value is None or dims is None or not heads:
        return None
    if len(dims) == 3 and isinstance(dims[2], int) and dims[2] % heads == 0:
        return Located(value, ("B", "S", "HD"), {"B": dims[0], "S": dims[1], "H": heads, "D": dims[2] // heads})
    if len(dims) == 4 and dims[1] == heads:
        return Located(value, ("B", "H", "S", "D"), dict(zip("BHSD", dims, strict=True)))
    return None
