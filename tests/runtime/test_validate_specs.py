"""`validate` compares what an attention of the file means with what its module does, where no input shows the difference."""

from __future__ import annotations

import dataclasses
import json
import textwrap

import onnx_ir as ir
import pytest
import torch

import qknorm_onnx as qk
from qknorm_onnx.cli.main import run
from qknorm_onnx.graph.fusion_report import FusedAttention, FusionReport, Surroundings
from qknorm_onnx.inspection import Inspection
from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormSpec
from qknorm_onnx.torch_export.operators.modules import QKNormAttention
from qknorm_onnx.validation import spec_check
from qknorm_onnx.validation.spec_check import SpecCheck

OPEN = Surroundings(has_mask=False, num_keys=None, is_decode=False)
NORM = NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6)
HIDDEN = 5000  # keys of a window that no case reaches
SOURCE = """
    import torch
    from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormSpec
    from qknorm_onnx.torch_export.operators.modules import QKNormAttention

    def make():
        torch.manual_seed(0)
        attention = AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=0.25, is_causal=True)
        norm = NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6)
        module = QKNormAttention.from_spec(QKNormSpec(attention=attention, norm=norm), d_model=32, head_size=8)
        return module.eval(), (torch.randn(2, 5, 32),)
"""


def decoder(**fields):
    """Two layers of our own attention, and how they are called."""
    torch.manual_seed(0)
    attention = AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=0.25, is_causal=True, **fields)
    spec = QKNormSpec(attention=attention, norm=NORM)
    layers = [QKNormAttention.from_spec(spec, d_model=32, head_size=8) for _ in range(2)]
    module = torch.nn.Sequential(*layers).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name:
                parameter.copy_(0.5 + torch.rand_like(parameter))
    return module, (torch.randn(2, 5, 32),)


@pytest.fixture(scope="module")
def honest():
    module, args = decoder()
    model = qk.export(module, args, dynamic_shapes=({0: "batch", 1: "length"},), require_fusion=True).model
    for number, node in enumerate(node for node in model.graph if node.op_type == "QKNormAttention"):
        node.name = str(number)  # as attention that was recognised: by the path of its module
    return module, args, model


def with_attribute(model, attribute, *, node):
    changed = model.clone()
    attentions = [one for one in changed.graph if one.op_type == "QKNormAttention"]
    assert len(attentions) == 2
    attentions[node].attributes.add(attribute)
    return changed


def specs_of(report):
    return [row for row in report.rows if row.case == "specs"]


def test_each_attention_is_a_row_of_each_type(honest):
    module, args, model = honest
    report = qk.validate(model, module, args, dtypes=("float32", "bfloat16"))
    assert report.passed, report.summary()
    assert [(row.dtype, row.output, row.verdict) for row in specs_of(report)] == [
        (dtype, name, "passed") for dtype in ("float32", "bfloat16") for name in ("0", "1")
    ]
    assert not any("compared by numbers only" in note for note in report.notes)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_window_that_no_sequence_reaches_fails(honest, layer):
    module, args, model = honest
    wrong = with_attribute(model, ir.AttrInt64("left_window_size", HIDDEN - 1), node=layer)
    report = qk.validate(wrong, module, args)
    assert not report.passed
    (row,) = report.failures
    assert (row.case, row.output) == ("specs", str(layer))
    assert row.reason == f"left_window_size is -1 in the module, {HIDDEN - 1} in the graph"
    assert f"case specs, {layer}" in report.summary() and row.purpose


def test_a_lowered_file_is_compared_by_its_marks(honest):
    module, args, model = honest
    wrong = with_attribute(model, ir.AttrInt64("left_window_size", HIDDEN - 1), node=0)
    for target in ("onnx", "primitive"):
        assert [row.verdict for row in specs_of(qk.validate(qk.fuse(model, target=target), module, args))] == ["passed"] * 2
        lowered = qk.validate(qk.fuse(wrong, target=target), module, args)
        assert {(row.output, row.verdict) for row in specs_of(lowered)} == {("0", "failed"), ("1", "passed")}
        assert not lowered.passed


def test_an_attention_that_is_no_node_is_a_note(monkeypatch):
    """What is only read, not proven, fails by its numbers, or not at all."""
    fused = FusionReport(fused=(FusedAttention(name="0", spec=decoder()[0][0].spec, surroundings=OPEN),))
    found = Inspection(present=FusionReport(), recognised=fused)
    monkeypatch.setattr(spec_check, "inspect_model", lambda _model: found)
    check = SpecCheck.of(ir.Model(ir.Graph([], [], nodes=[]), ir_version=10), decoder(left_window_size=HIDDEN - 1)[0])
    assert not check.agreeing and not check.differing
    said = f"0 was read as attention with another meaning than its module's, unproven: left_window_size is {HIDDEN - 1} in the"
    assert [note for note in check.notes if note.startswith(said)]


def test_how_a_half_type_rounds_is_compared_where_both_are_in_it(honest):
    module, args, model = honest
    other = dataclasses.replace(NORM, weight_order="after_cast")
    for layer in module:
        layer.spec = dataclasses.replace(layer.spec, norm=other)
    try:
        report = qk.validate(model, module, args, dtypes=("float16",))
    finally:
        for layer in module:
            layer.spec = dataclasses.replace(layer.spec, norm=NORM)
    assert [row.verdict for row in specs_of(report)] == ["passed", "passed"]  # the file is float32


def test_a_mask_may_say_that_a_module_is_causal(monkeypatch):
    """Llama 4's chunks: its reader leaves all of the mask to the mask, of which the graph may read a part."""
    causal = decoder()[0][0].spec
    fused = FusionReport(fused=(FusedAttention(name="0", spec=causal, surroundings=OPEN),))
    monkeypatch.setattr(spec_check, "inspect_model", lambda _model: Inspection(present=fused, recognised=FusionReport()))
    open_spec = dataclasses.replace(causal, attention=dataclasses.replace(causal.attention, is_causal=False))
    module = torch.nn.ModuleList([QKNormAttention.from_spec(open_spec, d_model=32, head_size=8)])
    check = SpecCheck.of(ir.Model(ir.Graph([], [], nodes=[]), ir_version=10), module)
    assert check.agreeing == ("0",) and not check.differing


class Own(torch.nn.Module):
    """Attention that no reader knows."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.v_proj = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

    def forward(self, x):
        q, v = (layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in (self.q_proj, self.v_proj))
        q = torch.nn.functional.normalize(q, dim=-1)
        return (torch.softmax(4 * q @ q.transpose(-1, -2), -1) @ v).transpose(1, 2).flatten(2)


def test_what_no_reader_knows_is_said(honest):
    module, args = Own().eval(), honest[1]
    report = qk.validate(qk.export(module, args, require_fusion=True), module, args)
    assert report.passed and not specs_of(report)
    assert len([note for note in report.notes if "compared by numbers only" in note]) == 1


def test_from_the_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "spec_check_models.py").write_text(textwrap.dedent(SOURCE), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    path = str(tmp_path / "model.onnx")
    assert run(["export", "spec_check_models:make", path]) == 0
    model = ir.load(path)
    (node,) = [node for node in model.graph if node.op_type == "QKNormAttention"]
    node.attributes.add(ir.AttrFloat32("q_epsilon", 1.0001e-6))
    ir.save(model, path)
    capsys.readouterr()
    assert run(["validate", path, "spec_check_models:make", "--json"]) == 1
    failed = [row for row in json.loads(capsys.readouterr().out)["rows"] if row["verdict"] == "failed"]
    assert {(row["case"], row["reason"]) for row in failed} == {
        ("specs", "q_epsilon is 1e-06 in the module, 1.0001e-06 in the graph")
    }
