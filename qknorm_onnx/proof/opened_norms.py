"""GroupQueryAttention with norms inside, which only the CUDA provider runs, as its documentation defines it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.recognise.attention.group_query import NORM_INPUTS, norm_epsilon, normalises_inside


def has_norms_inside(region: ir.Model) -> bool:
    """Whether a GroupQueryAttention of `region` normalises its queries and keys itself."""
    return any(normalises_inside(node) for node in region.graph)


def with_norms_in_front(region: ir.Model) -> ir.Model:
    """A copy in which those norms are a SimplifiedLayerNormalization of each head in front of the operator."""
    copy = region.clone()
    for node in list(copy.graph):
        if normalises_inside(node):
            for operand, norm_input in enumerate(NORM_INPUTS):
                _take_out(node, operand, norm_input)
    return copy


def _take_out(node: ir.Node, operand: int, norm_input: int) -> None:
    x, weight = node.inputs[operand], node.inputs[norm_input]
    assert isinstance(node.graph, ir.Graph) and x is not None and x.dtype is not None and x.shape is not None
    assert weight is not None and weight.shape is not None, "the operator takes both weights or none"
    size, width = weight.shape[0], x.shape[2]
    assert isinstance(size, int) and isinstance(width, int), "the operator was recognised, so that the sizes are known"
    shapes = []
    for label, target in (("heads", [0, 0, width // size, size]), ("merged", [0, 0, width])):
        tensor = ir.tensor(np.asarray(target, dtype=np.int64), name=f"{x.name}/{norm_input}/{label}")
        shapes.append(
            ir.Value(name=tensor.name, shape=ir.Shape([len(target)]), type=ir.TensorType(tensor.dtype), const_value=tensor)
        )
        node.graph.register_initializer(shapes[-1])
    split = ir.node("Reshape", [x, shapes[0]])
    norm = ir.node(
        "SimplifiedLayerNormalization", [split.outputs[0], weight], {"axis": -1, "epsilon": norm_epsilon(node, norm_input)}
    )
    merged = ir.node("Reshape", [norm.outputs[0], shapes[1]])
    for made in (split, norm, merged):
        made.outputs[0].type = x.type
    merged.outputs[0].shape = x.shape
    node.graph.insert_before(node, [split, norm, merged])
    node.replace_input_with(operand, merged.outputs[0])
    node.replace_input_with(norm_input, None)
