"""Joint attention: tensors of several streams, each with its own projection and norm, concatenated along the positions."""

from __future__ import annotations

from collections.abc import Callable

from qknorm_onnx.graph.match.fragments import Chain, Streams
from qknorm_onnx.graph.match.located import Located
from qknorm_onnx.graph.walk.constants import attribute_int, producer
from qknorm_onnx.graph.walk.layout import dims_of


def read_streams(located: Located, read_chain: Callable[[Located], Chain]) -> tuple[Streams, Located] | None:
    """A Concat along the positions of which at least one operand is normalised on its own."""
    node = producer(located.value, "Concat")
    if node is None or len(node.inputs) < 2:
        return None
    axis = attribute_int(node, "axis", 0) % len(located.layout)
    if located.layout[axis] != "S":
        return None
    chains = []
    for operand in node.inputs:
        dims = dims_of(operand) if operand is not None else None
        if operand is None or dims is None:
            return None
        chains.append(read_chain(Located(operand, located.layout, {**located.sizes, "S": dims[axis]})))
    if not any(chain.normalised for chain in chains):
        return None
    return Streams(tuple(chains), node), located
