"""Attention sinks: one more logit per head, appended as a column before the softmax and cut off behind it."""

from __future__ import annotations

import onnx_ir as ir

from qknorm_onnx.graph.match.located import Located, Parameter
from qknorm_onnx.graph.walk.broadcasts import before_broadcast
from qknorm_onnx.graph.walk.constants import attribute_int, input_of, integers, rank_of
from qknorm_onnx.graph.walk.layout import dims_of


def read_sink_column(node: ir.Node) -> tuple[ir.Value, Parameter] | None:
    """Concat(scores, sinks) along the keys: the scores and the sinks, one per head."""
    if node.op_type != "Concat" or len(node.inputs) != 2:
        return None
    scores, column = node.inputs
    dims = dims_of(column) if column is not None else None
    if scores is None or column is None or dims is None or len(dims) != 4 or dims[3] != 1:
        return None
    if attribute_int(node, "axis", 0) % 4 != 3:
        return None
    one_token = dims[2] == 1  # then nothing tells its axis from one that is broadcast
    layout = ("B", "H", "" if one_token else "S", "")
    sinks = before_broadcast(Located(column, layout, dict(zip("BHS", dims, strict=False))))
    if any(letters not in ("", "H") for letters in sinks.layout):
        return None
    return scores, Parameter(sinks.value, sinks.layout)


def cuts_last_column(node: ir.Node) -> bool:
    """Whether a Slice cuts exactly the last column off."""
    source = input_of(node, 0)
    rank = rank_of(source) if source is not None else None
    starts, ends, axes = (integers(input_of(node, index)) for index in (1, 2, 3))
    steps = integers(input_of(node, 4))
    if node.op_type != "Slice" or rank is None or axes is None or steps not in (None, (1,)):
        return False
    return starts == (0,) and ends == (-1,) and axes[0] % rank == rank - 1 and len(axes) == 1
