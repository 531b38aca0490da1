"""The canonical nodes that stand for a match, with what it takes to feed them and to give their results back."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.canonical.qk_norm_node import AttentionInputs, RotaryInputs, make_attention_node, make_rotary_node
from qknorm_onnx.graph.match.fragments import Table
from qknorm_onnx.graph.match.located import PROJECTED, Dim, Layout, Located
from qknorm_onnx.graph.match.qk_norm_match import Preparation, QKNormMatch
from qknorm_onnx.graph.recognise.attention.output import output_of
from qknorm_onnx.graph.recognise.unread.lookalikes import PROJECTIONS
from qknorm_onnx.graph.rewrite.buffer_length import build_buffer_length
from qknorm_onnx.graph.rewrite.node_builder import NodeBuilder
from qknorm_onnx.graph.rewrite.parameters import (
    bias_parameter,
    combined_bias,
    head_vector,
    query_factor,
    rotary_table,
    shape_of,
    weight_parameter,
)
from qknorm_onnx.graph.rewrite.row_lengths import build_row_cache, pasts_with_room, with_positions
from qknorm_onnx.graph.walk.head_groups import has_split_heads
from qknorm_onnx.spec.qk_norm_spec import QKNormSpec, normalises
from qknorm_onnx.spec.signature import DOMAIN


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replacement:
    """New nodes, and for each value that they replace the new one.

    `boundary` are the values of the graph that old and new nodes both start from.
    """

    name: str
    spec: QKNormSpec
    builder: NodeBuilder
    outputs: tuple[tuple[ir.Value, ir.Value], ...]
    boundary: tuple[ir.Value, ...]


def build_replacement(match: QKNormMatch) -> Replacement:
    """The nodes for `match`. Raises SpecError where shapes contradict the spec."""
    result = output_of(match.core.output)
    builder = NodeBuilder(f"{match.core.output.value.name}/qk_norm")
    query, key = (_joined(builder, side) for side in (match.query, match.key))
    rows = build_row_cache(builder, match.core.lengths, query) if match.core.lengths is not None else None
    match = with_positions(match, rows.positions) if rows is not None else match
    value = heads_merged(builder, match.value) if match.value is not None else None
    if match.prepared_apart:
        query, key = _prepared(builder, match.query, query), _prepared(builder, match.key, key)
    value = key if value is None else value
    inputs = _attention_inputs(builder, match, query, key, value)
    if rows is not None and match.caches is not None:
        inputs = dataclasses.replace(inputs, cache_length=rows.cache_length)
    elif match.caches is not None and match.caches[0].first is not None:
        inputs = dataclasses.replace(inputs, cache_length=build_buffer_length(builder, match.caches[0].first, query))
    node = make_attention_node(match.spec, inputs, name=match.name, num_outputs=3 if match.caches else 1)
    builder.add(node)
    outputs = [(result.value, _as_output(builder, node.outputs[0], result))]
    if match.caches:
        outputs += [(cache.present.value, node.outputs[1 + index]) for index, cache in enumerate(match.caches)]
    return Replacement(
        name=match.name, spec=match.spec, builder=builder, outputs=tuple(outputs), boundary=_boundary(builder, match)
    )


def _joined(builder: NodeBuilder, preparation: Preparation) -> ir.Value:
    """What a preparation is applied to, as (B, S, H*D): its source, or its parts one behind the other."""
    if not preparation.parts:
        return heads_merged(builder, preparation.source)
    parts = [_prepared(builder, part, _joined(builder, part)) for part in preparation.parts]
    sizes = preparation.source.sizes
    dims: list[Dim] = [sizes["B"], sizes["S"], _size(preparation.source, "H") * _size(preparation.source, "D")]
    return builder.apply("Concat", parts, dims=dims, attributes=[ir.AttrInt64("axis", 1)])


def heads_merged(builder: NodeBuilder, located: Located) -> ir.Value:
    """A tensor of heads as (B, S, H*D)."""
    located = _picked(builder, located)
    axes = [axis for axis, letters in enumerate(located.layout) if letters]
    order = sorted(axes, key=lambda axis: "BSHKGD".index(located.layout[axis][0]))
    letters = [located.layout[axis] for axis in order]
    merged = _size(located, "H") * _size(located, "D")
    dims: list[Dim] = [located.sizes["B"], located.sizes["S"], merged]
    if letters == ["B", "S", "HD"] and order == list(range(3)):
        return located.value
    singles = [axis for axis, item in enumerate(located.layout) if not item]
    value = builder.transpose(located.value, [*order, *singles])
    if letters[:2] == ["B", "S"]:
        return builder.reshape(value, [0, 0, merged], dims)
    batch, length = located.static("B"), located.static("S")
    if batch is not None or "B" not in "".join(letters):
        return builder.reshape(value, [batch if batch is not None else 1, -1, merged], dims)
    return builder.reshape(value, [-1, length if length is not None else 1, merged], dims)


def _picked(builder: NodeBuilder, located: Located) -> Located:
    """Without the axes of which only one index belongs to the attention."""
    for axis, letters in reversed(list(enumerate(located.layout))):
        if letters.isdigit():
            index = builder.constant(np.asarray(int(letters), dtype=np.int64), "index")
            dims = [dim for place, dim in enumerate(shape_of(located.value)) if place != axis]
            value = builder.apply("Gather", [located.value, index], dims=dims, attributes=[ir.AttrInt64("axis", axis)])
            located = located.at(value, (*located.layout[:axis], *located.layout[axis + 1 :]))
    return located


def _size(located: Located, letter: str) -> int:
    size = located.static(letter)
    assert size is not None, "recognition requires fixed sizes of heads"
    return size


def _prepared(builder: NodeBuilder, preparation: Preparation, x: ir.Value) -> ir.Value:
    """The output of a `QKNormRotary`, or x itself where there is nothing to do."""
    spec = preparation.spec
    if not normalises(spec.kind) and preparation.rotary is None:
        return x
    tables = _tables(builder, preparation)
    inputs = RotaryInputs(
        x=x,
        weight=weight_parameter(builder, preparation),
        bias=bias_parameter(builder, preparation),
        cos=tables[0],
        sin=tables[1],
    )
    return builder.add(make_rotary_node(spec, inputs, name=builder.name("preparation"))).outputs[0]


def _tables(builder: NodeBuilder, preparation: Preparation) -> tuple[ir.Value | None, ir.Value | None]:
    rotary = preparation.rotary
    if rotary is None:
        return None, None
    dtype = preparation.source.value.dtype
    cos, sin = (
        rotary_table(builder, table, identity=identity, dtype=dtype) for table, identity in ((rotary.cos, 1.0), (rotary.sin, 0.0))
    )
    return cos, sin


def _attention_inputs(
    builder: NodeBuilder, match: QKNormMatch, query: ir.Value, key: ir.Value, value: ir.Value
) -> AttentionInputs:
    apart = match.prepared_apart
    leading = match.query if match.query.rotary is not None else match.key
    tables = (None, None) if apart else _tables(builder, leading)
    past_key, past_value = _pasts(builder, match)
    return AttentionInputs(
        query=query,
        key=key,
        value=value,
        q_norm_weight=None if apart else weight_parameter(builder, match.query),
        k_norm_weight=None if apart else weight_parameter(builder, match.key),
        q_norm_bias=None if apart else bias_parameter(builder, match.query),
        k_norm_bias=None if apart else bias_parameter(builder, match.key),
        q_scale=query_factor(builder, match.query.scale),
        cos=tables[0],
        sin=tables[1],
        attention_bias=combined_bias(builder, match.visibility.biases, query, heads=match.spec.attention.q_num_heads),
        head_sink=head_vector(builder, match.core.sink) if match.core.sink is not None else None,
        past_key=past_key,
        past_value=past_value,
    )


def _pasts(builder: NodeBuilder, match: QKNormMatch) -> tuple[ir.Value | None, ir.Value | None]:
    if match.caches is None:
        return None, None
    if match.core.lengths is not None:
        return pasts_with_room(builder, match.caches, match.core.lengths)
    return match.caches[0].past.value, match.caches[1].past.value


def _as_output(builder: NodeBuilder, y: ir.Value, result: Located) -> ir.Value:
    """Y (B, S, Hq*Dv) in the layout and type of the value that it replaces."""
    value = y
    if sorted(result.layout) == sorted(PROJECTED):
        value = builder.transpose(value, [PROJECTED.index(letters) for letters in result.layout])
    else:
        inner = "KGD" if has_split_heads(result.layout) else "HD"
        dims = [result.sizes[letter] for letter in f"BS{inner}"]
        value = builder.reshape(value, [0, 0, *(_size(result, letter) for letter in inner)], dims)
        value = _transposed(builder, value, f"BS{inner}", result.layout)
    wanted = result.value.dtype
    if wanted is not None and wanted != value.dtype and value.shape is not None:
        value = builder.apply("Cast", [value], dims=list(value.shape), attributes=[ir.AttrInt64("to", int(wanted))], dtype=wanted)
    return value


def _transposed(builder: NodeBuilder, value: ir.Value, letters: str, layout: Layout) -> ir.Value:
    """`value` with the axes `letters` in the order of `layout`, and its axes of size 1."""
    assert all(len(item) <= 1 for item in layout), "outputs are followed to a known layout or not at all"
    value = builder.transpose(value, [letters.index(item) for item in layout if item])
    singles = [axis for axis, item in enumerate(layout) if not item]
    if not singles:
        return value
    rest = iter(shape_of(value))
    dims: list[Dim] = [next(rest) if item else 1 for item in layout]
    return builder.apply("Unsqueeze", [value, builder.integers(singles, "axes")], dims=dims)


def _boundary(builder: NodeBuilder, match: QKNormMatch) -> tuple[ir.Value, ...]:
    """What old and new nodes start from. Where columns of a table are equal by construction, what it was constructed from."""
    opened = {part: table.roots for table in _match_tables(match) if table.roots for part, _ in table.parts}
    own = {output for node in builder.nodes for output in node.outputs} | set(builder.initializers)
    found: dict[ir.Value, None] = {}
    if match.core.lengths is not None:
        found[match.core.lengths.total] = None  # only the old nodes read it, and it must go with the lengths of the rows
    for node in builder.nodes:
        for value in node.inputs:
            if value is None or value in own:
                continue
            for start in opened.get(value, (value,)):
                found[start] = None
    return tuple(value for value in found if not _depends_on(value, set(found) - {value}))


def _depends_on(value: ir.Value, others: set[ir.Value]) -> bool:
    """Whether `value` is made from one of `others` without a projection in between: then it is no start of its own."""
    waiting, seen = [value], {value}
    while waiting and len(seen) < DEPENDENCE_SEARCH:
        node = waiting.pop(0).producer()
        if node is None or node.op_type in PROJECTIONS or node.domain == DOMAIN:
            continue
        behind = [item for item in node.inputs if item is not None and item not in seen]
        if any(item in others for item in behind):
            return True
        seen.update(behind)
        waiting += behind
    return False


DEPENDENCE_SEARCH = 64


def _match_tables(match: QKNormMatch) -> list[Table]:
    sides = [match.query, match.key, *match.query.parts, *match.key.parts]
    rotaries = [side.rotary for side in sides if side.rotary is not None]
    return [table for rotary in rotaries for table in (rotary.cos, rotary.sin)]
