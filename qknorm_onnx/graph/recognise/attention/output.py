"""Forward from the core: its output through the transpose and the merge of heads."""

from __future__ import annotations

import onnx_ir as ir

from qknorm_onnx.graph.match.located import PROJECTED, Located
from qknorm_onnx.graph.walk.head_groups import joined_heads
from qknorm_onnx.graph.walk.layout import dims_of, letters_of, regroup
from qknorm_onnx.graph.walk.limits import OUTPUT_STEPS


def output_of(output: Located) -> Located:
    """The attention's output as (B, S, Hq*Dv), if the graph merges the heads anywhere, else the core's own output.

    Where the core's output has several things in one axis, it is the first value behind it that has not.
    """
    here = output
    for _ in range(OUTPUT_STEPS):
        if here.layout == PROJECTED:
            return here
        uses = [usage for usage in here.value.uses() if usage.node.op_type != "Shape"]
        if here.value.is_graph_output() or len(uses) != 1:
            break
        after = _step_forward(here, uses[0].node)
        if after is None:
            break
        here = joined_heads(after)
        if has_merged_axes(output):
            output = here
    return here if here.layout == PROJECTED else output


def has_merged_axes(located: Located) -> bool:
    """Whether an axis holds more than one thing, as batch and heads; heads and values do where the output is complete."""
    return any(len(letters) > 1 for letters in located.layout if letters != "HD")


def _step_forward(located: Located, node: ir.Node) -> Located | None:
    if node.domain != "" or node.inputs[0] is not located.value:
        return None
    result = node.outputs[0]
    if node.op_type == "Identity":
        return located.at(result, located.layout)
    if node.op_type == "Transpose" and "perm" in node.attributes:
        return located.at(result, tuple(located.layout[axis] for axis in node.attributes["perm"].as_ints()))
    dims = dims_of(result)
    if node.op_type == "Reshape" and dims is not None:
        layout = regroup(letters_of(located.layout), dims, dict(located.sizes))
        return located.at(result, layout) if layout is not None else None
    return None
