"""`validate`: outputs by name, what a failed row says, and modules with `torch.cond`."""

from __future__ import annotations

import onnx.helper as oh
import pytest
import torch

from qknorm_onnx.validation.validate import validate
from tests.runtime.test_validate import DOUBLE_X, Function, X, graph


def named_outputs(*names):
    nodes = [oh.make_node("Add", ["x", "x"], ["twice"]), oh.make_node("Neg", ["x"], ["minus"])]
    return graph(nodes, outputs=names)


@pytest.mark.parametrize(("names", "passed"), [(("minus", "twice"), True), (("twice", "minus"), True), (("minus",), False)])
def test_outputs_go_by_name_where_module_and_graph_have_the_same_ones(names, passed):
    module = Function(lambda module, x: {"twice": x + x, "minus": -x})
    report = validate(named_outputs(*names), module, kwargs=X)
    assert report.passed == passed, report.summary()


def test_outputs_with_exchanged_names_fail():
    nodes = [oh.make_node("Add", ["x", "x"], ["minus"]), oh.make_node("Neg", ["x"], ["twice"])]
    module = Function(lambda module, x: {"twice": x + x, "minus": -x})
    assert not validate(graph(nodes, outputs=("minus", "twice")), module, kwargs=X).passed


def test_outputs_without_names_go_in_order():
    assert validate(named_outputs("twice", "minus"), Function(lambda module, x: (x + x, -x)), kwargs=X).passed
    assert not validate(named_outputs("minus", "twice"), Function(lambda module, x: (x + x, -x)), kwargs=X).passed


def test_a_module_with_torch_cond_is_judged():
    module = Function(lambda module, x: torch.cond(x.sum() > 1e9, lambda x: x - x, lambda x: x + x, (x,)))
    report = validate(graph(DOUBLE_X), module, kwargs=X, dtypes=("float32", "float16"))
    assert report.passed, report.summary()
    assert not any("float64" in note for note in report.notes)


def test_a_failed_row_says_what_its_case_is_for():
    report = validate(graph([oh.make_node("Sub", ["x", "x"], ["y"])]), Function(lambda module, x: x + x), kwargs=X)
    assert {row.case: row.purpose for row in report.failures}["batch 1"] == "a batch that is built in"
    assert "no attention mask among the inputs: padding untried" in report.notes
