"""A mask that differs between heads which are two axes, as one with the axes (B, H, S, T)."""

from __future__ import annotations

import onnx_ir as ir

from qknorm_onnx.graph.match.attention_core import Bias, GroupedAxes
from qknorm_onnx.graph.match.located import Dim
from qknorm_onnx.graph.rewrite.node_builder import NodeBuilder

ORDER = "BKGST"


def for_each_group(builder: NodeBuilder, bias: Bias, axes: GroupedAxes) -> Bias:
    """`bias` with a value whose axes are `axes`, as (B or 1, K*G, S or 1, T or 1)."""
    assert bias.value.shape is not None, "recognition reads the shapes of all operands"
    dims: list[Dim] = list(bias.value.shape)
    named = [axis for axis, letter in enumerate(axes.letters) if letter]
    singles = [axis for axis, letter in enumerate(axes.letters) if not letter]
    value = bias.value
    if singles:
        value = builder.apply("Squeeze", [value, builder.integers(singles, "axes")], dims=[dims[axis] for axis in named])
    letters = [axes.letters[axis] for axis in named]
    sizes = {axes.letters[axis]: dims[axis] for axis in named}
    value = builder.transpose(value, sorted(range(len(letters)), key=lambda axis: ORDER.index(letters[axis])))
    missing = [place for place, letter in enumerate(ORDER) if letter not in letters]
    if missing:
        five = [sizes.get(letter, 1) for letter in ORDER]
        value = builder.apply("Unsqueeze", [value, builder.integers(missing, "axes")], dims=five)
    if "K" not in sizes or "G" not in sizes:
        full = [sizes.get("B", 1), axes.kv_heads, axes.group, sizes.get("S", 1), sizes.get("T", 1)]
        value = builder.apply("Expand", [value, builder.integers([1, axes.kv_heads, axes.group, 1, 1], "shape")], dims=full)
    return Bias(_joined(builder, value, axes, sizes), bias.negated, bias.fill)


def _joined(builder: NodeBuilder, value: ir.Value, axes: GroupedAxes, sizes: dict[str, Dim]) -> ir.Value:
    """(B, K, G, S, T) as (B, K*G, S, T)."""
    heads = axes.kv_heads * axes.group
    edges = [
        builder.apply(
            "Shape",
            [value],
            dims=[end - start],
            attributes=[ir.AttrInt64("start", start), ir.AttrInt64("end", end)],
            dtype=ir.DataType.INT64,
        )
        for start, end in ((0, 1), (3, 5))
    ]
    shape = [edges[0], builder.integers([heads], "heads"), edges[1]]
    target = builder.apply("Concat", shape, dims=[4], attributes=[ir.AttrInt64("axis", 0)])
    return builder.apply("Reshape", [value, target], dims=[sizes.get("B", 1), heads, sizes.get("S", 1), sizes.get("T", 1)])
