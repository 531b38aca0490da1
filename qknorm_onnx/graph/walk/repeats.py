"""Key / value heads that serve several query heads each: copies of them, however they were made.

`Repeat(n)` means that query head h reads key head h // n: copies of one head lie side by side. The other order (tiling) is
another attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from qknorm_onnx.graph.match.fragments import Repeat
from qknorm_onnx.graph.match.located import Dim, Located
from qknorm_onnx.graph.walk.constants import attribute_int, attribute_or_input, constant, input_of, integers, producer
from qknorm_onnx.graph.walk.layout import dims_of, letters_of, regroup, same_size

Repeated = tuple[Repeat, Located]


def read_copied_groups(located: Located) -> Repeated | None:
    """Copies in an axis of their own, which a Reshape makes one with the heads: each head n times in a row."""
    reshape = producer(located.value, "Reshape")
    found = copies_of(reshape.inputs[0]) if reshape is not None else None
    heads = located.static("H")
    if found is None or heads is None:
        return None
    if heads % found.count:
        return None
    sizes = {**located.sizes, "H": heads // found.count, "R": found.count}
    layout = regroup(letters_of(located.layout).replace("H", "HR"), found.after, sizes)
    if layout is None or layout[found.axis] != "R":
        return None
    del sizes["R"]
    return Repeat(found.count), Located(found.source, tuple("" if letters == "R" else letters for letters in layout), sizes)


def read_copied_head(located: Located) -> Repeated | None:
    """One head of keys and values, copied to as many as the queries have."""
    found, heads = copies_of(located.value), located.static("H")
    if found is None or found.axis != located.axis_of("H") or found.count != heads:
        return None
    return Repeat(found.count), Located(found.source, located.layout, {**located.sizes, "H": 1})


def read_copied_axes(located: Located) -> Repeated | None:
    """Key / value heads (B, K, 1, S, D) copied to the query heads of each, and never made one axis with them."""
    found, copies, heads = copies_of(located.value), located.static("G"), located.static("K")
    if found is None or heads is None or found.axis != located.axis_of("G") or found.count != copies or not found.exact:
        return None
    layout = tuple("" if letters == "G" else letters.replace("K", "H") for letters in located.layout)
    return Repeat(found.count), Located(found.source, layout, {**located.sizes, "H": heads})


def read_listed_heads(located: Located) -> Repeated | None:
    """Heads taken one by one, in an order that names each of them n times in a row: by a Gather, or slices that are joined."""
    axis, heads, node = located.axis_of("H"), located.static("H"), producer(located.value, "Gather", "Concat")
    if axis is None or heads is None or node is None or attribute_int(node, "axis", 0) % len(located.layout) != axis:
        return None
    picked = _gathered(node) if node.op_type == "Gather" else _joined(node, axis)
    if picked is None or len(picked[1]) != heads:
        return None
    source, order = picked
    dims = dims_of(source)
    count = dims[axis] if dims is not None and len(dims) == len(located.layout) else None
    if not isinstance(count, int) or not 0 < count < heads or heads % count:
        return None
    copies = heads // count
    if list(order) != [head // copies for head in range(heads)]:
        return None
    return Repeat(copies), Located(source, located.layout, {**located.sizes, "H": count})


def _gathered(node: ir.Node) -> tuple[ir.Value, Sequence[int]] | None:
    source, indices, dims = input_of(node, 0), integers(input_of(node, 1)), dims_of(node.inputs[1]) if node.inputs[1] else None
    return (source, indices) if source is not None and indices is not None and dims is not None and len(dims) == 1 else None


def _joined(node: ir.Node, axis: int) -> tuple[ir.Value, Sequence[int]] | None:
    """The tensor of which all operands are single heads or copies of one, and which."""
    found: list[tuple[ir.Value, int]] = []
    for operand in node.inputs:
        copies = copies_of(operand)
        copied = copies is not None and copies.axis == axis and copies.exact
        source = copies.source if copies is not None and copied else operand
        part = _one_of(source, axis) if source is not None else None
        if part is None:
            return None
        found += [part] * (copies.count if copies is not None and copied else 1)
    return (found[0][0], [index for _, index in found]) if len({source for source, _ in found}) == 1 else None


def _picked_one(value: ir.Value, axis: int) -> tuple[ir.Value, int] | None:
    """As `_one_of`, for one index that was taken out without its axis (torch's unbind and x[:, i]), which is put back."""
    back = producer(value, "Unsqueeze")
    if back is None or attribute_or_input(back, "axes", 1) != (axis,):
        return None
    taken = producer(back.inputs[0], "Gather", "Squeeze")
    source = input_of(taken, 0) if taken is not None else None
    before = dims_of(source) if source is not None else None
    if taken is None or source is None or before is None:
        return None
    if taken.op_type == "Squeeze":
        return _one_of(source, axis) if attribute_or_input(taken, "axes", 1) == (axis,) else None
    index, place = constant(input_of(taken, 1)), attribute_int(taken, "axis", 0) % len(before)
    if index is None or index.ndim or place != axis:
        return None
    size = before[axis]
    return source, int(index) + size if index < 0 and isinstance(size, int) else int(index)


def _picked_by_list(value: ir.Value, axis: int) -> tuple[ir.Value, int] | None:
    """As `_one_of`, for an axis that is exchanged with the first, looked up by a list of one index, and exchanged back.

    torch.onnx writes x[:, [i]] so: Transpose, GatherND, Transpose.
    """
    back = producer(value, "Transpose")
    taken = producer(back.inputs[0], "GatherND") if back is not None else None
    there = producer(taken.inputs[0], "Transpose") if taken is not None else None
    if back is None or taken is None or there is None or there.inputs[0] is None or attribute_int(taken, "batch_dims", 0):
        return None
    perm = list(back.attributes["perm"].as_ints()) if "perm" in back.attributes else []
    exchanged = list(range(len(perm)))
    if axis >= len(perm):
        return None
    exchanged[0], exchanged[axis] = axis, 0
    index = constant(input_of(taken, 1))
    if perm != exchanged or "perm" not in there.attributes or list(there.attributes["perm"].as_ints()) != perm:
        return None
    if index is None or index.shape != (1, 1):
        return None
    before = dims_of(there.inputs[0])
    size = before[axis] if before is not None else None
    number = int(index[0, 0])
    return there.inputs[0], number + size if number < 0 and isinstance(size, int) else number


def _one_of(value: ir.Value, axis: int) -> tuple[ir.Value, int] | None:
    """The tensor from which `value` takes one index of `axis`, and that index."""
    node, dims = producer(value, "Slice", "Split"), dims_of(value)
    source = input_of(node, 0) if node is not None else None
    before = dims_of(source) if source is not None else None
    if node is None:
        return _picked_one(value, axis) or _picked_by_list(value, axis)
    if source is None or dims is None or before is None or dims[axis] != 1:
        return None
    if node.op_type == "Split":
        along = attribute_int(node, "axis", 0) % len(dims)
        return (source, value.index() or 0) if along == axis and before[axis] == len(node.outputs) else None
    starts, axes = integers(input_of(node, 1)), integers(input_of(node, 3))
    steps = integers(input_of(node, 4)) if input_of(node, 4) is not None else (1,)
    if starts is None or axes is None or steps != (1,) or [item % len(dims) for item in axes] != [axis]:
        return None
    size = before[axis]
    return source, starts[0] + size if starts[0] < 0 and isinstance(size, int) else starts[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copies:
    """`count` copies of `source` along `axis`, in which it has size 1; `after` are the sizes then.

    `exact`: all other sizes are seen to be as before.
    """

    source: ir.Value
    axis: int
    count: int
    after: tuple[Dim, ...]
    exact: bool


def copies_of(value: ir.Value | None) -> Copies | None:
    """What `value` holds copies of, by Expand, Tile, or Concat of one tensor with itself (torch's stack and cat)."""
    node = producer(value, "Expand", "Tile", "Concat")
    source = input_of(node, 0) if node is not None else None
    before, after = (dims_of(item) if item is not None else None for item in (source, value))
    if node is None or source is None or before is None or after is None or len(before) != len(after):
        return None
    axis = _only_axis(node, before, after)
    if axis is None or before[axis] != 1:
        return None
    count = after[axis]
    if node.op_type != "Expand":  # whose other sizes are those of the input, also where inference lost their names
        after = (*before[:axis], count, *before[axis + 1 :])
    exact = node.op_type != "Expand" or all(
        same_size(*pair) for place, pair in enumerate(zip(before, after, strict=True)) if place != axis
    )
    if not isinstance(count, int) or count < 2:
        return None
    return Copies(source=source, axis=axis, count=count, after=after, exact=exact)


def _only_axis(node: ir.Node, before: Sequence[Dim], after: Sequence[Dim]) -> int | None:
    """The one axis along which a node repeats its input."""
    if node.op_type == "Concat":
        same = all(operand is node.inputs[0] for operand in node.inputs)
        return attribute_int(node, "axis", 0) % len(before) if same and len(node.inputs) > 1 else None
    if node.op_type == "Tile":
        times = attribute_or_input(node, "repeats", 1)
        grown = [axis for axis, count in enumerate(times) if count != 1] if times is not None else []
    else:
        grown = [axis for axis, (old, new) in enumerate(zip(before, after, strict=True)) if old == 1 and new != 1]
    return grown[0] if len(grown) == 1 else None
