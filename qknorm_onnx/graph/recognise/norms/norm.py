"""Norms in front of a core. One function per spelling; `NORM_READERS` lists them.

Each reader gets the tensor that may be the output of a norm and answers with the steps that it stands for, nearest to
the core first: bias, weight, and the norm itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import assert_never

import onnx_ir as ir

from qknorm_onnx.graph.match.fragments import Factor, Norm, Offset, Step
from qknorm_onnx.graph.match.located import Layout, Located, Unreadable
from qknorm_onnx.graph.recognise.norms.groups import read_group_norm, read_instance_norm, read_norm_of_each_head
from qknorm_onnx.graph.recognise.norms.row_size import RowSize, mean_of, read_inverse_size, read_size, same_row
from qknorm_onnx.graph.walk.broadcasts import unrepeated
from qknorm_onnx.graph.walk.constants import attribute_float, attribute_int, input_of, producer, rank_of
from qknorm_onnx.graph.walk.layout import dims_of, letters_of, same_size
from qknorm_onnx.graph.walk.readings import first_answer
from qknorm_onnx.spec.qk_norm_spec import EpsilonMode, NormAxis, NormKind, spans_heads

CENTRED_HINT = "divide by the root of the mean of squares, as LayerNorm does, and put the factor into the weight"
FIXED_HINT = "export with a fixed size of the heads"

NormReader = Callable[[Located], tuple[Step, ...] | Unreadable | None]


def read_norm(located: Located) -> tuple[Step, ...] | Unreadable | None:
    """The norm that makes `located`, in any spelling."""
    return first_answer(NORM_READERS, located, "norms")


def read_operator(located: Located) -> tuple[Step, ...] | Unreadable | None:
    """LayerNormalization, RMSNormalization, SimplifiedLayerNormalization: one node with its weight and bias."""
    node = located.value.producer()
    if node is None or (node.domain, node.op_type) not in NORM_OPERATORS or located.value is not node.outputs[0]:
        return None
    source = node.inputs[0]
    if source is None:
        return None
    rank = len(located.layout)
    first = attribute_int(node, "axis", -1) % rank
    axis = _norm_axis(located.layout, tuple(range(first, rank)), node)
    if isinstance(axis, Unreadable):
        return axis
    kind, source = _with_centring(NORM_OPERATORS[node.domain, node.op_type], source, tuple(range(first, rank)))
    inner = located.at(source, located.layout)
    steps: list[Step] = []
    for index, fragment in ((2, Offset), (1, Factor)):
        operand = input_of(node, index)
        if operand is not None:
            steps.append(Step(fragment(unrepeated(operand, located.layout), node=node), inner))
    norm = Norm(kind=kind, axis=axis, epsilon=attribute_float(node, "epsilon", 1e-5), mode="inside_sqrt", node=node)
    return (*steps, Step(norm, inner))


NORM_OPERATORS: dict[tuple[str, str], NormKind] = {
    ("", "LayerNormalization"): "layer",
    ("", "RMSNormalization"): "rms",
    ("", "SimplifiedLayerNormalization"): "rms",
    ("com.microsoft", "SimplifiedLayerNormalization"): "rms",
}


def _with_centring(kind: NormKind, source: ir.Value, axes: tuple[int, ...]) -> tuple[NormKind, ir.Value]:
    """The kind of an operator's norm, and what it is taken of: a mean that is subtracted in front of it belongs to it."""
    match kind:
        case "rms":
            centred, uncentred = _uncentred(source, axes)
            return ("layer", uncentred) if centred else ("rms", source)
        case "none" | "layer" | "l2":
            return kind, source
        case _:
            assert_never(kind)


def read_quotient(located: Located) -> tuple[Step, ...] | Unreadable | None:
    """x / size(x) or x * (1 / size(x)), where the size is written out in elementary operators; x may be weighted already."""
    for row, size, node in _quotients(located.value):
        if size is None or not _has_its_axes(size, row, node):
            continue
        for source, weight in _weighted(row, located):
            centred, source = _uncentred(source, size.axes)
            of_centred, of_source = (True, size.row) if size.centred else _uncentred(size.row, size.axes)
            if centred != of_centred or not same_row(source, of_source):
                continue
            axis = _norm_axis(located.layout, size.axes, node)
            if isinstance(axis, Unreadable):
                return axis
            norm = _as_norm(size, axis, located, centred=centred, node=node)
            inner = located.at(source, located.layout)
            return norm if isinstance(norm, Unreadable) else (*(Step(factor, inner) for factor in weight), Step(norm, inner))
    return None


def _weighted(row: ir.Value, located: Located) -> list[tuple[ir.Value, tuple[Factor, ...]]]:
    """What may have been normalised: `row`, or the tensor that a weight was multiplied with to make it."""
    found: list[tuple[ir.Value, tuple[Factor, ...]]] = [(row, ())]
    node = producer(row, "Mul")
    if node is None:
        return found
    for index in (0, 1):
        source, weight = input_of(node, index), input_of(node, 1 - index)
        if source is not None and weight is not None and weight.producer() is None and weight.shape is not None:
            found.append((source, (Factor(unrepeated(weight, located.layout), node=node),)))
    return found


def _has_its_axes(size: RowSize, row: ir.Value, node: ir.Node) -> bool:
    """Whether the axes that the statistic lost were put back where they were."""
    if size.flat:
        return False
    if not size.reshaped:
        return True
    dims = dims_of(row)
    wanted = [1 if axis in size.axes else dim for axis, dim in enumerate(dims or ())]
    divisors = [dims_of(value) for value in node.inputs if value is not None and value is not row]
    return any(len(found or ()) == len(wanted) and all(map(same_size, found or (), wanted)) for found in divisors)


NORM_READERS: tuple[NormReader, ...] = (
    read_operator,
    read_quotient,
    read_group_norm,
    read_instance_norm,
    read_norm_of_each_head,
)


def _quotients(value: ir.Value) -> list[tuple[ir.Value, RowSize | None, ir.Node]]:
    node = producer(value, "Mul", "Div")
    if node is None or len(node.inputs) != 2 or node.inputs[0] is None or node.inputs[1] is None:
        return []
    first, second = node.inputs[0], node.inputs[1]
    if node.op_type == "Div":
        return [(first, read_size(second), node)]
    return [(first, read_inverse_size(second), node), (second, read_inverse_size(first), node)]


def _norm_axis(layout: Layout, axes: tuple[int, ...], node: ir.Node) -> NormAxis | Unreadable:
    letters = letters_of(tuple(layout[axis] for axis in axes))
    if letters == "D":
        return "head"
    if letters in ("HD", "DH"):
        return "hidden"
    names = {"B": "the batch", "H": "the heads", "S": "the positions", "D": "the head"} | {
        "K": "key heads",
        "G": "their query heads",
        "E": "groups",
    }
    over = " and ".join(names.get(letter, letter) for letter in letters) or "an axis of size 1"
    reason = f"it is normalised over {over}, not over the values of a head or of all heads"
    return Unreadable(reason, node, "this is not QK-Norm: normalise over the last axis, the values of a head, if that was meant")


def _uncentred(row: ir.Value, axes: tuple[int, ...]) -> tuple[bool, ir.Value]:
    """Whether `row` is y - mean(y), and y."""
    node = producer(row, "Sub", "Cast")
    if node is not None and node.op_type == "Cast" and node.inputs[0] is not None:
        centred, source = _uncentred(node.inputs[0], axes)
        return (True, source) if centred else (False, row)
    if node is None or node.inputs[0] is None or node.inputs[1] is None:
        return False, row
    shifted, mean = node.inputs[0], mean_of(node.inputs[1])
    if mean is None or mean[1] != axes or not same_row(shifted, mean[0]):
        return False, row
    # A mean that lost its axis is broadcast along another one.
    return (True, shifted) if rank_of(node.inputs[1]) == rank_of(shifted) else (False, row)


def _as_norm(size: RowSize, axis: NormAxis, located: Located, *, centred: bool, node: ir.Node) -> Norm | Unreadable:
    # sqrt(r * s + eps) = sqrt(r) * sqrt(s + eps / r), and likewise for the other epsilons
    root = size.ratio**0.5
    size = dataclasses.replace(
        size, inside=size.inside / size.ratio, least=size.least / root, added=size.added / root, factor=size.factor / root
    )
    match size.statistic:
        case "mean":
            epsilon, mode = _epsilon_of(size)
            kind: NormKind = "layer" if centred else "rms"
            return Norm(kind=kind, axis=axis, epsilon=epsilon, mode=mode, weight_factor=size.factor, node=node)
        case "sum" if centred:
            return Unreadable("its values are centred and then divided by their L2 norm", node, CENTRED_HINT)
        case "sum":
            return _of_sum(size, axis, located, node=node)
        case _:
            assert_never(size.statistic)


def _of_sum(size: RowSize, axis: NormAxis, located: Located, *, node: ir.Node) -> Norm | Unreadable:
    if size.inside:
        count = _row_length(located, axis)
        if count is None:
            return Unreadable("the number of values that it is normalised over is not fixed", node, FIXED_HINT)
        # x / sqrt(sum + eps) = (x / sqrt(mean + eps / n)) / sqrt(n)
        factor = size.factor / float(count) ** 0.5
        return Norm(kind="rms", axis=axis, epsilon=size.inside / count, mode="inside_sqrt", weight_factor=factor, node=node)
    if size.added:
        return Norm(kind="l2", axis=axis, epsilon=size.added, mode="outside_sqrt", weight_factor=size.factor, node=node)
    return Norm(kind="l2", axis=axis, epsilon=size.least, mode="clamp", weight_factor=size.factor, node=node)


def _epsilon_of(size: RowSize) -> tuple[float, EpsilonMode]:
    if size.least:
        return size.least, "clamp"
    return (size.added, "outside_sqrt") if size.added else (size.inside, "inside_sqrt")


def _row_length(located: Located, axis: NormAxis) -> int | None:
    head, heads = located.static("D"), located.static("H")
    if not spans_heads(axis) or head is None:
        return head
    return head * heads if heads is not None else None
