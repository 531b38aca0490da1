"""Attention operators of runtimes that no reader knows: each is named in the report, as none of them may be passed over."""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from qknorm_onnx.graph.match.located import Unreadable
from qknorm_onnx.graph.recognise.unread.lookalikes import norm_behind
from qknorm_onnx.graph.walk.constants import MICROSOFT_DOMAIN, ONNX_DOMAINS

# They take queries and keys, packed or apart, as their first inputs.
UNREAD: Final = frozenset(
    {
        "PackedMultiHeadAttention",
        "DecoderMaskedMultiHeadAttention",
        "SparseAttention",
        "PagedAttention",
        "LinearAttention",
        "FlexAttention",
    }
)
# They project inside, so that nothing can stand between a projection and the product of queries and keys.
PROJECTING: Final = frozenset(
    {"Attention", "PackedAttention", "DecoderAttention", "DecoderMaskedSelfAttention", "LongformerAttention"}
)
QUANTISED: Final = frozenset({"QAttention", "QOrderedAttention", "QOrderedLongformerAttention"})
HINT: Final = "build the file with MultiHeadAttention or GroupQueryAttention, or with plain operators"
QUANTISED_HINT: Final = (
    "this is not QK-Norm attention: it projects inside, and no norm stands between its projections and its product"
)


def read_named_operator(node: ir.Node) -> Unreadable | None:
    """A refusal for every operator of the lists above; `normalises_inputs` tells whether it is QK-Norm attention at all."""
    if not _is_known(node):
        return None
    if node.op_type in QUANTISED:
        return Unreadable(f"its {node.op_type} projects, quantises and attends in one operator", node, QUANTISED_HINT)
    return Unreadable(f"its queries and keys meet in the operator {node.op_type}, which is not read", node, HINT)


def normalises_inputs(node: ir.Node) -> bool | None:
    """Whether one of these operators is reported as a miss, and not as plain attention; None for all other nodes."""
    if not _is_known(node):
        return None
    if node.op_type in UNREAD:
        return any(value is not None and norm_behind(value) is not None for value in node.inputs[:2])
    return node.op_type in QUANTISED


def _is_known(node: ir.Node) -> bool:
    if node.domain == MICROSOFT_DOMAIN:
        return node.op_type in UNREAD or node.op_type in PROJECTING or node.op_type in QUANTISED
    return node.domain in ONNX_DOMAINS and node.op_type in UNREAD
