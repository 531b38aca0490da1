"""Puts the new nodes of a rewrite in place of the old ones, and removes what nothing reads any more."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import onnx_ir as ir

from qknorm_onnx.graph.rewrite.node_builder import replace_value
from qknorm_onnx.graph.rewrite.replacement import Replacement
from qknorm_onnx.graph.rewrite.shape_readers import redirect_shape_readers


def insert(replacement: Replacement, graph: ir.Graph) -> tuple[str, ...]:
    """Put the new nodes in place of the old ones; returns the names of those that nothing reads any more."""
    inside = _inside(replacement)  # of a body, also nodes of the graphs around it
    before = {node: node.name or node.outputs[0].name or node.op_type for node in (*graph, *inside)}
    anchor = replacement.outputs[0][0].producer()
    assert anchor is not None, "an attention's output is made by a node"
    replacement.builder.insert_before(anchor)
    for old, new in replacement.outputs:
        early = _uses_before(old, anchor)
        replace_value(old, new)
        for reader, index in early:
            reader.replace_input_with(index, old)
    removed = _remove_unused([old.producer() for old, _ in replacement.outputs], inside)
    left = [node for node in inside if node.graph is not None]
    removed += _remove_unused(redirect_shape_readers(left, replacement.boundary), inside)
    return tuple(sorted(before[node] for node in removed))


def _uses_before(value: ir.Value, anchor: ir.Node) -> list[tuple[ir.Node, int]]:
    """Where `value` is read in front of `anchor`: a mask may be computed from the same keys or values that are cached."""
    readers = {usage.node for usage in value.uses()}
    if readers <= {anchor} or anchor.graph is None:
        return []
    before = set(itertools.takewhile(lambda node: node is not anchor, anchor.graph))
    return [(usage.node, usage.idx) for usage in value.uses() if usage.node in before]


def _inside(replacement: Replacement) -> list[ir.Node]:
    """The old nodes between the outputs and the boundary."""
    waiting = [old.producer() for old, _ in replacement.outputs]
    stop = {value.producer() for value in replacement.boundary}
    found: dict[ir.Node, None] = {}
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found and node not in stop:
            found[node] = None
            waiting += [value.producer() for value in node.inputs if value is not None]
    return list(found)


def _remove_unused(nodes: Sequence[ir.Node | None], inside: Sequence[ir.Node]) -> list[ir.Node]:
    """Remove those of `nodes` that nothing reads any more, and what only they read, as far as it is `inside`."""
    waiting, allowed = list(nodes), set(inside)
    removed: list[ir.Node] = []
    while waiting:
        node = waiting.pop()
        if node is None or node.graph is None or node not in allowed:
            continue
        if any(value.uses() or value.is_graph_output() for value in node.outputs):
            continue
        inputs = [value for value in node.inputs if value is not None]
        node.graph.remove(node, safe=True)
        removed.append(node)
        waiting += [value.producer() for value in dict.fromkeys(inputs)]
    return removed
