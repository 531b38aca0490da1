"""Norms over groups inside a head, or over groups of heads, that a Reshape makes an axis of their own and another one undoes.

The letter "E" is short-lived: the axis of groups. A head of D values is E groups of D / E ("ED"); H heads are E groups of
H / E heads ("EH").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.match.fragments import Chain, Factor, Norm, Offset, Step
from qknorm_onnx.graph.match.located import Array, Located, Parameter, Unreadable
from qknorm_onnx.graph.walk.constants import constant, number, producer
from qknorm_onnx.graph.walk.layout import dims_of, letters_of, regroup

PARAMETER_HINT = "make the weight of the norm an initializer that is no input of the graph"


@dataclasses.dataclass(frozen=True)
class Groups:
    """`count` groups of what `letter` stands for: "D", the values of a head, or "H", the heads."""

    letter: str
    count: int

    @property
    def split(self) -> str:
        """The letters of both axes."""
        return "E" + self.letter


def read_grouped_norm(located: Located, read_inner: Callable[[Located], Chain]) -> tuple[Step, ...] | Unreadable | None:
    """A norm whose rows are the groups that a Reshape behind it puts back into one axis; `read_inner` walks over such groups."""
    found = _grouped(located)
    chain = read_inner(found[1]) if found is not None else None
    if found is None or chain is None or chain.norm is None:
        return None
    groups = found[0]
    norm = chain.norm
    source = next((item for item in chain.path if item is chain.steps[-1].source), None)
    behind = chain.path[chain.path.index(source) :] if source is not None else ()
    joined = next((item for item in behind if any(groups.split in letters for letters in item.layout)), None)
    if joined is None or norm.axis != ("head" if groups.letter == "D" else "hidden"):
        return None
    inner = _joined(joined, groups, located)
    steps: list[Step] = []
    for step in chain.steps:
        fragment = step.fragment
        if isinstance(fragment, Factor | Offset):
            parameter = _spread(fragment.parameter, groups, found[1])
            if isinstance(parameter, Unreadable):
                return parameter
            fragment = dataclasses.replace(fragment, parameter=parameter)
        elif isinstance(fragment, Norm):
            fragment = dataclasses.replace(fragment, groups=groups.count)
        steps.append(Step(fragment, inner))
    return tuple(steps)


def _grouped(located: Located) -> tuple[Groups, Located] | None:
    """The groups that the Reshape which makes `located` joins, and the tensor in front of it."""
    node = producer(located.value, "Reshape")
    source = node.inputs[0] if node is not None else None
    dims, heads, size = dims_of(source) if source is not None else None, located.static("H"), located.static("D")
    row = dims[-1] if dims else None
    if source is None or dims is None or heads is None or size is None or not isinstance(row, int) or row < 1:
        return None
    if row < size and size % row == 0:
        groups, sizes = Groups("D", size // row), {**located.sizes, "E": size // row, "D": row}
    elif size < row < heads * size and row % size == 0 and heads % (row // size) == 0:
        groups = Groups("H", heads * size // row)
        sizes = {**located.sizes, "E": groups.count, "H": row // size}
    else:
        return None
    letters = letters_of(located.layout)
    if letters.count(groups.letter) != 1 or "E" in letters:
        return None
    layout = regroup(letters.replace(groups.letter, groups.split), dims, sizes)
    return (groups, Located(source, layout, sizes)) if layout is not None else None


def _joined(inner: Located, groups: Groups, outer: Located) -> Located:
    """`inner` with its groups as one axis again, and the sizes of `outer`."""
    layout = tuple(letters.replace(groups.split, groups.letter) for letters in inner.layout)
    return Located(inner.value, layout, outer.sizes)


def _spread(parameter: Parameter, groups: Groups, inner: Located) -> Parameter | Unreadable:
    """A weight or bias of groups as one of whole heads: repeated for each group where all groups share it."""
    letters = letters_of(parameter.layout)
    if number(parameter.value) is not None or not set(letters) & {"E", "H", "D"}:
        return parameter
    array = constant(parameter.value)
    if array is None or not set(letters) <= {"E", "H", "D"}:
        node = parameter.value.producer() or inner.value.producer()
        return Unreadable("its norm of groups has a weight that is no constant", node, PARAMETER_HINT)
    grid = "EHD" if groups.letter == "H" else "HED"
    sizes = {letter: size for letter, size in inner.sizes.items() if isinstance(size, int)}
    shape = [sizes[letter] if letter in letters or letter != "H" or groups.letter == "H" else 1 for letter in grid]
    spread = np.broadcast_to(_on_grid(array, letters, grid, sizes), shape)
    heads = shape[0] * shape[1] if groups.letter == "H" else shape[0]
    rows = spread.reshape(heads, -1)
    rows = rows[0] if heads == 1 else rows
    tensor = ir.tensor(np.ascontiguousarray(rows), name=f"{parameter.value.name}/of_groups")
    value = ir.Value(name=tensor.name, shape=ir.Shape(rows.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    return Parameter(value, ("D",) if rows.ndim == 1 else ("H", "D"))


def _on_grid(array: Array, letters: str, grid: Sequence[str], sizes: dict[str, int]) -> Array:
    """`array`, whose values are in the order of `letters`, with one axis for each letter of `grid`."""
    apart = array.reshape([sizes[letter] for letter in letters])
    ordered = apart.transpose(sorted(range(len(letters)), key=lambda place: grid.index(letters[place])))
    return ordered.reshape([sizes[letter] if letter in letters else 1 for letter in grid])
