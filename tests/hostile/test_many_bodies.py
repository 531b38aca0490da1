"""Graphs of many nodes are inferred in pieces, which changes nothing; bodies too many for inference are refused."""

from __future__ import annotations

import random

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import qknorm_onnx as qk
from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.model_file import load_model
from qknorm_onnx.graph.soundness import inference
from tests.hostile import seeds
from tests.hostile.large_files import KINDS
from tests.hostile.test_bounds import SECONDS, seconds

FLOAT = TensorProto.FLOAT


def verdicts(model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether inference finds a fault: in the model as a whole, and in pieces of one node and of a few."""
    found = [inference.inference_fault(model) is not None]
    monkeypatch.setattr(inference, "_LARGEST_WHOLE", 0)
    for size in (1, 3):
        monkeypatch.setattr(inference, "_PIECE", size)
        found.append(inference.inference_fault(model) is not None)
    monkeypatch.undo()
    return found


def chained(*nodes: onnx.NodeProto, output: list[object] | None = None, dtype: int = FLOAT) -> onnx.ModelProto:
    """Nodes from `x` (2, 3) and `flag` to `y`; the numbers `to` are a weight."""
    inputs = [helper.make_tensor_value_info("x", FLOAT, [2, 3]), helper.make_tensor_value_info("flag", TensorProto.BOOL, [])]
    weights = [numpy_helper.from_array(np.array([3, 2], np.int64), "to")]
    result = helper.make_tensor_value_info("y", dtype, output)
    graph = helper.make_graph(list(nodes), "g", inputs, [result], weights)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("elsewhere", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def reshaped_by_constant() -> tuple[onnx.NodeProto, ...]:
    """`v` (3, 2) by the numbers of a Constant, two nodes further on."""
    made = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.array([3, 2], np.int64)))
    return (made, helper.make_node("Neg", ["x"], ["n"]), helper.make_node("Reshape", ["n", "c"], ["v"]))


def branch(op_type: str, value: str) -> onnx.NodeProto:
    """An If of which both bodies apply `op_type` to `value`."""
    bodies = {}
    for place in ("then", "else"):
        result = helper.make_tensor_value_info(f"{place}_out", FLOAT, None)
        body = [helper.make_node(op_type, [value], [f"{place}_out"])]
        bodies[f"{place}_branch"] = helper.make_graph(body, place, [], [result])
    return helper.make_node("If", ["flag"], ["y"], **bodies)


NEG = helper.make_node("Neg", ["x"], ["v"])
STRANGE = helper.make_node("Strange", ["x"], ["s"], domain="elsewhere")
WRONG_NOT = helper.make_node("Not", ["v"], ["y"])
WRONG_PERM = helper.make_node("Transpose", ["v"], ["y"], perm=[0, 1, 2])
FAULTS = {
    "a shape that a constant decides": chained(*reshaped_by_constant(), helper.make_node("Abs", ["v"], ["y"]), output=[4, 2]),
    "a shape that a weight decides": chained(NEG, helper.make_node("Reshape", ["v", "to"], ["y"]), output=[9]),
    "a type": chained(NEG, WRONG_NOT, dtype=TensorProto.BOOL),
    "a wrong shape": chained(NEG, WRONG_PERM),
    "the type of the output": chained(NEG, helper.make_node("Abs", ["v"], ["y"]), dtype=TensorProto.INT64),
    "the type inside a body": chained(NEG, branch("Not", "v")),
}
SOUND = {
    "a shape that a constant decides": chained(*reshaped_by_constant(), helper.make_node("Abs", ["v"], ["y"]), output=[3, 2]),
    "a body that reads what is far before": chained(NEG, helper.make_node("Abs", ["v"], ["w"]), branch("Relu", "v")),
    "behind what nobody knows, a wrong shape": chained(STRANGE, NEG, WRONG_PERM),
    "what nobody knows, read": chained(STRANGE, helper.make_node("Abs", ["s"], ["y"])),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_pieces_find_the_faults_that_the_whole_has(kind, monkeypatch):
    assert verdicts(FAULTS[kind], monkeypatch) == [True] * 3


@pytest.mark.parametrize("kind", SOUND)
def test_pieces_refuse_nothing_that_the_whole_passes(kind, monkeypatch):
    assert verdicts(SOUND[kind], monkeypatch) == [False] * 3


@pytest.mark.parametrize("seed", ["spelled", "canonical", "branching", "plain"])
def test_random_changes_are_judged_alike(seed, monkeypatch):
    generator, sound = random.Random(seed), getattr(seeds, seed)()
    operators = ("Not", "Neg", "Add", "Reshape", "Transpose", "Concat", "MatMul", "Cast", "Strange")
    judged = []
    for _ in range(40):
        model = onnx.ModelProto()
        model.CopyFrom(sound)
        nodes = model.graph.node
        changed = generator.choice(nodes)
        if generator.random() < 0.5 or not changed.input:
            changed.op_type = generator.choice(operators)
        else:
            changed.input[0] = generator.choice(generator.choice(nodes).input or [""])
        found = verdicts(model, monkeypatch)
        assert len(set(found)) == 1, f"{changed}: {found}"
        judged.append(found[0])
    assert len(set(judged)) == 2, "some changes are faults, and some are not"


def in_a_body(model: onnx.ModelProto) -> onnx.ModelProto:
    """All nodes of `model` in both branches of an If."""
    outer = onnx.ModelProto()
    outer.CopyFrom(model)
    del outer.graph.node[:]
    result = helper.make_tensor_value_info("y", FLOAT, None)
    other = helper.make_graph([helper.make_node("Abs", ["x"], ["y_else"])], "else", [], [result])
    other.output[0].name = "y_else"
    inner = helper.make_graph(model.graph.node, "then", [], [helper.make_tensor_value_info("y", FLOAT, None)])
    for node in inner.node:
        node.output[:] = ["y_then" if name == "y" else name for name in node.output]
    inner.output[0].name = "y_then"
    outer.graph.node.append(helper.make_node("If", ["flag"], ["y"], name="outer", then_branch=inner, else_branch=other))
    return outer


def in_a_function(model: onnx.ModelProto, calls: int) -> onnx.ModelProto:
    """All nodes of `model` in a function, called one behind the other."""
    outer = onnx.ModelProto()
    outer.CopyFrom(model)
    del outer.graph.node[:]
    outer.opset_import.append(helper.make_opsetid("many", 1))
    imports = [helper.make_opsetid("", 20)]
    outer.functions.append(helper.make_function("many", "F", ["x", "flag"], ["y"], list(model.graph.node), imports))
    names = ["x", *(f"between{place}" for place in range(1, calls)), "y"]
    outer.graph.node.extend(
        helper.make_node("F", [names[place], "flag"], [names[place + 1]], domain="many") for place in range(calls)
    )
    return outer


def test_bodies_too_many_inside_a_body_are_refused():
    model = in_a_body(KINDS["branches"](33_000))
    with pytest.raises(InputError, match=r"node 'outer' \(If\) holds too many bodies inside its own; write .* Where"):
        load_model(model)


def test_bodies_too_many_in_all_calls_of_a_function_are_refused():
    with pytest.raises(InputError, match=r"the function many::F holds too many bodies, called 20 times"):
        load_model(in_a_function(KINDS["branches"](9_000), 20))


@pytest.mark.parametrize("wrap", [in_a_body, lambda model: in_a_function(model, 3)])
def test_many_bodies_inside_one_are_read_in_time(wrap):
    model = wrap(KINDS["branches"](3_000))
    assert seconds(load_model, model) < SECONDS[10_000]


def loops_in_loops(depth: int) -> onnx.ModelProto:
    """Loops nested `depth` deep, each of which carries a state that gets an axis more in every turn."""
    names = {"float": FLOAT, "int": TensorProto.INT64, "bool": TensorProto.BOOL}

    def value(name: str, kind: str = "float", dims: list[int] | None = None) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, names[kind], dims)

    def body(level: int) -> onnx.GraphProto:
        nodes = [
            helper.make_node("Identity", [f"go{level}"], [f"goes{level}"]),
            helper.make_node("Unsqueeze", [f"state{level}", "zero"], [f"next{level}"]),
        ]
        if level + 1 < depth:
            nodes.append(helper.make_node("Loop", ["three", "", "x"], [f"inner{level}"], body=body(level + 1)))
        inputs = [value(f"turn{level}", "int", []), value(f"go{level}", "bool", []), value(f"state{level}")]
        return helper.make_graph(nodes, f"body{level}", inputs, [value(f"goes{level}", "bool", []), value(f"next{level}")])

    node = helper.make_node("Loop", ["three", "", "x"], ["y"], body=body(0))
    weights = [numpy_helper.from_array(np.array(3), "three"), numpy_helper.from_array(np.array([0]), "zero")]
    graph = helper.make_graph([node], "g", [value("x", "float", [2, 4])], [value("y")], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def test_loops_in_loops_are_derived_a_few_times_each():
    """Anew for each change of each loop around it, a body 25 deep would be derived 2^25 times."""
    assert seconds(qk.fuse, loops_in_loops(25)) < SECONDS[10_000]
