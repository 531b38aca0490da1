"""Fusing what this program lowered changes nothing, byte for byte; the report says what the file says."""

from __future__ import annotations

import dataclasses
import itertools
import json

import onnx
import onnx_ir as ir
import pytest

import qknorm_onnx as qk
from qknorm_onnx.graph.canonical.lowered_mark import MARK_KEY, read_mark, write_mark
from qknorm_onnx.graph.model_file import save_model
from qknorm_onnx.graph.passes.fuse import FuseQKNormPass
from qknorm_onnx.graph.rewrite.prover import Proof
from qknorm_onnx.inspection import inspect_model
from qknorm_onnx.lowering.registry import TARGETS
from qknorm_onnx.spec.qk_norm_spec import NormSpec, RotarySpec
from qknorm_onnx.spec.signature import NAMES_PER_OPERATOR
from qknorm_onnx.spec.variants.variant import norm_gains
from tests.contract.case_models import feeds_of, model_of, over_budget, run_ort
from tests.contract.spec_cases import case, optional, tables

L2 = NormSpec(q_kind="l2", k_kind="l2", epsilon_mode="clamp", q_epsilon=1e-6)
CASES = {
    "rotary": {"rotary": RotarySpec(order="after_norm"), "inputs": (*norm_gains(), *tables("(1, S, R/2)")), "is_causal": True},
    "mask": {"inputs": (*norm_gains(), optional("attention_bias", "(B, 1, 1, T)", "mask"))},
    "l2": {"norm": L2},
    "k only": {"norm": NormSpec(k_kind="rms", k_epsilon=1e-6)},
    "decode": {"sizes": {"past_length": 3}, "is_causal": True},
    "buffer": {"sizes": {"past_length": 3, "capacity": 9}},
    "softcap": {"softcap": 5.0},
    "sink": {"inputs": (optional("head_sink", "(Hq)", "logits"),)},
    "window": {"left_window_size": 2, "is_causal": True},
    "clamp": {"logit_clamp": 0.5},
}


def attention(name):
    return case(f"twice-{name.replace(' ', '-')}", **CASES[name])


def fused_again(tmp_path, model, target, times=2):
    """Files of one fusion, and of fusions of its file."""
    paths = [tmp_path / f"{index}.onnx" for index in range(times + 1)]
    qk.fuse(ir.to_proto(model), target=target, verify=False).save(paths[0])
    programs = []
    for old, new in itertools.pairwise(paths):
        programs.append(qk.fuse(old, target=target))
        programs[-1].save(new)
    return paths, programs


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_fusing_a_lowered_file_changes_nothing(tmp_path, name, dtype, target):
    found = attention(name)
    paths, programs = fused_again(tmp_path, model_of([found], dtype, opset=23), target)
    assert paths[0].read_bytes() == paths[1].read_bytes() == paths[2].read_bytes()
    (again,) = programs[1].report.fused
    assert again.name == found.id and again.spec.norm == found.spec.norm
    if again.target != "custom-op":
        assert f"lowered earlier to {again.target}" in again.note


def marked(tmp_path, target="onnx", name="rotary"):
    """A lowered file, and its node with the mark."""
    path = tmp_path / "lowered.onnx"
    qk.fuse(ir.to_proto(model_of([attention(name)], "float32", opset=23)), target=target, verify=False).save(path)
    model = ir.load(path)
    (node,) = [node for node in model.graph.all_nodes() if MARK_KEY in node.metadata_props]
    return path, model, node


def test_another_target_reads_the_attention_again(tmp_path):
    path, _, _ = marked(tmp_path)
    program = qk.fuse(path, target="custom-op")
    (fused,) = program.report.fused
    assert fused.target == "custom-op" and "lowered earlier" not in fused.note
    assert [node.op_type for node in program.model.graph.all_nodes() if node.domain == "ai.qknorm"] == ["QKNormAttention"]
    found = attention("rotary")
    assert not over_budget([found], run_ort(program.model, feeds_of(program.model, [found], "float32")), "float32")


class Refuses:
    """A prover that believes nothing."""

    def prove(self, _old, _new):
        return Proof(verdict="refused", reason="not believed", max_difference=1.0)


def test_what_cannot_be_read_again_stays_and_the_report_says_why(tmp_path):
    path, _, node = marked(tmp_path)
    model = ir.load(path)
    before = ir.to_proto(model).SerializeToString()
    fuse = FuseQKNormPass(Refuses())
    assert not fuse(model).modified
    assert ir.to_proto(model).SerializeToString() == before
    (fused,) = fuse.report.fused
    assert not fuse.report.refused
    assert (fused.name, fused.target) == (read_mark(node).name, "onnx")
    assert "lowered earlier to onnx" in fused.note and "not made one node again: not believed" in fused.note


@pytest.mark.parametrize("broken", ["", "{", "[]", "{}", json.dumps({"name": "x", "spec": {"wrong": 1}})])
def test_a_mark_that_cannot_be_read_is_none(tmp_path, broken):
    _, model, node = marked(tmp_path)
    node.metadata_props[MARK_KEY] = broken
    assert read_mark(node) is None
    (fused,) = qk.fuse(model, target="onnx").report.fused
    assert "lowered earlier" not in fused.note


def test_a_mark_on_another_operator_is_none(tmp_path):
    _, model, node = marked(tmp_path)
    other = next(found for found in model.graph if found is not node)
    other.metadata_props[MARK_KEY] = node.metadata_props[MARK_KEY]
    assert read_mark(other) is None
    assert len(inspect_model(model).present.fused) == 1


@pytest.mark.parametrize("target", ["ort", "onnx", "primitive"])
@pytest.mark.parametrize("name", CASES)
def test_inspect_lists_what_was_lowered(tmp_path, name, target):
    path, _, node = marked(tmp_path, target, name)
    inspection = inspect_model(path)
    assert not inspection.recognised.fused and inspection.present.complete
    (found,) = inspection.present.fused
    assert found.target == read_mark(node).target and f"lowered earlier to {found.target}" in found.note


def test_a_foreign_attention_beside_a_lowered_one_keeps_its_own_name(tmp_path):
    """The first of two equal names is read again, the second is kept: the report must tell them apart."""
    path = tmp_path / "two.onnx"
    pair = [attention("rotary"), attention("mask")]
    qk.fuse(ir.to_proto(model_of(pair, "float32", opset=23)), target="onnx", verify=False).save(path)
    model = ir.load(path)
    first, second = [node for node in model.graph.all_nodes() if MARK_KEY in node.metadata_props]
    del first.metadata_props[MARK_KEY]
    mark = dataclasses.replace(read_mark(second), name=qk.fuse(model, target="custom-op").report.fused[0].name)
    write_mark([second], mark)
    read, kept = qk.fuse(model, target="onnx").report.fused
    assert kept.name == mark.name and read.name == f"{mark.name}.2"
    assert "lowered earlier" in kept.note and "lowered earlier" not in read.note


def test_attention_without_a_norm_stays_plain(tmp_path):
    path = tmp_path / "plain.onnx"
    found = case("plain", norm=NormSpec())
    qk.fuse(ir.to_proto(model_of([found], "float32", opset=23)), target="onnx", verify=False).save(path)
    report = qk.fuse(path, target="onnx").report
    assert report.plain == (found.id,) and not report.fused


def test_a_marked_file_is_a_valid_model_of_an_old_ir_version(tmp_path):
    found = attention("mask")
    proto = ir.to_proto(model_of([found], "float32", opset=18))
    proto.ir_version = 8
    program = qk.fuse(proto, target="primitive", verify=False)
    path = tmp_path / "old.onnx"
    program.save(path)
    onnx.checker.check_model(path, full_check=True)
    assert not over_budget([found], run_ort(program.model, feeds_of(program.model, [found], "float32")), "float32")


def test_a_lowered_model_is_saved_whole(tmp_path):
    _, model, node = marked(tmp_path)
    save_model(model, tmp_path / "again.onnx")
    (kept,) = [found for found in ir.load(tmp_path / "again.onnx").graph.all_nodes() if MARK_KEY in found.metadata_props]
    assert read_mark(kept) == read_mark(node)


@pytest.mark.parametrize("target", ["custom-op", "ort"])
def test_more_bodies_than_names(tmp_path, target):
    """An operator has so many names; further bodies stand in the places of their nodes, and the report says why."""
    scales = [0.1 + index / 64 for index in range(NAMES_PER_OPERATOR + 2)]
    cases = [case(f"body-{index}", inputs=norm_gains(), is_causal=True, scale=scale) for index, scale in enumerate(scales)]
    paths, programs = fused_again(tmp_path, model_of(cases, "float32", opset=23, attach=False), target)
    assert len({path.read_bytes() for path in paths}) == 1
    targets = [fused.target for fused in programs[-1].report.fused]
    first = qk.fuse(ir.to_proto(model_of(cases, "float32", opset=23, attach=False)), target=target, verify=False)
    assert [fused.target for fused in first.report.fused] == targets
    if target == "ort":
        assert set(targets) <= {"ort", "onnx"}  # no body is needed, so nothing is short of a name
        return
    assert targets == ["custom-op"] * NAMES_PER_OPERATOR + ["primitive"] * 2
    why = f"not custom-op: the file has {NAMES_PER_OPERATOR} other function bodies of QKNormAttention"
    assert [fused.note.startswith(why) for fused in first.report.fused] == [False] * NAMES_PER_OPERATOR + [True] * 2
    outputs = run_ort(first.model, feeds_of(first.model, cases, "float32"))
    assert not over_budget(cases, outputs, "float32")
