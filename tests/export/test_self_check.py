"""`qk.export` runs what it made beside the module: faults are errors that say whose they are, honest modules are let be."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

import qknorm_onnx as qk
from qknorm_onnx.errors import ExportError
from qknorm_onnx.graph.canonical.qk_norm_node import is_attention_node
from qknorm_onnx.graph.passes.attach_bodies import AttachBodiesPass
from qknorm_onnx.torch_export import exporter
from qknorm_onnx.validation import self_check

AXES = {"x": {0: "batch", 1: "seq"}}


class Block(nn.Module):
    """Attention with random gains, and a gate behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = qk.QKNormAttention(16, 2)
        self.gate = nn.Linear(16, 16)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x) * nn.functional.silu(self.gate(x))


def exported(module: nn.Module | None = None, **options: object) -> qk.Program:
    return qk.export(module or Block(), (torch.randn(2, 5, 16),), dynamic_shapes=AXES, **options)


def with_changed_program(monkeypatch, change) -> None:
    """Let what comes out of the rewrites be changed in place by `change(model)`."""
    fuse = exporter.fuse

    def wrong(*args, **options):
        program = fuse(*args, **options)
        change(program.model)
        return dataclasses.replace(program, model=program.model)

    monkeypatch.setattr(exporter, "fuse", wrong)


def scale_twice(model: ir.Model) -> None:
    for node in model.graph:
        if is_attention_node(node):
            node.attributes["scale"] = ir.AttrFloat32("scale", node.attributes["scale"].as_float() * 2)
    AttachBodiesPass()(model)


def test_an_honest_module_is_let_be():
    assert not [note for note in exported().report.notes if "beside its module" in note]


def test_a_wrong_translation_is_pytorchs_fault(monkeypatch):
    import onnxscript

    op = onnxscript.opset20
    translations = exporter._translations

    def wrong(opset):
        return {**translations(opset), torch.ops.aten.silu.default: lambda self: op.Sigmoid(self)}

    monkeypatch.setattr(exporter, "_translations", wrong)
    with pytest.raises(ExportError, match="does not compute what Block computes") as refused:
        exported()
    assert "PyTorch's translation is at fault" in str(refused.value)
    assert "right up to the result of gate, off from that of the module itself on" in str(refused.value)
    assert exported(check=False).model is not None


def test_a_wrong_rewrite_is_ours(monkeypatch):
    with_changed_program(monkeypatch, scale_twice)
    with pytest.raises(ExportError, match="a rewrite of this package is at fault") as refused:
        exported()
    assert "off from that of attention on" in str(refused.value)


def test_values_that_are_not_finite_and_shapes_are_seen(monkeypatch):
    def all_nan(model: ir.Model) -> None:
        for value in model.graph.initializers.values():
            if value.const_value.shape.numpy() == (16,):
                value.const_value = ir.tensor(np.full(16, np.nan, np.float32), name=value.name)

    with_changed_program(monkeypatch, all_nan)
    with pytest.raises(ExportError, match="not finite"):
        exported()

    def flat(model: ir.Model) -> None:
        old = model.graph.outputs[0]
        new = ir.Value(name="flat", type=old.type, shape=ir.Shape([None, None]))
        model.graph.append(ir.Node("", "Flatten", [old], outputs=[new]))
        model.graph.outputs[0] = new

    with_changed_program(monkeypatch, flat)
    with pytest.raises(ExportError, match="shape"):
        exported()


def test_a_batch_that_is_built_in_is_seen(monkeypatch):
    def two_rows(model: ir.Model) -> None:
        old = model.graph.outputs[0]
        sizes = ir.Value(name="sizes", const_value=ir.tensor(np.array([2, -1, 16]), name="sizes"))
        model.graph.register_initializer(sizes)
        new = ir.Value(name="rows", type=old.type, shape=old.shape)
        model.graph.append(ir.Node("", "Reshape", [old, sizes], outputs=[new]))
        model.graph.outputs[0] = new

    with_changed_program(monkeypatch, two_rows)
    with pytest.raises(ExportError, match="case batch 3"):
        exported()


def test_large_models_are_run_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(self_check, "MOST_WEIGHT_BYTES", 100)
    with_changed_program(monkeypatch, scale_twice)
    assert any("weights take more than 2 GiB (check=True does it)" in note for note in exported().report.notes)
    with pytest.raises(ExportError, match="at fault"):
        exported(check=True)


class Noisy(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.rand_like(x)


def test_a_module_that_gives_other_results_at_each_call_is_not_accused():
    assert exported(Noisy()).report.fused


class Stateful(Block):
    """In training it drops values; whenever it runs it counts, and forgets."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dropout(super().forward(x))
        return self.norm(y.transpose(1, 2)).transpose(1, 2)


def test_a_module_is_left_as_it_was():
    """The hook counts a run that PyTorch's own exporter makes; that of the check is taken back."""
    found = []
    for check in (False, None):
        module = Stateful().train()
        module.dropout.eval()
        module.register_forward_hook(lambda part, *_: part.calls.add_(1) if not torch.compiler.is_exporting() else None)
        modes = [part.training for part in module.modules()]
        exported(module, check=check)
        assert [part.training for part in module.modules()] == modes
        found.append({name: value.clone() for name, value in module.state_dict().items()})
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_half_types_and_integers():
    for dtype in (torch.float16, torch.bfloat16):
        module = Block().to(dtype)
        program = qk.export(module, (torch.randn(2, 5, 16).to(dtype),), dynamic_shapes=AXES)
        assert not [note for note in program.report.notes if "beside its module" in note]

    class Picks(Block):
        def forward(self, x):
            return super().forward(x).argmax(-1)

    assert exported(Picks()).report.fused
