"""Readers of the shape of a tensor that a rewrite takes away: they get the same sizes from tensors that stay."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from qknorm_onnx.graph.match.located import Dim
from qknorm_onnx.graph.rewrite.node_builder import NodeBuilder, replace_value


def redirect_shape_readers(nodes: Iterable[ir.Node], sources: Sequence[ir.Value]) -> list[ir.Node]:
    """Let `Shape` nodes that read outputs of `nodes` read `sources` instead, where those have the same sizes.

    Returns the nodes of which an output was relieved of a reader.
    """
    relieved = []
    for node in nodes:
        readers = [usage.node for output in node.outputs for usage in output.uses() if usage.node.op_type == "Shape"]
        if [reader for reader in readers if _redirect(reader, sources)]:
            relieved.append(node)
    return relieved


def _redirect(shape: ir.Node, sources: Sequence[ir.Value]) -> bool:
    value = shape.inputs[0]
    if value is None or value.shape is None or shape.domain != "":
        return False
    dims = list(value.shape)
    start = shape.attributes["start"].as_int() if "start" in shape.attributes else 0
    end = shape.attributes["end"].as_int() if "end" in shape.attributes else len(dims)
    known_before = _known_before(shape, sources)
    places = [_place(dim, known_before) for dim in dims[start:end]]
    if not places or any(place is None for place in places):
        return False
    builder = NodeBuilder(f"{shape.outputs[0].name}/redirected")
    parts = [_part(builder, place) for place in places if place is not None]
    total = parts[0]
    if len(parts) > 1:
        total = builder.apply("Concat", parts, dims=[len(parts)], attributes=[ir.AttrInt64("axis", 0)])
    builder.insert_before(shape)
    replace_value(shape.outputs[0], total)
    if shape.graph is not None:
        shape.graph.remove(shape, safe=True)
    return True


def _known_before(shape: ir.Node, sources: Sequence[ir.Value]) -> list[ir.Value]:
    """Those of `sources` that are computed before `shape`, and the inputs of the graph."""
    graph = shape.graph
    assert graph is not None, "readers are found through the graph"
    before = set(itertools.takewhile(lambda node: node is not shape, graph))
    known = [source for source in sources if source.producer() is None or source.producer() in before]
    return [*known, *(value for value in graph.inputs if value not in known)]


def _place(dim: Dim, sources: Sequence[ir.Value]) -> int | tuple[ir.Value, int] | None:
    """A size as a number, or as an axis of a tensor that stays."""
    if isinstance(dim, int):
        return dim
    if dim.value is None:
        return None
    for source in sources:
        for axis, size in enumerate(source.shape or ()):
            if not isinstance(size, int) and size == dim:
                return source, axis
    return None


def _part(builder: NodeBuilder, place: int | tuple[ir.Value, int]) -> ir.Value:
    if isinstance(place, int):
        return builder.integers([place], "size")
    source, axis = place
    bounds = [ir.AttrInt64("start", axis), ir.AttrInt64("end", axis + 1)]
    return builder.apply("Shape", [source], dims=[1], attributes=bounds, dtype=ir.DataType.INT64)
