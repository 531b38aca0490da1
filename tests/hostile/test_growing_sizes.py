"""Sizes and masks that grow with every node, written out to a power of two, are followed up to a bound only."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import qknorm_onnx as qk
from tests.hostile.test_bounds import SECONDS, seconds


def of_nodes(nodes: list[onnx.NodeProto], inputs: dict[str, list[object]]) -> onnx.ModelProto:
    """A model of `nodes` from float inputs to `y`; the number `seven` is a weight."""
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in inputs.items()]
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", given, [result], [numpy_helper.from_array(np.array([7]), "seven")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def doubled() -> onnx.ModelProto:
    """A tensor joined with itself, again and again."""
    names = ["x", *(f"v{place}" for place in range(1, 100)), "y"]
    nodes = [helper.make_node("Concat", [names[place]] * 2, [names[place + 1]], axis=0) for place in range(100)]
    return of_nodes(nodes, {"x": ["b", 4]})


def squared() -> onnx.ModelProto:
    """A size times itself, again and again."""
    nodes = [helper.make_node("Shape", ["x"], ["s0"])]
    nodes += [helper.make_node("Mul", [f"s{place}"] * 2, [f"s{place + 1}"]) for place in range(60)]
    return of_nodes([*nodes, helper.make_node("ConstantOfShape", ["s60"], ["y"])], {"x": ["b", 4]})


def maxima() -> onnx.ModelProto:
    """A sum of 30 maxima, compared: as logic, 2^30 comparisons."""
    inputs = {f"x{place}": [f"b{place}", 4] for place in range(60)}
    nodes = [helper.make_node("Shape", [name], [f"s{place}"], end=1) for place, name in enumerate(inputs)]
    nodes += [helper.make_node("Max", [f"s{2 * place}", f"s{2 * place + 1}"], [f"m{place}"]) for place in range(30)]
    sums = ["m0", *(f"t{place}" for place in range(1, 30))]
    nodes += [helper.make_node("Add", [sums[place - 1], f"m{place}"], [sums[place]]) for place in range(1, 30)]
    nodes += [
        helper.make_node("Less", ["t29", "seven"], ["c"]),
        helper.make_node("Where", ["c", "seven", "s0"], ["w"]),
        helper.make_node("ConstantOfShape", ["w"], ["y"]),
    ]
    return of_nodes(nodes, inputs)


@pytest.mark.parametrize("model", [doubled, squared, maxima])
def test_growth_is_not_followed_without_measure(model):
    assert seconds(qk.fuse, model()) < SECONDS[10_000]
