"""Norms over groups of channels of each token, and norms that are written head by head."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.match.fragments import Factor, Norm, Offset, Step
from qknorm_onnx.graph.match.located import Located, Parameter, Unreadable
from qknorm_onnx.graph.walk.constants import attribute_float, attribute_int, constant, input_of, producer
from qknorm_onnx.graph.walk.layout import dims_of

Steps = tuple[Step, ...]


def read_instance_norm(located: Located) -> Steps | Unreadable | None:
    """GroupNorm over the channels of a token: Reshape (.., H*D) -> (N, G, H*D / G), InstanceNormalization, and back."""
    back = producer(located.value, "Reshape")
    node = producer(back.inputs[0], "InstanceNormalization") if back is not None else None
    there = producer(node.inputs[0], "Reshape") if node is not None else None
    if node is None or there is None or there.inputs[0] is None or node.inputs[0] is None:
        return None
    scale, shift = constant(input_of(node, 1)), constant(input_of(node, 2))
    dims = dims_of(node.inputs[0])
    if scale is None or shift is None or dims is None or len(dims) != 3 or not np.all(scale == 1) or shift.any():
        return None
    if dims_of(there.inputs[0]) != dims_of(located.value) and not _same_rank(there.inputs[0], located.value):
        return None
    return _grouped(located, there.inputs[0], dims[1], node)


def read_group_norm(located: Located) -> Steps | Unreadable | None:
    """GroupNormalization (opset 21 and newer) of a matrix (tokens, H*D), with a weight and a bias per channel."""
    node = producer(located.value, "GroupNormalization")
    if node is None or node.inputs[0] is None or len(located.layout) != 2:
        return None
    norm = _grouped(located, node.inputs[0], attribute_int(node, "num_groups", 1), node)
    if norm is None or isinstance(norm, Unreadable):
        return norm
    steps: list[Step] = []
    for index, fragment in ((2, Offset), (1, Factor)):
        operand = input_of(node, index)
        if operand is not None:
            steps.append(Step(fragment(Parameter(operand, located.layout[-1:]), node=node), norm[0].source))
    return (*steps, *norm)


def _grouped(located: Located, source: ir.Value, groups: object, node: ir.Node) -> Steps | Unreadable | None:
    """The norm over `groups` groups of the last axis: parts of heads, whole heads, or several heads at a time."""
    heads, size = located.static("H"), located.static("D")
    if heads is None or size is None or not isinstance(groups, int) or located.layout[-1] not in ("HD", "D"):
        return None
    rows = heads if located.layout[-1] == "HD" else 1
    epsilon = attribute_float(node, "epsilon", 1e-5)
    inner = located.at(source, located.layout)
    if groups % rows == 0:
        norm = Norm(kind="layer", axis="head", groups=groups // rows, epsilon=epsilon, mode="inside_sqrt", node=node)
    else:
        norm = Norm(kind="layer", axis="hidden", groups=groups, epsilon=epsilon, mode="inside_sqrt", node=node)
    return (Step(norm, inner),)


def _same_rank(first: ir.Value, second: ir.Value) -> bool:
    a, b = dims_of(first), dims_of(second)
    return a is not None and b is not None and len(a) == len(b)


def read_norm_of_each_head(located: Located) -> Steps | Unreadable | None:
    """Split into heads, one LayerNormalization with its own weight for each, Concat."""
    concat = producer(located.value, "Concat")
    heads = located.static("H")
    if concat is None or heads is None or len(concat.inputs) != heads:
        return None
    axis = attribute_int(concat, "axis", 0) % len(located.layout)
    nodes = [producer(operand, "LayerNormalization") for operand in concat.inputs]
    norms = [node for node in nodes if node is not None]
    splits = {producer(node.inputs[0], "Split") for node in norms}
    split = next(iter(splits)) if len(splits) == 1 else None
    if located.layout[axis] != "H" or len(norms) != heads or split is None or split.inputs[0] is None:
        return None
    in_order = [node.inputs[0] is output for node, output in zip(norms, split.outputs, strict=False)]
    split_axis = attribute_int(split, "axis", 0) % len(located.layout)
    if split_axis != axis or len(split.outputs) != heads or not all(in_order):
        return None
    epsilons = {attribute_float(node, "epsilon", 1e-5) for node in norms}
    axes = {attribute_int(node, "axis", -1) % len(located.layout) for node in norms}
    if len(epsilons) != 1 or axes != {len(located.layout) - 1} or located.layout[-1] != "D":
        return Unreadable(
            "its heads are normalised differently", concat, "use one kind of norm, one epsilon and one axis for all heads"
        )
    inner = located.at(split.inputs[0], located.layout)
    steps: list[Step] = []
    for index, fragment in ((2, Offset), (1, Factor)):
        stacked = _stacked([input_of(node, index) for node in norms], concat)
        if isinstance(stacked, Unreadable):
            return stacked
        if stacked is not None:
            steps.append(Step(fragment(stacked, node=concat), inner))
    norm = Norm(kind="layer", axis="head", epsilon=epsilons.pop(), mode="inside_sqrt", node=concat)
    return (*steps, Step(norm, inner))


def _stacked(values: list[ir.Value | None], node: ir.Node) -> Parameter | Unreadable | None:
    """The parameters of all heads as one constant (H, D)."""
    if all(value is None for value in values):
        return None
    arrays = [array for value in values if (array := constant(value)) is not None]
    if len(arrays) != len(values) or len({array.shape for array in arrays}) != 1:
        return Unreadable(
            "the weights of its heads are no constants", node, "make them initializers that are no inputs of the graph"
        )
    stack = np.stack(arrays)
    name = f"{node.outputs[0].name}/weights_of_heads"
    tensor = ir.tensor(stack, name=name)
    value = ir.Value(name=name, shape=ir.Shape(stack.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    return Parameter(value, ("H", "D"))
