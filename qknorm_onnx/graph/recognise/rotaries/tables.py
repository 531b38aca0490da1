"""cos and sin tables: which columns of which values, without axes and copies that a rotary node does not need."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.match.fragments import Table
from qknorm_onnx.graph.match.located import Layout, Located
from qknorm_onnx.graph.recognise.rotaries.terms import Term
from qknorm_onnx.graph.walk.broadcasts import before_broadcast
from qknorm_onnx.graph.walk.constants import attribute_int, attribute_or_input, constant, producer, rank_of
from qknorm_onnx.graph.walk.head_groups import has_split_heads
from qknorm_onnx.graph.walk.layout import dims_of
from qknorm_onnx.graph.walk.limits import TABLE_STEPS


def make_table(terms: Mapping[int, Term], *, pairs: Sequence[tuple[int, int]], layout: Layout) -> Table | None:
    """The table of `terms` by rotated value. With `pairs` given: one factor per pair where both have the same one.

    `layout` names the axes of the rotated tensor; the table is broadcast against it. None where a table varies along an
    axis that cannot be expressed.
    """
    columns = {index: (term.table, term.column) for index, term in sorted(terms.items()) if term.table is not None}
    if len(columns) != len(terms) or any(term.axes != 1 for term in terms.values()):
        return None
    leads = {term.table: term.lead for term in terms.values() if term.table is not None and term.lead is not None}
    roots: tuple[ir.Value, ...] = ()
    wanted = list(columns)
    if pairs:
        equal, roots = _equal_in_pairs(columns, pairs)
        if equal:
            wanted = [first for first, _ in pairs]
    parts: list[tuple[ir.Value, tuple[int, ...]]] = []
    for value, run in itertools.groupby(wanted, key=lambda index: columns[index][0]):
        assert value is not None
        parts.append((value, tuple(columns[index][1] for index in run)))
    if any(term.of_operator for term in terms.values()):
        return _of_operator(parts)
    return _without_broadcast_axes(parts, layout, roots, leads)


def _of_operator(parts: Sequence[tuple[ir.Value, tuple[int, ...]]]) -> Table | None:
    """Columns of tables (B or 1, S, W), from before they were expanded to a batch."""
    found = []
    for value, columns in parts:
        layout = tuple("" if dim == 1 and name == "B" else name for dim, name in zip(dims_of(value) or (), "BSW", strict=True))
        inner = before_broadcast(Located(value, layout, dict(zip("BSW", dims_of(value) or (), strict=True))))
        found.append((inner, columns))
    layouts = {inner.layout for inner, _ in found}
    if len(layouts) != 1:
        return None
    return Table(tuple((inner.value, columns) for inner, columns in found), layouts.pop())


def same_table(first: Table, second: Table) -> bool:
    """Whether two tables are the same: the same columns of the same values, or of constants with the same contents."""
    if dataclasses.replace(first, parts=(), roots=()) != dataclasses.replace(second, parts=(), roots=()):
        return False
    if [columns for _, columns in first.parts] != [columns for _, columns in second.parts]:
        return False
    return all(_same_values(a, b) for (a, _), (b, _) in zip(first.parts, second.parts, strict=True))


def _same_values(first: ir.Value, second: ir.Value) -> bool:
    if first is second:
        return True
    a, b = constant(first), constant(second)
    return a is not None and b is not None and np.array_equal(a, b)


def _equal_in_pairs(
    columns: Mapping[int, tuple[ir.Value, int]], pairs: Sequence[tuple[int, int]]
) -> tuple[bool, tuple[ir.Value, ...]]:
    """Whether both values of each pair have the same factor, and what that was concluded from."""
    if all(columns[first] == columns[second] for first, second in pairs):
        return True, ()
    values = {value for value, _ in columns.values()}
    classes: dict[ir.Value, tuple[int, ...]] = {}
    roots: list[ir.Value] = []
    for value in values:
        found = column_classes(value)
        if found is None:
            return False, ()
        classes[value] = found[0]
        roots += found[1]
    for first, second in pairs:
        (a, column_a), (b, column_b) = columns[first], columns[second]
        if a is not b or classes[a][column_a] != classes[b][column_b]:
            return False, ()
    return True, tuple(dict.fromkeys(roots))


def column_classes(value: ir.Value, depth: int = TABLE_STEPS) -> tuple[tuple[int, ...], tuple[ir.Value, ...]] | None:
    """For each column of the last axis a number: columns with the same number hold the same values.

    Also the values that this was read from: whatever they hold, those columns are equal.
    """
    dims = dims_of(value)
    if dims is None or not dims or not isinstance(dims[-1], int):
        return None
    array = constant(value)
    if array is not None:
        rows = np.asarray(array).reshape(-1, array.shape[-1])
        _, classes = np.unique(rows, axis=1, return_inverse=True)
        return tuple(int(item) for item in classes.reshape(-1)), (value,)
    node = value.producer()
    distinct = tuple(range(dims[-1])), (value,)
    if node is None or depth == 0 or node.domain != "":
        return distinct
    if node.op_type in ELEMENTWISE:
        return column_classes(node.inputs[0], depth - 1) if node.inputs[0] is not None else distinct
    if node.op_type in ("Mul", "Add", "Sub", "Div"):
        return _of_operands(node, dims[-1], depth) or distinct
    if node.op_type == "Concat" and attribute_int(node, "axis", 0) % len(dims) == len(dims) - 1:
        return _of_concat(node, depth) or distinct
    if node.op_type in ("Unsqueeze", "Squeeze", "Transpose", "Expand", "Gather", "Slice") and _keeps_last_axis(node, value):
        return column_classes(node.inputs[0], depth - 1) if node.inputs[0] is not None else distinct
    if node.op_type == "Reshape":
        return _of_repeats(node, dims[-1], depth) or distinct
    return distinct


ELEMENTWISE = ("Cos", "Sin", "Cast", "Identity", "Neg")


def _of_operands(node: ir.Node, width: int, depth: int) -> tuple[tuple[int, ...], tuple[ir.Value, ...]] | None:
    """A product or sum: columns are equal where they are equal in both operands."""
    pairs: list[tuple[int, ...]] = []
    roots: list[ir.Value] = []
    for operand in node.inputs:
        dims = dims_of(operand) if operand is not None else None
        if operand is None or dims is None:
            return None
        if not dims or dims[-1] == 1:
            pairs.append((0,) * width)
            roots += [operand] if constant(operand) is None else []
            continue
        found = column_classes(operand, depth - 1)
        if found is None or len(found[0]) != width:
            return None
        pairs.append(found[0])
        roots += found[1]
    keys = list(zip(*pairs, strict=True))
    return tuple(keys.index(key) for key in keys), tuple(roots)


def _of_concat(node: ir.Node, depth: int) -> tuple[tuple[int, ...], tuple[ir.Value, ...]] | None:
    keys: list[tuple[ir.Value, int]] = []
    roots: list[ir.Value] = []
    for operand in node.inputs:
        found = column_classes(operand, depth - 1) if operand is not None else None
        if operand is None or found is None:
            return None
        keys += [(operand, item) for item in found[0]]
        roots += found[1]
    return tuple(keys.index(key) for key in keys), tuple(roots)


def _of_repeats(node: ir.Node, width: int, depth: int) -> tuple[tuple[int, ...], tuple[ir.Value, ...]] | None:
    """[..., n] > [..., n, 1] > copies side by side > [..., n * copies]."""
    copies = producer(node.inputs[0], "Expand", "Concat")
    single = copies.inputs[0] if copies is not None else None
    dims = dims_of(single) if single is not None else None
    if copies is None or single is None or dims is None or len(dims) < 2 or dims[-1] != 1 or not isinstance(dims[-2], int):
        return None
    if copies.op_type == "Concat" and any(operand is not single for operand in copies.inputs):
        return None
    if width % dims[-2]:
        return None
    inner = producer(single, "Unsqueeze")
    if inner is None or inner.inputs[0] is None:
        return None
    found = column_classes(inner.inputs[0], depth - 1)
    if found is None:
        return None
    times = width // dims[-2]
    return tuple(item for item in found[0] for _ in range(times)), found[1]


def _keeps_last_axis(node: ir.Node, value: ir.Value) -> bool:
    rank = rank_of(value)
    source = node.inputs[0]
    dims = dims_of(source) if source is not None else None
    if rank is None or dims is None or not dims or value.shape is None or dims[-1] != value.shape[-1]:
        return False
    if node.op_type in ("Unsqueeze", "Squeeze"):
        axes = attribute_or_input(node, "axes", 1)
        over = rank if node.op_type == "Unsqueeze" else len(dims)
        return axes is not None and all(axis % over != over - 1 for axis in axes)
    if node.op_type == "Transpose":
        return "perm" in node.attributes and node.attributes["perm"].as_ints()[-1] == rank - 1
    if node.op_type == "Gather":
        return attribute_int(node, "axis", 0) % len(dims) != len(dims) - 1
    if node.op_type == "Slice":
        axes = attribute_or_input(node, "axes", 3)
        return axes is not None and all(axis % len(dims) != len(dims) - 1 for axis in axes)
    return True


def _without_broadcast_axes(
    parts: Sequence[tuple[ir.Value, tuple[int, ...]]],
    layout: Layout,
    roots: tuple[ir.Value, ...],
    leads: Mapping[ir.Value, Layout],
) -> Table | None:
    """The same table read from before axes of size 1 were put in, for the head axis above all.

    `leads` names all axes but the last one of values that are not broadcast as they are.
    """
    out: list[tuple[ir.Value, tuple[int, ...]]] = []
    layouts: set[Layout] = set()
    for value, columns in parts:
        dims = dims_of(value)
        named = (*leads[value], "W") if value in leads else layout[len(layout) - len(dims or ()) :]
        if dims is None or len(dims) != len(named):
            return None
        axes = tuple("" if dim == 1 else letters for dim, letters in zip(dims, named, strict=True))
        if has_split_heads(axes):
            return None
        inner, axes = _before_unsqueeze(value, (*axes[:-1], "W"))
        out.append((inner, columns))
        layouts.add(axes)
    return Table(tuple(out), layouts.pop(), roots=roots) if len(layouts) == 1 else None


def _before_unsqueeze(value: ir.Value, layout: Layout) -> tuple[ir.Value, Layout]:
    while (node := producer(value, "Unsqueeze")) is not None and node.inputs[0] is not None:
        axes = attribute_or_input(node, "axes", 1)
        if axes is None or any(axis % len(layout) == len(layout) - 1 for axis in axes):
            break
        added = {axis % len(layout) for axis in axes}
        layout = tuple(letters for axis, letters in enumerate(layout) if axis not in added)
        value = node.inputs[0]
    return value, layout
