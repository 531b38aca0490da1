"""Small sound models that hostile files are made from: every kind of thing that a file can have is in one of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

import qknorm_onnx as qk
from tests.graph.attention_text import Spelling, attention_model

FLOAT = TensorProto.FLOAT
CANONICAL_OUTPUTS = ("Y", "present_key", "present_value")


def spelled() -> onnx.ModelProto:
    """QK-Norm attention as its exporter spelled it: 6 query heads, 2 key heads, rotary."""
    return named(ir.to_proto(attention_model(Spelling())))


def canonical() -> onnx.ModelProto:
    """The same as one node of our own, with its function body."""
    return named(qk.fuse(spelled(), verify=False).to_proto())


def plain() -> onnx.ModelProto:
    """Two products with weights, without attention."""
    weights = [_weight("w1", (4, 6)), _weight("w2", (6, 3))]
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"], name="first"),
        helper.make_node("Relu", ["h"], ["r"], name="relu"),
        helper.make_node("MatMul", ["r", "w2"], ["y"], name="second"),
    ]
    return _model(nodes, weights, inputs=[("x", FLOAT, ["n", 4])], outputs=[("y", FLOAT, ["n", 3])])


def branching() -> onnx.ModelProto:
    """An If in an If, and a Loop, whose bodies read values from around them."""
    inner = helper.make_graph([helper.make_node("Neg", ["x"], ["a"])], "inner", [], [_value("a", FLOAT, None)])
    other = helper.make_graph([helper.make_node("Abs", ["x"], ["b"])], "other", [], [_value("b", FLOAT, None)])
    middle_node = helper.make_node("If", ["flag"], ["c"], then_branch=inner, else_branch=other)
    middle = helper.make_graph([middle_node], "middle", [], [_value("c", FLOAT, None)])
    last = helper.make_graph([helper.make_node("Identity", ["x"], ["d"])], "last", [], [_value("d", FLOAT, None)])
    body = helper.make_graph(
        [helper.make_node("Add", ["state", "e"], ["next"]), helper.make_node("Identity", ["go"], ["goes"])],
        "body",
        [_value("i", TensorProto.INT64, []), _value("go", TensorProto.BOOL, []), _value("state", FLOAT, None)],
        [_value("goes", TensorProto.BOOL, []), _value("next", FLOAT, None)],
    )
    nodes = [
        helper.make_node("If", ["flag"], ["e"], name="outer", then_branch=middle, else_branch=last),
        helper.make_node("Loop", ["three", "", "x"], ["y"], name="loop", body=body),
    ]
    constants = [numpy_helper.from_array(np.array(3, np.int64), "three")]
    inputs = [("x", FLOAT, ["n"]), ("flag", TensorProto.BOOL, [])]
    return _model(nodes, constants, inputs=inputs, outputs=[("y", FLOAT, ["n"])])


def with_functions() -> onnx.ModelProto:
    """A function of another domain that calls a second one, with an attribute."""
    opset = [helper.make_opsetid("", 20)]
    both = [*opset, helper.make_opsetid("other.functions", 1)]
    scale = helper.make_node("Constant", [], ["factor"])
    scale.attribute.append(onnx.AttributeProto(name="value_float", ref_attr_name="by", type=onnx.AttributeProto.FLOAT))
    scaled = helper.make_function(
        "other.functions", "Scaled", ["a"], ["b"], [scale, helper.make_node("Mul", ["a", "factor"], ["b"])], opset, ["by"]
    )
    twice = helper.make_function(
        "other.functions",
        "Twice",
        ["a"],
        ["b"],
        [
            helper.make_node("Scaled", ["a"], ["half"], domain="other.functions", by=2.0),
            helper.make_node("Scaled", ["half"], ["b"], domain="other.functions", by=0.5),
        ],
        both,
    )
    nodes = [
        helper.make_node("Twice", ["x"], ["t"], name="call", domain="other.functions"),
        helper.make_node("Add", ["t", "w"], ["y"], name="add"),
    ]
    model = _model(nodes, [_weight("w", (4,))], inputs=[("x", FLOAT, ["n", 4])], outputs=[("y", FLOAT, ["n", 4])])
    model.functions.extend([scaled, twice])
    model.opset_import.append(helper.make_opsetid("other.functions", 1))
    return model


SEEDS = {
    "spelled": spelled,
    "canonical": canonical,
    "plain": plain,
    "branching": branching,
    "functions": with_functions,
}


def with_external_weights(path: Path, model: onnx.ModelProto | None = None) -> onnx.ModelProto:
    """`model` (the plain one) saved to `path` with its weights in `weights.data` beside it; returns what lies in the file."""
    model = plain() if model is None else model
    onnx.save(model, path, save_as_external_data=True, location="weights.data", size_threshold=0)
    return onnx.load(path, load_external_data=False)


def named(model: onnx.ModelProto) -> onnx.ModelProto:
    model.graph.name = model.graph.name or "graph"
    return model


def _model(nodes, weights, *, inputs, outputs, ir_version=10) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes, "graph", [_value(*item) for item in inputs], [_value(*item) for item in outputs], initializer=weights
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=ir_version)


def _value(name, kind, shape):
    return helper.make_tensor_value_info(name, kind, shape)


def _weight(name, shape):
    array = np.random.default_rng(len(name)).standard_normal(shape).astype(np.float32)
    return numpy_helper.from_array(array, name)


def linear_module():
    """A PyTorch module with one input, for `validate`."""
    import torch

    return torch.nn.Linear(4, 3), (torch.randn(2, 4),)
