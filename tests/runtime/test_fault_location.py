"""A planted fault is found: the layer, the part of it, and the weight that the file lacks; and inner values in bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import onnx_ir as ir
import pytest

import qknorm_onnx as qk
from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.canonical.qk_norm_node import is_attention_node
from qknorm_onnx.graph.passes.attach_bodies import AttachBodiesPass
from qknorm_onnx.validation.cases.case import Case
from qknorm_onnx.validation.inside.inner_values import inner_values
from qknorm_onnx.validation.inside.logit_ranges import logit_ranges
from qknorm_onnx.validation.validate import validate
from tests.validation_mutants.text_model import TextForm, TextModel, example_of

FORM = TextForm(layers=4)


@pytest.fixture(scope="module")
def made():
    module, example = TextModel(FORM).eval(), example_of(FORM)
    return (
        module,
        qk.export(module, kwargs=example.kwargs, dynamic_shapes=example.dynamic_shapes, require_fusion=True).model,
        example,
    )


def with_other(model: ir.Model, part: str, change) -> ir.Model:
    """A copy in which the initializer whose name holds `part` is changed."""
    copy = model.clone()
    (value,) = (value for name, value in copy.graph.initializers.items() if part in name)
    value.const_value = ir.tensor(np.ascontiguousarray(change(value.const_value.numpy())), name=value.name)
    return copy


def test_a_gain_of_one_layer_is_found(made):
    module, model, example = made
    gain = "blocks.2.k_norm.gain"
    wrong = with_other(model, gain, lambda array: np.roll(array, 1))
    report = validate(wrong, module, kwargs=example.kwargs)
    assert not report.passed
    fault = next(row.fault for row in report.failures if row.fault is not None)
    assert fault.kind == "meaning"
    assert ".2." in fault.part
    assert f"no weight of the file is {gain}" in fault.text
    assert sum(row.fault is not None for row in report.failures) == 1, "one is followed unless more are asked for"


def test_a_spec_of_one_layer_is_found(made):
    module, model, example = made
    wrong = model.clone()
    node = [node for node in wrong.graph if is_attention_node(node)][1]
    node.attributes["scale"] = ir.AttrFloat32("scale", node.attributes["scale"].as_float() * 1.5)
    AttachBodiesPass()(wrong)
    report = validate(wrong, module, kwargs=example.kwargs, locate=2)
    faults = [row.fault for row in report.failures if row.fault is not None]
    assert len(faults) == 2
    assert all(".1." in fault.part and "no weight" not in fault.text for fault in faults)
    assert validate(wrong, module, kwargs=example.kwargs, locate=0).failures[0].fault is None


def test_inner_values_come_in_parts_and_are_the_same(made):
    _, model, example = made
    inputs = {name: tensor.numpy() for name, tensor in example.kwargs.items()}
    whole = list(inner_values(model, inputs, arithmetic="native"))
    parts = list(inner_values(model, inputs, arithmetic="native", most_bytes=20_000))
    assert len(whole) > 50
    assert [(value.name, value.largest, value.exact) for value in whole] == [
        (value.name, value.largest, value.exact) for value in parts
    ]
    assert all(value.error < 1e-5 and not value.lost for value in whole)


def test_logits_are_those_of_the_visible_keys(made):
    _, model, example = made
    inputs = {name: tensor.numpy() for name, tensor in example.kwargs.items()}
    found = list(logit_ranges(model, inputs))
    assert len(found) == FORM.layers
    assert all(lowest < 0 < highest < 100 for _, lowest, highest in found)


def test_a_failure_is_kept_and_repeated(made, tmp_path):
    module, model, example = made
    name = "blocks.0.q_norm.gain"
    wrong = with_other(model, name, lambda array: array * 2)
    folder = tmp_path / "failure"
    report = validate(wrong, module, kwargs=example.kwargs, dtypes=("float32", "float16"), save_failure=folder, fail_fast=True)
    assert [len(report.of(dtype)) for dtype in report.dtypes] == [1, 0]
    assert any("is kept in" in note for note in report.notes)
    assert any("stopped at the first failure" in note for note in report.notes)
    about = json.loads((folder / "float32" / "about.json").read_text(encoding="utf-8"))
    assert about["case"] == "example"
    again = subprocess.run([sys.executable, folder / "float32" / "repeat.py"], capture_output=True, text=True, check=False)
    assert (again.returncode, again.stdout.splitlines()[-1]) == (1, "it fails"), again.stderr
    from qknorm_onnx.graph.model_file import save_model

    save_model(model, folder / "float32" / "model.onnx")
    mended = subprocess.run([sys.executable, folder / "float32" / "repeat.py"], capture_output=True, text=True, check=False)
    assert (mended.returncode, mended.stdout.splitlines()[-1]) == (0, "it passes now"), mended.stderr
    with pytest.raises(InputError, match="not an empty folder"):
        validate(wrong, module, kwargs=example.kwargs, save_failure=folder)


def test_tolerance_replaces_the_budget(made):
    module, model, example = made
    name = "blocks.0.q_norm.gain"
    wrong = with_other(model, name, lambda array: array * (1 + 1e-4))
    assert not validate(wrong, module, kwargs=example.kwargs).passed
    loose = validate(wrong, module, kwargs=example.kwargs, tolerance=1e-2)
    assert [row.case for row in loose.failures] == []
    assert not validate(model, module, kwargs=example.kwargs, tolerance=1e-12).passed
    for tolerance in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="tolerance is"):
            validate(model, module, kwargs=example.kwargs, tolerance=tolerance)


def test_given_cases_must_give_what_the_model_takes(made):
    module, model, example = made
    inputs = {name: tensor.numpy() for name, tensor in example.kwargs.items()}
    (name,) = inputs
    good = Case(name="mine", inputs=inputs, required=True)
    assert validate(model, module, kwargs=example.kwargs, cases=[good]).passed
    for wrong, said in (
        ({}, f"lacks {name}"),
        ({**inputs, "more": inputs[name]}, "gives more, which it does not take"),
        ({name: inputs[name][0]}, "has shape"),
        ({name: inputs[name].astype(np.float64)}, "the module's example is"),
    ):
        with pytest.raises(InputError, match=said):
            validate(model, module, kwargs=example.kwargs, cases=[Case(name="mine", inputs=wrong, required=True)])


def test_hopeless_errors_are_not_tried_in_other_orders(made, monkeypatch):
    module, model, example = made
    from qknorm_onnx.validation.torch_side import TorchSide

    asked = []
    monkeypatch.setattr(TorchSide, "in_other_orders", lambda self, inputs: asked.append(1) or iter(()))
    name = "blocks.0.q_norm.gain"
    assert not validate(with_other(model, name, lambda array: -array), module, kwargs=example.kwargs, locate=0).passed
    far = len(asked)
    validate(with_other(model, name, lambda array: array * (1 + 2e-5)), module, kwargs=example.kwargs, locate=0)
    assert far == 0 < len(asked)
