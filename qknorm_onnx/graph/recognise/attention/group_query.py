"""GroupQueryAttention of onnxruntime (domain com.microsoft), as onnxruntime-genai's builder writes it.

The operator is told how many keys each row of the batch has (`seqlens_k` + 1) and how many the longest one has. Its new
keys belong behind the row's other keys, and it rotates by the same count. Whether the past is a tensor that grows or a
buffer of fixed size is decided by sizes at run time: present is as long as the longer of past and `total_sequence_length`.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from qknorm_onnx.graph.match.attention_core import Core
from qknorm_onnx.graph.match.fragments import Factor, Fragment, Norm, Rotary, RowLengths, Table
from qknorm_onnx.graph.match.located import Located, Parameter, Unreadable
from qknorm_onnx.graph.walk.constants import MICROSOFT_DOMAIN, attribute_float, attribute_int, input_of
from qknorm_onnx.graph.walk.layout import dims_of, same_size

NORM_INPUTS: Final = (14, 15)
_UNREAD_INPUTS: Final = {
    9: ("position ids of its own", "leave the position ids out where they count upwards from the row's past length"),
    10: ("an attention bias of its own", "write the bias as a mask of MultiHeadAttention or of plain operators"),
    12: ("a quantised cache", "build the file with a cache of the model's own type"),
    13: ("a quantised cache", "build the file with a cache of the model's own type"),
    16: ("chunks that are padded on the right (query_seqlens)", "build the file without query_seqlens"),
}


def read_group_query_attention(node: ir.Node) -> Core | Unreadable | None:
    """GroupQueryAttention on operands (B, S, H*D), with norms and rotary embedding inside or in front."""
    if not is_group_query_attention(node):
        return None
    heads = [attribute_int(node, name, 0) for name in ("num_heads", "kv_num_heads", "kv_num_heads")]
    if input_of(node, 1) is None or input_of(node, 2) is None:
        return Unreadable(
            "its GroupQueryAttention has queries, keys and values packed in one input",
            node,
            "split the packed tensor in front of the operator, and give it three inputs",
        )
    operands = [_operand(input_of(node, index), count) for index, count in enumerate(heads)]
    if any(operand is None for operand in operands):
        reason = "the sizes of the operands of its GroupQueryAttention are unknown"
        return Unreadable(reason, node, "run shape inference, so that the file says the sizes of its operands")
    query, key, value = (operand for operand in operands if operand is not None)
    head_size = query.static("D")
    last, total = input_of(node, 5), input_of(node, 6)
    if last is None or total is None or head_size is None:
        return Unreadable("its GroupQueryAttention lacks the lengths of its rows", node, "give it seqlens_k and its total length")
    past_key, past_value = input_of(node, 3), input_of(node, 4)
    sink = input_of(node, 11)
    lengths = RowLengths(last, total, is_buffer=_same_length(past_key, node))
    return Core(
        node=node,
        query=query,
        key=key,
        value=value,
        output=Located(node.outputs[0], ("B", "S", "HD"), query.sizes),
        scale=attribute_float(node, "scale", 0.0) or head_size**-0.5,
        softcap=attribute_float(node, "softcap", 0.0),
        is_causal=bool(attribute_int(node, "causal", 1)),
        left_window_size=max(attribute_int(node, "local_window_size", -1) - 1, -1),
        sink=Parameter(sink, ("H",)) if sink is not None else None,
        query_steps=_own_steps(node, lengths, norm_input=NORM_INPUTS[0], head_size=head_size),
        key_steps=_own_steps(node, lengths, norm_input=NORM_INPUTS[1], head_size=head_size),
        past=(past_key, past_value) if past_key is not None and past_value is not None else None,
        presents=(node.outputs[1], node.outputs[2]) if len(node.outputs) > 2 else None,
        lengths=lengths,
        refusal=_unread(node),
    )


def is_group_query_attention(node: ir.Node) -> bool:
    """Whether `node` is com.microsoft's GroupQueryAttention."""
    return (node.domain, node.op_type) == (MICROSOFT_DOMAIN, "GroupQueryAttention")


def normalises_inside(node: ir.Node) -> bool:
    """Whether `node` is a GroupQueryAttention with weights for norms of its own."""
    return is_group_query_attention(node) and any(input_of(node, index) is not None for index in NORM_INPUTS)


def _operand(value: ir.Value | None, heads: int) -> Located | None:
    dims = dims_of(value) if value is not None else None
    if value is None or dims is None or not heads or len(dims) != 3 or not isinstance(dims[2], int) or dims[2] % heads:
        return None
    return Located(value, ("B", "S", "HD"), {"B": dims[0], "S": dims[1], "H": heads, "D": dims[2] // heads})


def _unread(node: ir.Node) -> Unreadable | None:
    for index, (what, hint) in _UNREAD_INPUTS.items():
        if input_of(node, index) is not None:
            return Unreadable(f"its GroupQueryAttention has {what}", node, hint)
    if attribute_int(node, "sliding_window_cache", 0):
        reason = "its GroupQueryAttention drops old keys from a cache as long as its window"
        return Unreadable(reason, node, "build the file with a cache for the whole sequence")
    if attribute_int(node, "smooth_softmax", 0) == 1 and input_of(node, 11) is None:
        return Unreadable("its GroupQueryAttention smooths the softmax", node, "give it a head_sink of zeros, which is the same")
    if len(node.outputs) > 3 and node.outputs[3].name:
        return Unreadable("its GroupQueryAttention also returns its logits", node, "build the file without the output output_qk")
    for name in ("cos_cache", "sin_cache"):
        table = input_of(node, 7 if name == "cos_cache" else 8)
        dims = dims_of(table) if table is not None else None
        if attribute_int(node, "do_rotary", 0) and (dims is None or len(dims) != 2 or not isinstance(dims[1], int)):
            return Unreadable(f"the size of its {name} is unknown", node, "run shape inference, or make the table an initializer")
    return None


def _own_steps(node: ir.Node, lengths: RowLengths, *, norm_input: int, head_size: int) -> tuple[Fragment, ...]:
    """What the operator does to q or k itself: first the norm, then the rotary embedding."""
    return (*_own_rotary(node, lengths, head_size), *_own_norm(node, norm_input))


def _own_norm(node: ir.Node, norm_input: int) -> tuple[Fragment, ...]:
    weight = input_of(node, norm_input)
    if weight is None:
        return ()
    norm = Norm(kind="rms", axis="head", epsilon=norm_epsilon(node, norm_input), mode="inside_sqrt", node=node)
    return Factor(Parameter(weight, ("D",))), norm


def norm_epsilon(node: ir.Node, norm_input: int) -> float:
    """The epsilon of the norm whose weight is input `norm_input`."""
    common = attribute_float(node, "qk_norm_epsilon", 1e-6)
    return attribute_float(node, "q_norm_epsilon" if norm_input == NORM_INPUTS[0] else "k_norm_epsilon", common)


def _own_rotary(node: ir.Node, lengths: RowLengths, head_size: int) -> tuple[Fragment, ...]:
    cos, sin = input_of(node, 7), input_of(node, 8)
    if not attribute_int(node, "do_rotary", 0) or cos is None or sin is None:
        return ()
    widths = [dims[-1] for table in (cos, sin) if (dims := dims_of(table)) is not None]
    if len(widths) != 2 or not isinstance(widths[0], int) or widths[0] != widths[1]:
        return ()  # `_unread` refuses it
    tables = [Table(((table, tuple(range(widths[0]))),), ("B", "S", "W"), positions=lengths) for table in (cos, sin)]
    rotary = Rotary(
        cos=tables[0],
        sin=tables[1],
        interleaved=bool(attribute_int(node, "rotary_interleaved", 0)),
        size=0 if 2 * widths[0] == head_size else 2 * widths[0],
        offset=0,
        sections=1,
        node=node,
    )
    return (rotary,)


def _same_length(past: ir.Value | None, node: ir.Node) -> bool:
    """Whether the file says that past and present have one size: a buffer that is written in place."""
    present = node.outputs[1] if len(node.outputs) > 1 else None
    before, after = (dims_of(value) if value is not None else None for value in (past, present))
    return before is not None and after is not None and len(before) == len(after) == 4 and same_size(before[2], after[2])
