"""Functions are written out where they are called, in their own operator set or not at all, in time that grows with them."""

from __future__ import annotations

import sys

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import qknorm_onnx as qk
from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.passes.inline_functions import inline_functions
from qknorm_onnx.graph.soundness.guard import UNEXPECTED
from qknorm_onnx.inspection import inspect_model
from qknorm_onnx.runtime.value_types import flattened

FUNCTIONS = "other.functions"


def model_of(nodes, functions, *, opset=20, inputs=("x",), more_imports=()):
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in inputs]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])
    graph = helper.make_graph(nodes, "g", values, [output])
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(FUNCTIONS, 1), *more_imports]
    return helper.make_model(graph, opset_imports=imports, ir_version=10, functions=functions)


def function(name, inputs, outputs, nodes, *, opset=20, attributes=(), own_version=1):
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(FUNCTIONS, own_version)]
    return helper.make_function(FUNCTIONS, name, inputs, outputs, nodes, imports, list(attributes))


def call(name, inputs, outputs, **attributes):
    return helper.make_node(name, inputs, outputs, domain=FUNCTIONS, **attributes)


def run(model: onnx.ModelProto, **feeds):
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})


def inlined(model: onnx.ModelProto):
    result = ir.from_proto(model)
    outcome = inline_functions(result)
    proto = ir.to_proto(result)
    onnx.checker.check_model(proto)
    return proto, outcome


def x_of(rows=3):
    return np.random.default_rng(rows).standard_normal((rows, 4)).astype(np.float32)


def scaled() -> onnx.FunctionProto:
    factor = helper.make_node("Constant", [], ["factor"])
    factor.attribute.append(onnx.AttributeProto(name="value_float", ref_attr_name="by", type=onnx.AttributeProto.FLOAT))
    return function("Scaled", ["a"], ["b"], [factor, helper.make_node("Mul", ["a", "factor"], ["b"])], attributes=["by"])


def test_nested_calls_with_attributes_compute_the_same():
    inner = [call("Scaled", ["a"], ["half"], by=3.0), call("Scaled", ["half"], ["b"], by=0.5)]
    twice = function("Twice", ["a"], ["b"], inner)
    model = model_of([call("Twice", ["x"], ["t"]), call("Scaled", ["t"], ["y"], by=-7.0)], [scaled(), twice])
    proto, outcome = inlined(model)
    assert outcome.calls == 4
    assert outcome.kept == ()
    assert not proto.functions
    np.testing.assert_array_equal(run(proto, x=x_of())[0], x_of() * np.float32(3.0) * np.float32(0.5) * np.float32(-7.0))


def test_inputs_passed_on_outputs_given_twice_and_inputs_left_out():
    passed = function("Passed", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["unused"])])
    passed.output[0] = "a"
    both = function("Both", ["a"], ["b", "b"], [helper.make_node("Abs", ["a"], ["b"])])
    clipped = function("Clipped", ["a", "low", "high"], ["b"], [helper.make_node("Clip", ["a", "low", "high"], ["b"])])
    nodes = [
        call("Passed", ["x"], ["same"]),
        call("Both", ["same"], ["p", "q"]),
        helper.make_node("Sub", ["q", "x"], ["d"]),
        helper.make_node("Sub", ["d", "p"], ["e"]),
        helper.make_node("Constant", [], ["zero"], value_float=0.0),
        call("Clipped", ["e", "", "zero"], ["y"]),
    ]
    proto, outcome = inlined(model_of(nodes, [passed, both, clipped]))
    assert outcome.calls == 3
    np.testing.assert_array_equal(run(proto, x=x_of())[0], np.minimum(-x_of(), 0.0))


def test_calls_in_bodies_and_bodies_in_functions():
    def branch(name, op_type, source):
        output = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        return helper.make_graph([helper.make_node(op_type, [source], [name])], name, [], [output])

    chosen = helper.make_node(
        "If", ["flag"], ["b"], then_branch=branch("minus", "Neg", "a"), else_branch=branch("plus", "Abs", "a")
    )
    choose = function("Choose", ["flag", "a"], ["b"], [chosen])
    called = helper.make_graph(
        [call("Choose", ["flag", "x"], ["inside"])],
        "called",
        [],
        [helper.make_tensor_value_info("inside", TensorProto.FLOAT, None)],
    )
    outer = helper.make_node("If", ["flag"], ["o"], then_branch=called, else_branch=branch("other", "Exp", "x"))
    nodes = [outer, call("Choose", ["flag", "o"], ["y"])]
    model = model_of(nodes, [choose], inputs=("x", "flag"))
    model.graph.input[1].CopyFrom(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    proto, outcome = inlined(model)
    assert outcome.calls == 2
    for flag, expected in ((True, x_of()), (False, np.exp(x_of()))):
        np.testing.assert_allclose(run(proto, x=x_of(), flag=np.array(flag))[0], expected, rtol=1e-6)


def test_an_operator_that_is_the_same_in_both_opsets_is_written_out():
    older = function("Older", ["a"], ["b"], [helper.make_node("Softplus", ["a"], ["b"])], opset=18)
    proto, outcome = inlined(model_of([call("Older", ["x"], ["y"])], [older]))
    assert outcome.kept == ()
    np.testing.assert_allclose(run(proto, x=x_of())[0], np.log1p(np.exp(x_of())), rtol=1e-5)


def test_the_version_of_a_domain_of_functions_says_nothing():
    inner = function("Inner", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])], own_version=0)
    outer = function("Outer", ["a"], ["b"], [call("Inner", ["a"], ["b"])], own_version=7)
    proto, outcome = inlined(model_of([call("Outer", ["x"], ["y"])], [inner, outer]))
    assert outcome.calls == 2
    np.testing.assert_array_equal(run(proto, x=x_of())[0], -x_of())


def of_another_meaning() -> onnx.ModelProto:
    """Softmax of opset 12 takes all axes behind its own for one; that of opset 13 takes one axis."""
    older = function("Older", ["a"], ["b"], [helper.make_node("Softmax", ["a"], ["b"], axis=0)], opset=12)
    return model_of([call("Older", ["x"], ["y"])], [older])


@pytest.mark.parametrize("door", [qk.fuse, inspect_model, qk.create_session])
def test_an_operator_that_is_another_in_both_opsets_is_refused_in_one_line(door):
    with pytest.raises(InputError, match=r"12.*20") as refused:
        door(of_another_meaning())
    assert "Softmax" in str(refused.value)
    assert UNEXPECTED not in str(refused.value)


def of_another_vendor_version() -> onnx.ModelProto:
    """Nobody can say whether version 1 and 2 of a vendor's operator are the same."""
    vendor = helper.make_node("Fancy", ["a"], ["b"], domain="com.vendor")
    older = function("Older", ["a"], ["b"], [vendor])
    older.opset_import.append(helper.make_opsetid("com.vendor", 1))
    around = function("Around", ["a"], ["b"], [call("Older", ["a"], ["c"]), helper.make_node("Neg", ["c"], ["b"])])
    nodes = [call("Around", ["x"], ["t"]), helper.make_node("Fancy", ["t"], ["y"], domain="com.vendor")]
    return model_of(nodes, [older, around], more_imports=[helper.make_opsetid("com.vendor", 2)])


def test_a_function_that_may_mean_another_thing_stays_and_the_report_says_so(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(of_another_vendor_version(), path)
    program = qk.fuse(path)
    for notes in (program.report.notes, inspect_model(path).present.notes):
        assert len(notes) == 1
        assert "Older" in notes[0]
        assert "Fancy" in notes[0]
    written = program.to_proto()
    assert [(item.name, len(item.node)) for item in written.functions] == [("Older", 1)]
    assert [node.op_type for node in written.graph.node] == ["Older", "Neg", "Fancy"]
    assert qk.fuse(written).to_proto() == written


def test_what_must_be_written_out_is_refused_in_one_line():
    model = of_another_vendor_version()
    for imports in (model.opset_import, *(item.opset_import for item in model.functions)):
        imports[0].version = 17
    with pytest.raises(InputError, match=r"opset 17.*Older"):
        qk.fuse(model)
    with pytest.raises(InputError, match="Older"):
        flattened(ir.from_proto(of_another_vendor_version()))


def lines_run(count: int) -> int:
    """Lines of the inliner that run for `count` calls of one function in each other."""
    body = [helper.make_node("Neg", ["a"], ["c"]), helper.make_node("Relu", ["c"], ["b"])]
    nodes = [call("F", [f"v{i}" if i else "x"], [f"v{i + 1}" if i + 1 < count else "y"]) for i in range(count)]
    model = ir.from_proto(model_of(nodes, [function("F", ["a"], ["b"], body)]))
    ran = 0

    def trace(frame, event, _argument):
        nonlocal ran
        if "inline_functions" not in frame.f_code.co_filename:
            return None
        ran += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        inline_functions(model)
    finally:
        sys.settrace(before)
    return ran


def test_work_grows_with_the_calls_and_not_with_their_square():
    small, large = lines_run(100), lines_run(400)
    assert small > 1000
    assert large < 4.5 * small
