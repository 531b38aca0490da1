"""Writes at constant places become joins of the same parts, and a choice between truth values becomes And and Or."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from qknorm_onnx.graph.passes.prepare import PreparePass

HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'
TURN = "perm = [2, 1, 0]"


def writes(*places, base="computed", turned=True):
    """y = x of three axes after writes of parts at `places` along the last axis (turned) or the first one."""
    lines, constants, inputs = [], [], ["float[6, N, 6] x"]
    lines.append({"computed": "base = Add(x, x)", "input": "base = Identity(x)", "zeros": "base = Sub(x, x)"}[base])
    for number, places_of_one in enumerate(places):
        count = len(places_of_one)
        inputs.append(f"float[6, N, {count}] p{number}" if turned else f"float[{count}, N, 6] p{number}")
        constants.append(f"int64[{count}, 1] i{number} = {{{', '.join(map(str, places_of_one))}}}")
        data = "base" if number == 0 else f"w{number - 1}"
        if turned:
            lines += [f"d{number} = Transpose<{TURN}>({data})", f"t{number} = Transpose<{TURN}>(p{number})"]
            lines += [f"s{number} = ScatterND(d{number}, i{number}, t{number})", f"w{number} = Transpose<{TURN}>(s{number})"]
        else:
            lines.append(f"w{number} = ScatterND({data}, i{number}, p{number})")
    lines.append(f"y = Identity(w{len(places) - 1})")
    body = "\n  ".join(lines)
    return f"{HEADER}g ({', '.join(inputs)}) => (float[6, N, 6] y) <{', '.join(constants)}> {{\n  {body}\n}}\n"


OPENED = {
    "even and odd": (writes((0, 2, 4), (1, 3, 5), base="zeros"), {"Concat", "Reshape"}),
    "odd, then even": (writes((1, 3, 5), (0, 2, 4), turned=False), {"Concat", "Reshape"}),
    "three in turn": (writes((0, 3), (1, 4), (2, 5)), {"Concat", "Reshape"}),
    "halves": (writes((3, 4, 5), (0, 1, 2)), {"Concat"}),
    "the end": (writes((2, 3, 4, 5)), {"Concat", "Slice"}),
    "the beginning": (writes((0, 1), turned=False), {"Concat", "Slice"}),
    "from behind": (writes((-2, -1)), {"Concat", "Slice"}),
    "one over another": (writes((0, 1, 2), (2, 3, 4, 5)), {"Concat", "Slice"}),
    "all of it": (writes((0, 1, 2, 3, 4, 5)), set()),
}
KEPT = {
    "into an input": writes((2, 3), base="input"),
    "in no order": writes((5, 0, 3)),
    "one place twice": writes((2, 2, 3)),
}


def run(model, seed=0):
    generator = np.random.default_rng(seed)
    feeds = {}
    for value in model.graph.input:
        shape = [dim.dim_value or 3 for dim in value.type.tensor_type.shape.dim]
        boolean = value.type.tensor_type.elem_type == onnx.TensorProto.BOOL
        feeds[value.name] = generator.random(shape) > 0.5 if boolean else generator.standard_normal(shape).astype(np.float32)
    return ReferenceEvaluator(model).run(None, feeds)[0]


def prepared(text):
    before = onnx.parser.parse_model(text)
    model = ir.from_proto(before)
    PreparePass()(model)
    after = ir.to_proto(model)
    np.testing.assert_array_equal(run(before), run(after))
    return [node.op_type for node in after.graph.node]


@pytest.mark.parametrize("name", OPENED)
def test_writes_are_joins(name):
    text, expected = OPENED[name]
    operators = prepared(text)
    assert "ScatterND" not in operators
    assert expected <= set(operators)


@pytest.mark.parametrize("name", KEPT)
def test_writes_that_stay(name):
    if name == "one place twice":  # which of both is kept is not said, so that nothing can be compared
        model = ir.from_proto(onnx.parser.parse_model(KEPT[name]))
        PreparePass()(model)
        assert "ScatterND" in [node.op_type for node in model.graph]
    else:
        assert "ScatterND" in prepared(KEPT[name])


@pytest.mark.parametrize("condition", ["bool[N, 1] c", "bool[4] c", "bool[N, 4] c"])
def test_choice_between_truth_values(condition):
    inputs = f"{condition}, bool[N, 4] a, bool[1, 4] b"
    operators = prepared(f"{HEADER}g ({inputs}) => (bool[N, 4] y) {{\n  y = Where(c, a, b)\n}}\n")
    assert "Where" not in operators
    assert {"And", "Or", "Not"} <= set(operators)
