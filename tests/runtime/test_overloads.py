"""Files of version 0.1.0, whose bodies only their overload tells apart: right in sessions and runners that ignore it."""

from __future__ import annotations

import types

import numpy as np
import onnx_ir as ir
import pytest

import qknorm_onnx as qk
from qknorm_onnx.runtime import session as session_module
from qknorm_onnx.runtime.overloads import ignores_overloads, needs_overloads, without_overloads
from qknorm_onnx.runtime.runner import ReferenceRunner, make_runner
from qknorm_onnx.spec.variants.variant import norm_gains
from tests.contract.case_models import errors, feeds_of, model_of, run_ort
from tests.contract.spec_cases import case
from tests.graph.overloaded import with_overloads

CASES = [
    case("sliding", inputs=norm_gains(), is_causal=True, left_window_size=2),
    case("global", inputs=norm_gains(), is_causal=True, heads=(6, 2)),
    case("cached", inputs=norm_gains(), is_causal=True, num_outputs=3, sizes={"past_length": 3}),
]


@pytest.fixture
def old():
    return with_overloads(model_of(CASES, "float32"))


def worst(outputs):
    return max(errors(CASES, outputs, "float32").values())


def test_the_reference_evaluator_computes_each_body(old):
    assert needs_overloads(old)
    assert worst(ReferenceRunner(old).run(feeds_of(old, CASES, "float32"))) < 1e-5
    assert worst(make_runner(old, prefer_reference=True).run(feeds_of(old, CASES, "float32"))) < 1e-5
    assert needs_overloads(old), "the model itself is left alone"


@pytest.mark.parametrize("form", ["ir", "proto", "path"])
@pytest.mark.parametrize("ignored", [True, False])
def test_sessions_without_the_library(old, tmp_path, monkeypatch, form, ignored):
    loaded = []
    real = session_module._session
    monkeypatch.setattr(session_module, "_session", lambda ort, model, *rest: loaded.append(model) or real(ort, model, *rest))
    monkeypatch.setattr(session_module, "ignores_overloads", lambda _ort: ignored)
    source = {"ir": old, "proto": ir.to_proto(old), "path": tmp_path / "old.onnx"}[form]
    if form == "path":
        ir.save(old, source)
    session = qk.create_session(source, native_kernels=False)
    names = [output.name for output in session.get_outputs()]
    assert worst(dict(zip(names, session.run(None, feeds_of(old, CASES, "float32")), strict=True))) < 1e-5
    (given,) = loaded
    read = ir.load(given) if isinstance(given, str) else ir.from_proto(type(ir.to_proto(old)).FromString(given))
    assert needs_overloads(read) != ignored


def test_sessions_with_the_library_keep_the_nodes(old, monkeypatch):
    monkeypatch.setattr(session_module, "ignores_overloads", lambda _ort: True)
    session = qk.create_session(old)
    names = [output.name for output in session.get_outputs()]
    assert worst(dict(zip(names, session.run(None, feeds_of(old, CASES, "float32")), strict=True))) < 2e-5
    assert {item.runs_in for item in qk_placements(old)} == {"native kernel"}


def qk_placements(model):
    from qknorm_onnx.runtime.placement import node_placements

    return node_placements(model)


def test_a_model_without_overloads_is_left_as_it_is():
    model = model_of(CASES, "float32")
    assert not needs_overloads(model) and without_overloads(model) is model
    assert worst(run_ort(model, feeds_of(model, CASES, "float32"))) < 1e-5


@pytest.mark.parametrize(("version", "expected"), [("1.24.4", True), ("1.26.0", True), ("1.27.0", False), ("2.0.0", False)])
def test_which_onnxruntime_ignores_overloads(version, expected):
    assert ignores_overloads(types.SimpleNamespace(__version__=version)) == expected


def test_fusing_an_old_file_again_gives_names(old):
    program = qk.fuse(ir.to_proto(old))
    kept = [node.op_type for node in program.model.graph if node.domain == "ai.qknorm"]
    assert kept == ["QKNormAttention", "QKNormAttention_2", "QKNormAttention_3"] and not needs_overloads(program.model)
    outputs = make_runner(program, prefer_reference=True).run(feeds_of(old, CASES, "float32"))
    assert worst(outputs) < 1e-5
    assert all(np.isfinite(value).all() for value in outputs.values())
