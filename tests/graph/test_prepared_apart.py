"""Where queries and keys are prepared in nodes of their own, the report says what these do."""

from __future__ import annotations

import json

import onnx
import pytest
from click.testing import CliRunner

import qknorm_onnx as qk
from qknorm_onnx.cli.main import application
from qknorm_onnx.inspection import inspect_model
from qknorm_onnx.spec.one_line import one_line
from qknorm_onnx.spec.qk_norm_spec import QKNormRotarySpec, RotarySpec
from tests.graph.attention_text import NO_ROTARY, Spelling, attention_model

L2 = "  {n}_l = ReduceL2<keepdims=1>({x}, last)\n  {n}_c = Clip({n}_l, eps)\n  {y} = Div({x}, {n}_c)\n"
APART = "q rms eps 0.001, then rotary; k l2 eps 0.001 (clamp), then rotary; in nodes of their own, 6:2 heads"


def test_two_nodes_are_named_by_fuse_and_inspect(tmp_path):
    program = qk.fuse(attention_model(Spelling(k_norm=L2)))
    (fused,) = program.report.fused
    assert fused.note == "" and not fused.spec.has_norm
    assert fused.line.startswith(APART) and str(fused).endswith(fused.line)
    (present,) = inspect_model(program.model).present.fused
    assert present.line == fused.line
    onnx.save(program.to_proto(), tmp_path / "fused.onnx")
    shown = json.loads(CliRunner().invoke(application, ["inspect", str(tmp_path / "fused.onnx"), "--json"]).output)
    (entry,) = shown["fused"]
    assert entry["spec_line"] == fused.line and entry["key_preparation"][0]["norm"] == "l2"
    text = CliRunner().invoke(application, ["inspect", str(tmp_path / "fused.onnx")], env={"COLUMNS": "200"}).output
    assert "k l2 eps 0.001" in " ".join(text.split())


@pytest.mark.parametrize("target", ["onnx", "primitive"])
def test_what_was_lowered_says_so_in_its_note(target):
    program = qk.fuse(attention_model(Spelling(k_norm=L2)), target=target)
    (present,) = inspect_model(program.model).present.fused
    assert "normalised in front" in present.note


def test_one_node_for_both_says_nothing_of_others():
    (fused,) = qk.fuse(attention_model(Spelling())).report.fused
    assert fused.line.startswith("rms eps 0.001, then rotary, 6:2 heads")
    assert fused.query_preparation == fused.key_preparation == ()


def test_one_side():
    (fused,) = qk.fuse(attention_model(Spelling(rotary=NO_ROTARY, k_norm=NO_ROTARY))).report.fused
    assert fused.line.startswith("q rms eps 0.001 and k un-normed")


def test_streams_with_different_norms():
    first = QKNormRotarySpec(num_heads=6, kind="rms", epsilon=1e-6, rotary=RotarySpec(order="after_norm"))
    second = QKNormRotarySpec(num_heads=6, kind="layer", epsilon=1e-5)
    (fused,) = qk.fuse(attention_model(Spelling())).report.fused
    line = one_line(fused.spec, query=(first, second, first))
    assert line.startswith("q rms eps 1e-06, then rotary or layer eps 1e-05; in a node of their own, then rms")
