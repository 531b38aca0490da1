"""What a file needs, what may be written for an onnxruntime, and the one line that says why one cannot load it."""

from __future__ import annotations

import types

import onnx_ir as ir
import pytest

import qknorm_onnx as qk
from qknorm_onnx.graph.onnxruntime_release import RELEASES, needs_of, release_named
from qknorm_onnx.runtime import native_kernels as native_kernels_module
from qknorm_onnx.runtime import session as session_module
from qknorm_onnx.runtime.environment import examine
from qknorm_onnx.runtime.native_kernels import native_kernels_for
from qknorm_onnx.spec.targets import UnknownTargetError, target_named
from qknorm_onnx.spec.variants.variant import norm_gains
from tests.contract.case_models import feeds_of, model_of, over_budget, run_ort
from tests.contract.named_sizes import named_model
from tests.contract.spec_cases import case, optional
from tests.graph.overloaded import with_overloads

CACHED = case("cached", inputs=norm_gains(), is_causal=True, num_outputs=3, sizes={"past_length": 3})
SINK = case("sink", inputs=(optional("head_sink", "(Hq)", "logits"),), is_causal=True)
MASKED_INPUTS = (optional("attention_bias", "(B, 1, S, T)", "logits"),)
MASKED = case("masked", inputs=MASKED_INPUTS, is_causal=True)
BOTH_WAYS = case("both-ways", inputs=norm_gains())
WINDOW = case("window", inputs=norm_gains(), is_causal=True, left_window_size=2)
OWN_HEADS = case("own-heads", inputs=MASKED_INPUTS, heads=(3, 3))


def fused(found, **options):
    model = named_model([found], "float32", opset=options.pop("opset", 20), attach=False)
    return qk.fuse(ir.to_proto(model), verify=False, **options)


def pretend(monkeypatch, version):
    old = types.SimpleNamespace(__version__=version)
    monkeypatch.setattr(session_module, "release_of", lambda _ort: release_named(version).version)
    monkeypatch.setattr(native_kernels_module, "release_of", lambda _ort: release_named(version).version)
    return old


@pytest.mark.parametrize(
    ("found", "since", "why"),
    [
        (CACHED, "1.32", "query_seqlens"),
        (SINK, "1.23", "head_sink"),
        (MASKED, "1.22", "attention_bias"),
        (BOTH_WAYS, "1.30", "the attribute causal"),
        (WINDOW, "1.24", "the attribute local_window_size"),
    ],
    ids=lambda value: getattr(value, "id", None),
)
def test_target_ort_says_what_it_needs_and_avoids_what_a_release_lacks(found, since, why):
    program = fused(found, target="ort")
    assert {item.target for item in program.report.fused} == {"ort"}
    assert program.report.needs.startswith(f"needs onnxruntime {since} or newer (GroupQueryAttention with {why})")
    older = str(RELEASES[RELEASES.index(release_named(since)) - 1])
    avoided = fused(found, target="ort", for_onnxruntime=older)
    (item,) = avoided.report.fused
    name = why.removeprefix("the attribute ")
    assert (
        f"GroupQueryAttention of onnxruntime {older} has no {name}" in item.note
        and f"which is there from {since} on" in item.note
    )
    assert needs_of(avoided.model).oldest <= release_named(older)
    for written in (program, avoided):
        assert not over_budget([found], run_ort(written.model, feeds_of(written.model, [found], "float32")), "float32")


def test_releases_that_would_misread_a_window_refuse_the_file():
    assert fused(WINDOW, target="ort").model.ir_version == release_named("1.23").ir_version + 1
    assert (
        fused(CACHED, target="ort").model.ir_version == fused(WINDOW, target="ort", for_onnxruntime="1.23").model.ir_version == 10
    )


def test_a_bias_of_multi_head_attention_needs_1_21():
    program = fused(OWN_HEADS, target="ort")
    assert [item.target for item in program.report.fused] == ["ort"]
    assert program.report.needs.startswith("needs onnxruntime 1.23 or newer (IR version 11)")  # 1.20 would misread it
    asked = fused(OWN_HEADS, target="ort", for_onnxruntime="1.21")
    assert asked.report.needs.startswith("needs onnxruntime 1.21 or newer (MultiHeadAttention with attention_bias)")
    avoided = fused(OWN_HEADS, target="ort", for_onnxruntime="1.20")
    (item,) = avoided.report.fused
    assert "MultiHeadAttention of onnxruntime 1.20 has no bias that heads share, which is there from 1.21 on" in item.note
    assert str(needs_of(avoided.model).oldest) == "1.20"


def test_the_17th_input_is_written_only_where_it_is_needed():
    one = case("one", inputs=norm_gains(), is_causal=True, num_outputs=3, sizes={"past_length": 3, "length": 1})
    fixed = {"past_length": 3, "length": 1, "capacity": 7}
    fixed_one = case("fixed-one", inputs=norm_gains(), is_causal=True, num_outputs=3, sizes=fixed)
    for found, most in ((one, 7), (fixed_one, 7), (BOTH_WAYS, 11), (SINK, 12), (CACHED, 17)):
        model = model_of([found], "float32", opset=20, attach=False)
        if found in (one, fixed_one):
            for value in model.graph.inputs:
                if value.name.endswith(("query", "key", "value")) and "past" not in value.name:
                    value.shape = ir.Shape(["B", 1, value.shape[2]])
        else:
            model = named_model([found], "float32", opset=20, attach=False)
        program = qk.fuse(ir.to_proto(model), target="ort", verify=False)
        (node,) = [node for node in program.model.graph if node.op_type == "GroupQueryAttention"]
        assert len(node.inputs) <= most, found.id


def test_custom_op_and_primitive_load_in_the_oldest():
    for target in ("custom-op", "primitive", "portable"):
        program = fused(CACHED, target=target, for_onnxruntime="1.20")
        assert program.report.needs.startswith("needs onnxruntime 1.20 or newer: ONNX opset 20")
    assert "model-local functions QKNormAttention" in fused(CACHED).report.needs


def test_target_onnx_falls_back_where_the_release_has_no_opset_23():
    assert fused(CACHED, target="onnx").report.needs.startswith("needs onnxruntime 1.23 or newer (ONNX opset 23)")
    program = fused(CACHED, target="onnx", for_onnxruntime="1.22.1")
    (item,) = program.report.fused
    assert item.target == "primitive" and "it needs opset 23, and onnxruntime 1.22 knows 22" in item.note


def test_a_model_that_the_release_cannot_load_is_refused_by_name():
    with pytest.raises(qk.InputError, match=r"onnxruntime 1\.22 cannot load this model, which needs onnxruntime 1\.23.*opset 23"):
        fused(CACHED, opset=23, for_onnxruntime="1.22")


@pytest.mark.parametrize(("text", "message"), [("1.19", "older than 1.20"), ("newest", "is no version"), ("1", "is no version")])
def test_releases_that_are_none(text, message):
    with pytest.raises(qk.InputError, match=message):
        fused(CACHED, for_onnxruntime=text)


def test_a_release_newer_than_all_known_counts_as_the_newest():
    assert release_named("1.99") == RELEASES[-1] == release_named("2.0")


def test_portable_is_primitive():
    assert target_named("portable") == "primitive"
    assert {item.target for item in fused(CACHED, target="portable").report.fused} == {"primitive"}
    with pytest.raises(UnknownTargetError, match=r"tensorrt.*portable"):
        target_named("tensorrt")


def test_an_older_onnxruntime_is_told_what_the_file_needs(monkeypatch):
    program = fused(CACHED, target="ort")
    pretend(monkeypatch, "1.31.0")
    with pytest.raises(qk.InputError, match=r"is too old for this model, which needs onnxruntime 1\.32.*query_seqlens.*'1\.31'"):
        qk.create_session(program)
    assert qk.create_session(fused(CACHED, target="ort", for_onnxruntime="1.31"))


def test_the_library_is_not_used_under_an_old_onnxruntime(monkeypatch):
    model = model_of([CACHED], "float32")
    assert native_kernels_for(model, provider="cpu").library is not None
    pretend(monkeypatch, "1.23.2")
    found = native_kernels_for(model, provider="cpu")
    assert found.library is None and "needs onnxruntime 1.24 or newer, and this is" in found.reason
    assert qk.create_session(model)


def test_a_file_newer_than_the_library(monkeypatch):
    cases = [case(f"layer{index}", inputs=norm_gains(), is_causal=True, scale=0.1 + index / 64) for index in range(3)]
    model = model_of(cases, "float32")
    info = {**native_kernels_module.custom_ops.build_info(), "names_per_operator": 2}
    monkeypatch.setattr(native_kernels_module.custom_ops, "build_info", lambda: info)
    found = native_kernels_for(model, provider="cpu")
    assert found.library is None and "older than the file and does not know QKNormAttention_3" in found.reason
    model.graph.opset_imports["ai.qknorm"] = 2
    with pytest.raises(qk.InputError, match=r"uses version 2 of the operators of ai\.qknorm, and this qknorm-onnx knows 1"):
        qk.create_session(model)


def test_a_file_saved_optimised_with_the_library(tmp_path):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 4
    qk.create_session(model_of([CACHED], "float32"), session_options=options)
    saved = tmp_path / "optimised.onnx"
    assert "without bodies" in needs_of(ir.load(saved)).line
    assert qk.create_session(saved)
    with pytest.raises(qk.InputError, match=r"QKNormAttention of this model have no function bodies.*native_kernels is False"):
        qk.create_session(saved, native_kernels=False)


def test_options_that_know_the_library_already():
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(native_kernels_for(model_of([CACHED]), provider="cpu").library))
    assert qk.create_session(model_of([CACHED], "float32"), session_options=options)
    other = onnxruntime.SessionOptions()
    other.add_session_config_entry("qknorm.registered_library", "0.0.1")
    with pytest.raises(qk.InputError, match=r"cannot be registered: .*version '0\.0\.1' already"):
        qk.create_session(model_of([CACHED], "float32"), session_options=other)


def test_overloads_need_a_newer_release():
    cases = [CACHED, case("full", inputs=norm_gains())]
    assert needs_of(model_of(cases, "float32")).oldest == RELEASES[0]
    old = needs_of(with_overloads(model_of(cases, "float32")))
    assert str(old.oldest) == "1.27" and "only their overload tells apart" in old.line


def test_doctor_compares_the_library_with_onnxruntime(monkeypatch):
    from qknorm_onnx.runtime import environment

    (good,) = [finding for finding in examine() if finding.name == "native kernels"]
    assert good.state == "ok" and "for onnxruntime 1.24 and newer" in good.detail
    monkeypatch.setattr(environment, "release_of", lambda _ort: (1, 23))
    (old,) = [finding for finding in examine() if finding.name == "native kernels"]
    assert old.state == "note" and "function bodies" in old.detail and "pip install -U onnxruntime" in old.mend
