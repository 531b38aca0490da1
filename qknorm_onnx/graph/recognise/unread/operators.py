"""Attention operators of runtimes that no reader knows: each is named in the report, as none of them may be passed over."""

from __future__ import annotations

import re
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
# Read by readers of their own, or named with what they are.
READ: Final = frozenset({"MultiHeadAttention", "GroupQueryAttention", "QKNormAttention"})
# Operators of domains that nobody lists here, by their names: those of vendors and of functions whose bodies are gone.
NAMES: Final = re.compile(r"attention|sdpa|qkv_?to_?context", re.IGNORECASE)
QUANTISED: Final = frozenset({"QAttention", "QOrderedAttention", "QOrderedLongformerAttention"})
HINT: Final = "build the file with MultiHeadAttention or GroupQueryAttention, or with plain operators"
FOREIGN_HINT: Final = "export to ONNX's own operators, with no operators of a vendor and no functions without a body"
QUANTISED_HINT: Final = (
    "this is not QK-Norm attention: it projects inside, and no norm stands between its projections and its product"
)


def read_named_operator(node: ir.Node) -> Unreadable | None:
    """A refusal for every operator of the lists above, or named like one.

    `normalises_inputs` tells whether it is QK-Norm attention at all.
    """
    if not _is_known(node):
        return None
    if node.op_type in QUANTISED:
        return Unreadable(f"its {node.op_type} projects, quantises and attends in one operator", node, QUANTISED_HINT)
    hint = HINT if node.domain in (MICROSOFT_DOMAIN, *ONNX_DOMAINS) else FOREIGN_HINT
    return Unreadable(f"its queries and keys meet in the operator {_name(node)}, which is not read", node, hint)


def normalises_inputs(node: ir.Node) -> bool | None:
    """Whether one of these operators is reported as a miss, and not as plain attention; None for all other nodes."""
    if not _is_known(node):
        return None
    if node.domain == MICROSOFT_DOMAIN and (node.op_type in PROJECTING or node.op_type in QUANTISED):
        return node.op_type in QUANTISED
    normalised = [value is not None and norm_behind(value) is not None for value in node.inputs[:2]]
    if node.domain == MICROSOFT_DOMAIN or node.domain in ONNX_DOMAINS:
        return any(normalised)
    # A function of a whole attention module has the norm of its block in front of its one input.
    return all(normalised) and len(normalised) == 2


def _is_known(node: ir.Node) -> bool:
    if node.domain in ONNX_DOMAINS or node.op_type in READ:
        return node.domain in ONNX_DOMAINS and node.op_type in UNREAD
    if node.domain == MICROSOFT_DOMAIN and (node.op_type in PROJECTING or node.op_type in QUANTISED):
        return True
    return NAMES.search(_name(node)) is not None


def _name(node: ir.Node) -> str:
    """The operator's name; PyTorch's fallback operator ATen has it as an attribute."""
    return node.attributes["operator"].as_string() if node.op_type == "ATen" and "operator" in node.attributes else node.op_type
