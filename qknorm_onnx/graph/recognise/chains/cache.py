"""Key / value caches: `Concat(past, new)` along the positions."""

from __future__ import annotations

import onnx_ir as ir

from qknorm_onnx.graph.match.fragments import CacheAppend
from qknorm_onnx.graph.match.located import HEADS_SECOND, Located
from qknorm_onnx.graph.walk.constants import attribute_int, producer
from qknorm_onnx.graph.walk.layout import LAYOUT_READERS, dims_of


def read_cache_append(located: Located) -> tuple[CacheAppend, Located] | None:
    """The newest keys or values behind those of earlier calls; past and present have their heads second."""
    node = producer(located.value, "Concat")
    if node is None or len(node.inputs) != 2 or located.layout != HEADS_SECOND:
        return None
    past, new = node.inputs
    if past is None or new is None or attribute_int(node, "axis", 0) % 4 != 2:
        return None
    past_dims, new_dims = dims_of(past), dims_of(new)
    if past_dims is None or new_dims is None or not _is_fed(past):
        return None
    past_heads = Located(past, HEADS_SECOND, {**located.sizes, "S": past_dims[2]})
    append = CacheAppend(past_heads, Located(node.outputs[0], HEADS_SECOND, located.sizes), node)
    return append, Located(new, HEADS_SECOND, {**located.sizes, "S": new_dims[2]})


def _is_fed(value: ir.Value) -> bool:
    """Whether the caller gives this tensor, possibly in another layout: keys of other tokens of this call are no cache."""
    while (node := value.producer()) is not None and node.op_type in LAYOUT_READERS and node.inputs[0] is not None:
        value = node.inputs[0]
    return value.is_graph_input()
