"""Weights, biases, factors, masks and tables of a match as inputs of a canonical node: constants folded, the rest as nodes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.match.attention_core import Bias
from qknorm_onnx.graph.match.fragments import Factor, RowLengths, Table
from qknorm_onnx.graph.match.located import Array, Dim, Layout, Parameter
from qknorm_onnx.graph.match.qk_norm_match import Gain, Preparation
from qknorm_onnx.graph.rewrite.grouped_bias import for_each_group
from qknorm_onnx.graph.rewrite.node_builder import NodeBuilder
from qknorm_onnx.graph.walk.constants import constant
from qknorm_onnx.spec.qk_norm_spec import normalises

GRID = "HD"
NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def weight_parameter(builder: NodeBuilder, preparation: Preparation) -> ir.Value | None:
    """The norm's weight: (D) or (H, D), or the model's own tensor where it already is one of these; None where it is 1."""
    gain = preparation.weight
    if not normalises(preparation.spec.kind) or gain.trivial:
        return None
    folded = _folded(gain, GRID)
    if folded is not None and np.all(folded == 1):
        return None
    only = gain.factors[0] if len(gain.factors) == 1 and gain.number == 1.0 else None
    if only is not None and not only.inverse and _usable(only.parameter.layout):
        return _widened(builder, builder.in_graph(only.parameter.value), preparation)
    heads, size = preparation.spec.num_heads, preparation.source.static("D")
    assert size is not None, "recognition requires heads of a fixed size"
    if folded is not None:
        return _widened(builder, builder.constant(_per_value(folded, heads, size), "weight"), preparation)
    grid = _product(builder, gain, GRID)
    return _widened(builder, _expanded(builder, grid, heads, size), preparation)


def bias_parameter(builder: NodeBuilder, preparation: Preparation) -> ir.Value | None:
    """The norm's bias, shaped as its weight; None where it is 0."""
    parameter = preparation.bias
    if not normalises(preparation.spec.kind) or parameter is None:
        return None
    array = _grid_of(parameter, GRID)
    if array is not None and not array.any():
        return None
    if _usable(parameter.layout):
        return _widened(builder, builder.in_graph(parameter.value), preparation)
    heads, size = preparation.spec.num_heads, preparation.source.static("D")
    assert size is not None, "recognition requires heads of a fixed size"
    if array is not None:
        return _widened(builder, builder.constant(_per_value(array, heads, size), "bias"), preparation)
    return _widened(builder, _expanded(builder, _grid_nodes(builder, parameter, GRID), heads, size), preparation)


def _widened(builder: NodeBuilder, value: ir.Value, preparation: Preparation) -> ir.Value:
    """A narrow weight or bias in the type of q or k, where a converter left that in float32 in front of a norm in float16."""
    wanted = preparation.source.value.dtype
    if value.dtype not in NARROW or wanted is None or wanted in NARROW:
        return value
    return builder.apply("Cast", [value], dims=shape_of(value), attributes=[ir.AttrInt64("to", wanted)], dtype=wanted)


def query_factor(builder: NodeBuilder, gain: Gain) -> ir.Value | None:
    """A factor of the finished queries, broadcastable to (B, H, S, D); None where there is none."""
    if gain.trivial:
        return None
    only = gain.factors[0] if len(gain.factors) == 1 and gain.number == 1.0 else None
    if only is not None and not only.inverse and _broadcasts(only.parameter.layout):
        return only.parameter.value
    folded = _folded(gain, "BHSD")
    return builder.constant(folded, "q_scale") if folded is not None else _product(builder, gain, "BHSD")


def head_vector(builder: NodeBuilder, parameter: Parameter) -> ir.Value:
    """One number per head, (H)."""
    array = _grid_of(parameter, "H")
    if array is not None:
        return parameter.value if parameter.layout == ("H",) else builder.constant(array, "head_sink")
    return builder.reshape(parameter.value, [-1], [_sizes(parameter).get("H", 1)])


def combined_bias(builder: NodeBuilder, biases: Sequence[Bias], query: ir.Value, *, heads: int) -> ir.Value | None:
    """All masks as one: boolean if all of them hide keys for good, else a float that is added to the logits."""
    if not biases:
        return None
    dtype = query.dtype
    biases = [_for_each_window(builder, bias, query) if bias.windows else bias for bias in biases]
    biases = [_for_each_head(builder, bias, query, heads) if bias.folded else bias for bias in biases]
    biases = [for_each_group(builder, bias, bias.grouped) if bias.grouped is not None else bias for bias in biases]
    as_bool = all(bias.value.dtype == ir.DataType.BOOL and bias.fill in (None, float("-inf")) for bias in biases)
    masks = [_visible(builder, bias) if as_bool else _added(builder, bias, dtype) for bias in biases]
    total = masks[0]
    for mask in masks[1:]:
        total = builder.apply("And" if as_bool else "Add", [total, mask], dims=_broadcast_dims(total, mask))
    return total


def rotary_table(builder: NodeBuilder, table: Table, *, identity: float, dtype: ir.DataType | None) -> ir.Value:
    """cos or sin as (S, W), (B, S, W) or (B, H, S, W); `identity` is its value where nothing is rotated.

    A table of float64 is rounded to float32 where queries and keys, of type `dtype`, are narrower: nodes compute in float32 then.
    """
    assert not isinstance(table.positions, RowLengths), "positions are computed before the tables are built"
    rows = [(_rows(builder, builder.in_graph(value), table.positions), columns) for value, columns in table.parts]
    parts = [_columns(builder, value, columns) for value, columns in rows]
    value = parts[0]
    if len(parts) > 1:
        axis = ir.AttrInt64("axis", -1)
        value = builder.apply("Concat", parts, dims=[*shape_of(value)[:-1], table.width], attributes=[axis])
    if table.negated:
        value = builder.apply("Neg", [value], dims=shape_of(value))
    if value.dtype == ir.DataType.DOUBLE and dtype != ir.DataType.DOUBLE:
        wanted = ir.AttrInt64("to", ir.DataType.FLOAT)
        value = builder.apply("Cast", [value], dims=shape_of(value), attributes=[wanted], dtype=ir.DataType.FLOAT)
    layout = table.layout
    if table.heads:
        lead = shape_of(value)[:-1]
        share = width_of(value) // table.heads
        value = builder.reshape(value, [*[0] * len(lead), table.heads, share], [*lead, table.heads, share])
        layout = (*layout[:-1], "H", "W")
    value = _table_axes(builder, value, layout)
    return _between_rows(builder, value, (table.prefix, table.suffix), identity) if table.prefix or table.suffix else value


def _between_rows(builder: NodeBuilder, value: ir.Value, counts: tuple[int, int], identity: float) -> ir.Value:
    """The table behind and in front of rows that rotate nothing, `counts` of them."""
    assert value.dtype is not None, "tables have a known type"
    *lead, length, width = shape_of(value)
    numpy_type = value.dtype.numpy()
    before, behind = (
        [builder.constant(np.full([*_static(*lead), count, *_static(width)], identity, dtype=numpy_type), "unrotated")]
        if count
        else []
        for count in counts
    )
    axis = ir.AttrInt64("axis", len(lead))
    return builder.apply("Concat", [*before, value, *behind], dims=[*lead, length + sum(counts), width], attributes=[axis])


def _usable(layout: Layout) -> bool:
    return layout in (("D",), ("H", "D"), ("HD",))


def _broadcasts(layout: Layout) -> bool:
    """Whether the axes stand where those of (B, H, S, D) do, counted from the end."""
    return len(layout) <= 4 and all(letters in ("", name) for letters, name in zip(layout[::-1], "DSHB", strict=False))


def _sizes(parameter: Parameter) -> dict[str, Dim]:
    return {letters: dim for letters, dim in zip(parameter.layout, shape_of(parameter.value), strict=True) if letters}


def _grid_of(parameter: Parameter, order: str, *, inner: int | None = None) -> Array | None:
    """A constant with one axis for each letter of `order` (size 1 where it does not vary)."""
    array = constant(parameter.value)
    if array is None:
        return None
    axes = [axis for axis, letters in enumerate(parameter.layout) if letters]
    array = array.reshape([array.shape[axis] for axis in axes])
    letters = [parameter.layout[axis] for axis in axes]
    if letters == ["HD"]:
        return array.reshape(1, -1) if inner is None else array.reshape(-1, inner)
    array = array.transpose(sorted(range(len(letters)), key=lambda index: order.index(letters[index])))
    return array.reshape([dict(zip(sorted(letters, key=order.index), array.shape, strict=True)).get(name, 1) for name in order])


def _folded(gain: Gain, order: str) -> Array | None:
    """The product of constants, in their own type if it is one type, else in float32."""
    widths = [width_of(factor.parameter.value) for factor in gain.factors if "D" in factor.parameter.layout[-1:]]
    grids = [_grid_of(factor.parameter, order, inner=widths[0] if widths else None) for factor in gain.factors]
    arrays = [grid for grid in grids if grid is not None]
    if len(arrays) != len(grids):
        return None
    kinds = {array.dtype for array in arrays}
    total = np.full((1,) * len(order), gain.number, dtype=np.float64)
    for factor, array in zip(gain.factors, arrays, strict=True):
        wide = array.astype(np.float64)
        total = total / wide if factor.inverse else total * wide
    return total.astype(kinds.pop() if len(kinds) == 1 else np.float32)


def _per_value(grid: Array, heads: int, size: int) -> Array:
    """(H or 1, D or 1) as (D) or (H, D); a row of H*D values as it is."""
    if grid.shape == (1, heads * size) and heads > 1:
        return grid.reshape(-1)
    if grid.shape[0] == 1:
        return np.broadcast_to(grid, (1, size)).reshape(size)
    return np.broadcast_to(grid, (heads, size))


def _grid_nodes(builder: NodeBuilder, parameter: Parameter, order: str) -> ir.Value:
    """As `_grid_of`, for a tensor that is computed or fed."""
    axes = [axis for axis, letters in enumerate(parameter.layout) if letters]
    singles = [axis for axis, letters in enumerate(parameter.layout) if not letters]
    axes.sort(key=lambda axis: order.index(parameter.layout[axis][0]))
    value = builder.transpose(parameter.value, [*singles, *axes])
    letters = [parameter.layout[axis] for axis in axes]
    if letters == ["HD"] or (not singles and letters == list(order)):
        return value
    sizes = _sizes(parameter)
    dims = [sizes.get(name, 1) for name in order]
    target = [dim if isinstance(dim, int) else -1 for dim in dims]
    if target.count(-1) <= 1:
        return builder.reshape(value, target, dims)
    missing = [index for index, name in enumerate(order) if name not in letters]
    if singles:
        value = builder.apply(
            "Squeeze", [value, builder.integers(range(len(singles)), "axes")], dims=[sizes[name] for name in letters]
        )
    return builder.apply("Unsqueeze", [value, builder.integers(missing, "axes")], dims=dims) if missing else value


def _product(builder: NodeBuilder, gain: Gain, order: str) -> ir.Value:
    parts = [(factor, _grid_nodes(builder, factor.parameter, order)) for factor in gain.factors]
    total = _first_factor(builder, *parts[0])
    for factor, value in parts[1:]:
        total = builder.apply("Div" if factor.inverse else "Mul", [total, value], dims=_broadcast_dims(total, value))
    if gain.number != 1.0:
        assert total.dtype is not None
        scalar = builder.constant(np.asarray(gain.number, dtype=total.dtype.numpy()), "factor")
        total = builder.apply("Mul", [total, scalar], dims=shape_of(total))
    return total


def _first_factor(builder: NodeBuilder, factor: Factor, value: ir.Value) -> ir.Value:
    return builder.apply("Reciprocal", [value], dims=shape_of(value)) if factor.inverse else value


def _expanded(builder: NodeBuilder, grid: ir.Value, heads: int, size: int) -> ir.Value:
    """(H or 1, D or 1) as (H, D), by nodes."""
    if grid.shape is not None and list(grid.shape) in ([heads, size], [heads * size]):
        return grid
    return builder.apply("Expand", [grid, builder.integers([heads, size], "shape")], dims=[heads, size])


def _for_each_window(builder: NodeBuilder, bias: Bias, query: ir.Value) -> Bias:
    """Masks of W windows, repeated for each image of the batch: (1, W, 1, S, T) as (B, 1, S, T)."""
    _, windows, _, rows, columns = shape_of(bias.value)
    bounds = [ir.AttrInt64("start", 0), ir.AttrInt64("end", 1)]
    batch = builder.apply("Shape", [query], dims=[1], attributes=bounds, dtype=ir.DataType.INT64)
    images = builder.apply("Div", [batch, builder.integers([bias.windows], "windows")], dims=[1])
    ones = builder.integers([1, 1, 1, 1], "ones")
    target = builder.apply("Concat", [images, ones], dims=[5], attributes=[ir.AttrInt64("axis", 0)])
    count = shape_of(query)[0] // bias.windows
    every = builder.apply("Expand", [bias.value, target], dims=[count, windows, 1, rows, columns])
    flat = builder.reshape(every, [-1, 1, *_static(rows, columns)], [shape_of(query)[0], 1, rows, columns])
    return Bias(flat, bias.negated, bias.fill)


def _for_each_head(builder: NodeBuilder, bias: Bias, query: ir.Value, heads: int) -> Bias:
    """A mask (B*H, S, T) as (B, H, S, T)."""
    _, rows, columns = shape_of(bias.value)
    bounds = [ir.AttrInt64("start", 1), ir.AttrInt64("end", 3)]
    inner = builder.apply("Shape", [bias.value], dims=[2], attributes=bounds, dtype=ir.DataType.INT64)
    outer = builder.integers([-1, heads], "outer")
    target = builder.apply("Concat", [outer, inner], dims=[4], attributes=[ir.AttrInt64("axis", 0)])
    value = builder.apply("Reshape", [bias.value, target], dims=[shape_of(query)[0], heads, rows, columns])
    return Bias(value, bias.negated, bias.fill)


def _static(*dims: Dim) -> list[int]:
    assert all(isinstance(dim, int) for dim in dims), "windows have a fixed size"
    return [dim for dim in dims if isinstance(dim, int)]


def _in_place(builder: NodeBuilder, bias: Bias) -> ir.Value:
    """The mask with its axes where those of the logits are."""
    value, axes = bias.value, bias.axes
    if axes is None or value.shape is None:
        return value
    value, axes = _without_unused(builder, value, axes)
    used = [axis for axis in axes if axis is not None]
    value = builder.transpose(value, used)
    missing = [place for place, axis in enumerate(axes) if axis is None]
    leading = len([place for place in missing if all(axis is None for axis in axes[:place])])
    if len(missing) == leading:
        return value
    rest = iter(shape_of(value))
    dims: list[Dim] = [1 if axis is None else next(rest) for axis in axes]
    return builder.apply("Unsqueeze", [value, builder.integers(missing, "axes")], dims=dims)


def _without_unused(
    builder: NodeBuilder, value: ir.Value, axes: tuple[int | None, ...]
) -> tuple[ir.Value, tuple[int | None, ...]]:
    """`value` without the axes that `axes` does not name, and `axes` counted along what is left."""
    unused = [axis for axis in range(len(shape_of(value))) if axis not in axes]
    if not unused:
        return value, axes
    dims = [dim for axis, dim in enumerate(shape_of(value)) if axis not in unused]
    value = builder.apply("Squeeze", [value, builder.integers(unused, "axes")], dims=dims)
    return value, tuple(axis if axis is None else axis - sum(other < axis for other in unused) for axis in axes)


def _visible(builder: NodeBuilder, bias: Bias) -> ir.Value:
    value = _in_place(builder, bias)
    return builder.apply("Not", [value], dims=shape_of(value)) if bias.negated else value


def _added(builder: NodeBuilder, bias: Bias, dtype: ir.DataType | None) -> ir.Value:
    """A boolean mask as a float: 0 where a key is visible, else what the model writes there."""
    value = _in_place(builder, bias)
    if value.dtype != ir.DataType.BOOL:
        return value
    assert dtype is not None, "recognition knows the type of the queries"
    fill = -np.inf if bias.fill is None else bias.fill
    hidden, visible = (builder.constant(np.asarray(item, dtype=dtype.numpy()), "mask") for item in (fill, 0.0))
    branches = [hidden, visible] if bias.negated else [visible, hidden]
    return builder.apply("Where", [value, *branches], dims=shape_of(value), dtype=dtype)


def width_of(value: ir.Value) -> int:
    """The size of the last axis, which recognition requires to be fixed."""
    width = shape_of(value)[-1]
    assert isinstance(width, int), "recognition requires fixed widths"
    return width


def shape_of(value: ir.Value) -> list[Dim]:
    """The sizes of a value whose shape recognition has read."""
    assert value.shape is not None, "recognition reads the shapes of all operands"
    return list(value.shape)


def _broadcast_dims(first: ir.Value, second: ir.Value) -> list[Dim]:
    rank = max(len(shape_of(first)), len(shape_of(second)))
    ones: list[Dim] = [1]
    a, b = (ones * (rank - len(shape_of(value))) + shape_of(value) for value in (first, second))
    return [right if left == 1 else left for left, right in zip(a, b, strict=True)]


def _rows(builder: NodeBuilder, value: ir.Value, positions: ir.Value | None) -> ir.Value:
    """Rows (N, W) at positions (B, S): (B, S, W)."""
    if positions is None:
        return value
    axis = ir.AttrInt64("axis", 0)
    return builder.apply("Gather", [value, positions], dims=[*shape_of(positions), width_of(value)], attributes=[axis])


def _columns(builder: NodeBuilder, value: ir.Value, columns: tuple[int, ...]) -> ir.Value:
    if columns == tuple(range(width_of(value))):
        return value
    dims = [*shape_of(value)[:-1], len(columns)]
    steps = {second - first for first, second in itertools.pairwise(columns)}
    step = steps.pop() if len(steps) == 1 else 0
    if step > 0:
        bounds = [[columns[0]], [columns[-1] + 1], [-1], [step]]
        return builder.apply("Slice", [value, *(builder.integers(item, "slice") for item in bounds)], dims=dims)
    indices = builder.integers(columns, "columns")
    return builder.apply("Gather", [value, indices], dims=dims, attributes=[ir.AttrInt64("axis", -1)])


def _table_axes(builder: NodeBuilder, value: ir.Value, layout: Layout) -> ir.Value:
    """Axes of a table in the order (B, H, S, W), without those that it does not need."""
    if len(layout) <= 4 and len(layout) >= 2:
        names = {2: "SW", 3: "BSW", 4: "BHSW"}[len(layout)]
        if all(letters in ("", name) for letters, name in zip(layout, names, strict=True)):
            return value
    sizes = {letters: dim for letters, dim in zip(layout, shape_of(value), strict=True) if letters}
    singles = [axis for axis, letters in enumerate(layout) if not letters]
    if singles:
        rest = [dim for axis, dim in enumerate(shape_of(value)) if axis not in singles]
        value = builder.apply("Squeeze", [value, builder.integers(singles, "axes")], dims=rest)
    letters = [item for item in layout if item]
    value = builder.transpose(value, sorted(range(len(letters)), key=lambda index: "BHSW".index(letters[index])))
    names = "BHSW" if "H" in letters else "BSW" if "B" in letters else "SW"
    missing = [index for index, name in enumerate(names) if name not in letters]
    if not missing:
        return value
    dims = [sizes.get(name, 1) for name in names]
    return builder.apply("Unsqueeze", [value, builder.integers(missing, "axes")], dims=dims)
