"""Steps back through operators that only move values: what the axes of their input mean, given those of their output."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from qknorm_onnx.graph.match.located import Dim, Layout, Located
from qknorm_onnx.graph.symbolic.dimensions import dim_of_form, form_of_dim
from qknorm_onnx.graph.symbolic.products import product_of
from qknorm_onnx.graph.walk.constants import attribute_int, attribute_or_input, input_of, integers, producer, rank_of

LayoutReader = Callable[[Located, ir.Node], Located | None]


def step_back(located: Located) -> Located | None:
    """The input of the layout operator that makes `located`, None if it is made by anything else."""
    node = producer(located.value)
    if node is not None and node.op_type == "Concat":
        return _joined(located, node)
    if node is None or node.op_type not in LAYOUT_READERS:
        return None
    return LAYOUT_READERS[node.op_type](located, node)


def same_size(first: Dim | None, second: Dim | None) -> bool:
    """Whether two sizes are known to be equal."""
    if first is None or second is None:
        return False
    if isinstance(first, int) or isinstance(second, int):
        return first == second
    return first.value is not None and first == second


def dims_of(value: ir.Value) -> tuple[Dim, ...] | None:
    """The sizes of `value`, if its rank is known."""
    return tuple(value.shape) if value.shape is not None else None


# How ONNX's shape inference calls dimensions that it cannot tell.
INVENTED_NAMES = "unk__"


def is_sized(value: ir.Value) -> bool:
    """Whether the shape of `value` is known, a dimension at least by a name that the file gave it."""
    return value.shape is not None and all(map(is_named, value.shape))


def is_named(dim: Dim) -> bool:
    """Whether `dim` is a number, or has a name that the file gave it."""
    return isinstance(dim, int) or (dim.value is not None and INVENTED_NAMES not in str(dim.value))


def letters_of(layout: Layout) -> str:
    """All letters in order."""
    return "".join(layout)


def regroup(letters: str, dims: Sequence[Dim], sizes: dict[str, Dim] | None = None) -> Layout | None:
    """Letters in row-major order, cut into axes of sizes `dims`; None if they do not fall together.

    Sizes that are unknown leave room for one axis: it gets what the known ones on both sides leave over.
    """
    known = sizes or {}
    front: list[str] = []
    rest = letters
    for dim in dims:
        taken = _take(rest, dim, known)
        if taken is None:
            break
        front.append(rest[:taken])
        rest = rest[taken:]
    if len(front) == len(dims):
        return tuple(front) if all(known.get(letter) == 1 for letter in rest) else None
    back: list[str] = []
    for dim in reversed(dims[len(front) + 1 :]):
        taken = _take(rest[::-1], dim, known)
        if taken is None:
            return None
        back.append(rest[len(rest) - taken :])
        rest = rest[: len(rest) - taken]
    if isinstance(dims[len(front)], int) and not any(isinstance(known.get(letter), ir.SymbolicDim) for letter in rest):
        return None  # both sizes are numbers, and they differ
    return (*front, rest, *reversed(back))


def _take(letters: str, dim: Dim, sizes: dict[str, Dim]) -> int | None:
    """How many letters make up an axis of size `dim`."""
    if same_size(dim, 1):
        return 1 if letters and same_size(sizes.get(letters[0]), 1) else 0
    product: Dim = 1
    for count, letter in enumerate(letters, start=1):
        size = sizes.get(letter)
        if size is None:
            return None
        product = size if product == 1 else _times(product, size)
        if same_size(product, dim):
            return count
        if isinstance(product, int) and isinstance(dim, int) and product > dim:
            return None
    return None


def _times(first: Dim, second: Dim) -> Dim:
    forms = [form_of_dim(dim) for dim in (first, second)]
    known = [form for form in forms if form is not None]
    product = dim_of_form(product_of(known)) if len(known) == len(forms) else None
    return product if isinstance(product, int) else ir.SymbolicDim(product)


def _transpose(located: Located, node: ir.Node) -> Located | None:
    source = node.inputs[0]
    if source is None:
        return None
    rank = len(located.layout)
    perm = tuple(node.attributes["perm"].as_ints()) if "perm" in node.attributes else tuple(reversed(range(rank)))
    before = [""] * rank
    for axis, origin in enumerate(perm):
        before[origin] = located.layout[axis]
    return located.at(source, tuple(before))


def _reshape(located: Located, node: ir.Node) -> Located | None:
    source = node.inputs[0]
    dims = dims_of(source) if source is not None else None
    if source is None or dims is None:
        return None
    layout = regroup(letters_of(located.layout), dims, dict(located.sizes))
    return located.at(source, layout) if layout is not None else None


def _unsqueeze(located: Located, node: ir.Node) -> Located | None:
    axes = attribute_or_input(node, "axes", 1)
    source = node.inputs[0]
    if axes is None or source is None:
        return None
    rank = len(located.layout)
    added = {axis % rank for axis in axes}
    if any(len(located.layout[axis]) > 0 and not same_size(located.sizes.get(located.layout[axis]), 1) for axis in added):
        return None
    return located.at(source, tuple(letters for axis, letters in enumerate(located.layout) if axis not in added))


def _squeeze(located: Located, node: ir.Node) -> Located | None:
    source = node.inputs[0]
    rank = rank_of(source) if source is not None else None
    axes = attribute_or_input(node, "axes", 1)
    if source is None or rank is None or axes is None:
        return None
    before = list(located.layout)
    for axis in sorted(axis % rank for axis in axes):
        before.insert(axis, "")
    return located.at(source, tuple(before))


def _same(located: Located, node: ir.Node) -> Located | None:
    return located.at(node.inputs[0], located.layout) if node.inputs[0] is not None else None


def _expand(located: Located, node: ir.Node) -> Located | None:
    """An Expand to the shape that its input has."""
    source = node.inputs[0]
    before, after = (dims_of(value) if value is not None else None for value in (source, located.value))
    if source is None or before is None or after is None or len(before) != len(after):
        return None
    return located.at(source, located.layout) if all(map(same_size, before, after)) else None


def _split(located: Located, node: ir.Node) -> Located | None:
    """A Split into one part, or one of several parts of size 1."""
    if len(node.outputs) == 1:
        return _same(located, node)
    axis = attribute_int(node, "axis", 0) % len(located.layout)
    index = located.value.index()
    dims = dims_of(node.inputs[0]) if node.inputs[0] is not None else None
    if dims is None or dims[axis] != len(node.outputs) or index is None or not _is_single(located, axis):
        return None
    return _picked(located, node.inputs[0], axis, index, replace=True)


def _slice(located: Located, node: ir.Node) -> Located | None:
    """A Slice that cuts nothing off, or that takes one index of an axis."""
    starts, ends, axes = (integers(input_of(node, index)) for index in (1, 2, 3))
    steps = integers(input_of(node, 4)) if input_of(node, 4) is not None else (1,)
    if starts is None or steps is None or set(steps) != {1}:
        return None
    unchanged = _expand(located, node) if set(starts) == {0} else None
    if unchanged is not None:
        return unchanged
    if ends is None or axes is None or len(axes) != 1 or ends[0] != starts[0] + 1 or starts[0] < 0:
        return None
    axis = axes[0] % len(located.layout)
    return _picked(located, node.inputs[0], axis, starts[0], replace=True) if _is_single(located, axis) else None


def _is_single(located: Located, axis: int) -> bool:
    """Whether `axis` means nothing, or is a batch of one: a sample that is attended to on its own."""
    letters = located.layout[axis]
    return not letters or (letters == "B" and same_size(located.sizes.get("B"), 1))


def _gather(located: Located, node: ir.Node) -> Located | None:
    """A Gather of one index, which takes the axis away."""
    index = integers(input_of(node, 1))
    rank = rank_of(node.inputs[0]) if node.inputs[0] is not None else None
    if index is None or len(index) != 1 or rank != len(located.layout) + 1 or index[0] < 0:
        return None
    return _picked(located, node.inputs[0], attribute_int(node, "axis", 0) % rank, index[0], replace=False)


def _picked(located: Located, source: ir.Value | None, axis: int, index: int, *, replace: bool) -> Located | None:
    """The tensor of which `located` is index `index` of `axis`: that axis gets the index for its name."""
    letter = str(index)
    dims = dims_of(source) if source is not None else None
    if source is None or dims is None or len(letter) > 1 or letter in letters_of(located.layout):
        return None
    rest = located.layout[axis + 1 :] if replace else located.layout[axis:]
    return Located(source, (*located.layout[:axis], letter, *rest), {**located.sizes, letter: dims[axis]})


def _joined(located: Located, node: ir.Node) -> Located | None:
    """The one tensor of several stacked ones to which the index of an axis belongs."""
    axis = attribute_int(node, "axis", 0) % len(located.layout)
    index = int(located.layout[axis]) if located.layout[axis].isdigit() else None
    for operand in node.inputs if index is not None else ():
        dims = dims_of(operand) if operand is not None else None
        size = dims[axis] if dims is not None and len(dims) == len(located.layout) else None
        if operand is None or index is None or not isinstance(size, int):
            return None
        if index < size:
            letter = str(index) if size > 1 else ""
            layout = (*located.layout[:axis], letter, *located.layout[axis + 1 :])
            return Located(operand, layout, {**located.sizes, letter: size} if letter else located.sizes)
        index -= size
    return None


LAYOUT_READERS: dict[str, LayoutReader] = {
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Identity": _same,
    "Cast": _same,
    "Dropout": _same,
    "Expand": _expand,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
}
