"""Reads how much of its caches a decoder has filled off its attention mask, so that they may be larger than that.

A graph whose pasts grow says how many entries are valid by their size. Here `cache_length` says it, the columns of the mask less
the new tokens, for every row: buffers with room then stay in place, and a past of just that size grows as before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import onnx_ir as ir

from qknorm_onnx.graph.canonical.qk_norm_node import is_attention_node, read_attention_node
from qknorm_onnx.spec.signature import ATTENTION_INPUT_NAMES

MASK, TOKENS = "attention_mask", "input_ids"
PRESENT_LENGTH: Final = "present_sequence"
_LENGTH_AXIS: Final = 2
_PLACE: Final = ATTENTION_INPUT_NAMES.index("cache_length")


def read_cache_lengths(graph: ir.Graph) -> str:
    """Gives every attention of `graph` that has a growing past its `cache_length`. Returns why not, empty where it did.

    For inputs that the graph took before (a mask with a column for each entry of the past and each new token) nothing changes:
    an attention whose valid entries are all there are means the same with and without `cache_length`.
    """
    inputs = {value.name: value for value in graph.inputs}
    mask, tokens = inputs.get(MASK), inputs.get(TOKENS)
    if not _is_matrix(mask) or not _is_matrix(tokens) or mask is None or tokens is None:
        return f"it has no inputs {TOKENS} (batch, new tokens) and {MASK} (batch, all tokens)"
    nodes = [node for node in graph if is_attention_node(node) and _has_growing_past(node)]
    if not nodes:
        return "no attention has a cache that grows"
    sizes: list[ir.Value] = []
    for value, is_past in _caches(nodes):
        reason = _sizes_of(value, inputs, is_past=is_past, into=sizes)
        if reason:
            return reason
    _rewrite(graph, nodes, sizes, mask=mask, tokens=tokens)
    return ""


def stays_in_place(graph: ir.Graph) -> bool:
    """Whether every cache that `graph` takes may be larger than what it holds: then one buffer can be past and present."""
    nodes = [node for node in graph if is_attention_node(node)]
    cached = [inputs for _, inputs in map(read_attention_node, nodes) if inputs.past_key is not None]
    return bool(cached) and all(inputs.cache_length is not None for inputs in cached)


def _is_matrix(value: ir.Value | None) -> bool:
    return value is not None and value.shape is not None and value.shape.rank() == 2


def _has_growing_past(node: ir.Node) -> bool:
    _, inputs = read_attention_node(node)
    return inputs.past_key is not None and inputs.cache_length is None


def _caches(nodes: Iterable[ir.Node]) -> Iterable[tuple[ir.Value, bool]]:
    """The caches before and after each node, and which are which."""
    for node in nodes:
        _, inputs = read_attention_node(node)
        for past in (inputs.past_key, inputs.past_value):
            assert past is not None, "both are given together"
            yield past, True
        yield from ((present, False) for present in node.outputs[1:])


def _sizes_of(cache: ir.Value, inputs: dict[str | None, ir.Value], *, is_past: bool, into: list[ir.Value]) -> str:
    """Collects what reads the length of `cache`; why that is not all that depends on it, empty where it is."""
    if is_past and inputs.get(cache.name) is not cache:
        return f"the cache {cache.name} is no input of the model"
    for use in cache.uses():
        node = use.node
        if is_past and is_attention_node(node) and _has_growing_past(node) and ATTENTION_INPUT_NAMES[use.idx].startswith("past_"):
            continue
        if node.op_type != "Shape" or node.domain:
            return f"the cache {cache.name} is read by {node.op_type} {node.name}, not by an attention that is one node"
        start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", 4)
        if end - start != 1 or not 0 <= start < 4:
            return f"the shape of the cache {cache.name} is read as a whole by {node.name}"
        if start == _LENGTH_AXIS:
            if not is_past:
                return f"the length of the cache {cache.name} is read by {node.name}"
            into.append(node.outputs[0])
    return ""


def _rewrite(graph: ir.Graph, nodes: list[ir.Node], sizes: list[ir.Value], *, mask: ir.Value, tokens: ir.Value) -> None:
    batch = tokens.shape[0] if tokens.shape is not None else ir.SymbolicDim(None)
    columns = _size(mask, 1, "columns")
    new = _size(tokens, 1, "new_tokens")
    rows = _size(tokens, 0, "rows")
    cached = _node("Sub", [columns.outputs[0], new.outputs[0]], "cached_tokens", [1])
    lengths = _node("Expand", [cached.outputs[0], rows.outputs[0]], "cache_length", [batch])
    made = [columns, new, rows, cached, lengths]
    graph.insert_before(graph[0], made)
    for size in sizes:
        if size.is_graph_output():
            continue
        ir.convenience.replace_all_uses_with(size, cached.outputs[0])
        graph.remove(size.producer(), safe=True)  # type: ignore[arg-type]
    for node in nodes:
        if len(node.inputs) <= _PLACE:
            node.resize_inputs(_PLACE + 1)
        node.replace_input_with(_PLACE, lengths.outputs[0])
        for present in node.outputs[1:]:
            if present.shape is not None:
                dims = list(present.shape)
                present.shape = ir.Shape([*dims[:_LENGTH_AXIS], PRESENT_LENGTH, *dims[_LENGTH_AXIS + 1 :]])


def _size(value: ir.Value, axis: int, name: str) -> ir.Node:
    bounds = [ir.AttrInt64("start", axis), ir.AttrInt64("end", axis + 1)]
    return _node("Shape", [value], name, [1], bounds)


def _node(
    op_type: str, inputs: list[ir.Value], name: str, dims: list[int | ir.SymbolicDim], attributes: list[ir.Attr] | None = None
) -> ir.Node:
    """A node with one int64 output; names begin with `caches/`, which no export and no fragment of ours does."""
    output = ir.Value(name=f"caches/{name}", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(dims))
    return ir.Node("", op_type, inputs, attributes or (), outputs=[output], name=f"caches/{name}")
