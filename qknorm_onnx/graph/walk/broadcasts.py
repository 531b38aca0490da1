"""Back through what only copies a tensor along axes that it lacks."""

from __future__ import annotations

import onnx_ir as ir

from qknorm_onnx.graph.match.located import Located
from qknorm_onnx.graph.walk.constants import producer
from qknorm_onnx.graph.walk.layout import dims_of, same_size, step_back


def before_broadcast(located: Located) -> Located:
    """The tensor from before it was expanded to its size."""
    while True:
        node = producer(located.value, "Expand")
        before = _before_expand(located, node) if node is not None else step_back(located)
        if before is None:
            return located
        located = before


def _before_expand(located: Located, node: ir.Node) -> Located | None:
    source = node.inputs[0]
    before, after = dims_of(source) if source is not None else None, dims_of(located.value)
    if source is None or before is None or after is None or len(before) > len(after):
        return None
    own = located.layout[len(after) - len(before) :]
    sizes = zip(before, after[len(after) - len(before) :], strict=True)
    return located.at(source, tuple(name if same_size(*pair) else "" for name, pair in zip(own, sizes, strict=True)))
