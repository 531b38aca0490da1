"""The mark of an attention that was lowered: what it was, kept in the file, so that it is not taken for a foreign spelling.

The one node that holds the attention's softmax carries it, as node metadata (ONNX: `NodeProto.metadata_props`). A mark says
what this program once wrote, not what somebody made of the nodes since: whoever reports by it must say so.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

import onnx_ir as ir

from qknorm_onnx.spec.attributes import from_attributes, to_attributes
from qknorm_onnx.spec.qk_norm_spec import QKNormSpec, SpecError

MARK_KEY: Final = "ai.qknorm.lowered"
CORE_OPERATORS: Final = frozenset({"Softmax", "Attention", "MultiHeadAttention", "GroupQueryAttention"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoweredMark:
    """One attention that was a canonical node.

    asked, provider: what it was lowered for; target: what serves it, which is a fallback where `asked` could not.
    normalised: whether its queries or keys are, in the attention itself or in a `QKNormRotary` in front of it.
    """

    name: str
    spec: QKNormSpec
    asked: str
    provider: str
    target: str
    normalised: bool

    @property
    def note(self) -> str:
        """What a report says of it: the nodes were not looked at again."""
        note = f"lowered earlier to {self.target}, says its mark in the file; left as it is, not proven again"
        if self.normalised and not self.spec.has_norm:
            note += "; its queries and keys are normalised in front of what the mark stands for"
        return note


def write_mark(nodes: Iterable[ir.Node], mark: LoweredMark) -> None:
    """Put `mark` on the node of `nodes` that holds the softmax."""
    for node in nodes:
        if node.op_type in CORE_OPERATORS:
            fields = {field.name: getattr(mark, field.name) for field in dataclasses.fields(mark)}
            node.metadata_props[MARK_KEY] = json.dumps({**fields, "spec": to_attributes(mark.spec)}, sort_keys=True)


def read_mark(node: ir.Node) -> LoweredMark | None:
    """The mark of `node`; None where it has none, or one that no version of this program wrote."""
    if MARK_KEY not in node.metadata_props or node.op_type not in CORE_OPERATORS:
        return None
    try:
        fields = json.loads(node.metadata_props[MARK_KEY])
        return _mark(fields) if isinstance(fields, dict) else None
    except (ValueError, SpecError):
        return None


def _mark(fields: Mapping[str, Any]) -> LoweredMark | None:
    texts = {key: fields.get(key) for key in ("name", "asked", "provider", "target")}
    attributes, normalised = fields.get("spec"), fields.get("normalised")
    if not isinstance(attributes, dict) or not isinstance(normalised, bool):
        return None
    if any(not isinstance(text, str) for text in texts.values()):
        return None
    return LoweredMark(**texts, spec=from_attributes(QKNormSpec, attributes), normalised=normalised)  # type: ignore[arg-type]
