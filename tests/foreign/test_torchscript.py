"""Files of torch.onnx's older exporter: no stored shapes, a name of its own for every axis, opsets that are old today."""

from __future__ import annotations

import functools

import onnx
import pytest
import torch

import qknorm_onnx as qk
from qknorm_onnx.errors import InputError
from qknorm_onnx.inspection import inspect_model
from qknorm_onnx.spec.canonical import canonical
from qknorm_onnx.spec.qk_norm_spec import QKNormSpec
from tests.foreign.foreign_models import Foreign, assert_right, cohere, dynamo, qwen3, torchscript


@functools.cache
def twin_meanings(attention: str) -> list[object]:
    """What today's exporter's file of the same model becomes."""
    return [meaning(fused.spec) for fused in qk.fuse(dynamo(qwen3(attention))).report.fused]


def meaning(spec: QKNormSpec) -> object:
    """A spec without its mask, of which one exporter's file has a part as a bias."""
    found = canonical(spec)
    return found.norm, found.rotary, found.attention.q_num_heads, found.attention.kv_num_heads, found.attention.scale


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("opset", [14, 17, 18])
def test_a_torchscript_file_fuses_as_its_dynamo_twin(opset: int, attention: str) -> None:
    source = qwen3(attention)
    file = torchscript(source, opset)
    program = qk.fuse(file)
    assert not program.report.declined and not program.report.refused
    assert len(program.report.fused) == 2
    assert not any("unverified" in fused.note for fused in program.report.fused)
    assert [meaning(fused.spec) for fused in program.report.fused] == twin_meanings(attention)
    assert_right(program.to_proto(), source)


def test_what_follows_from_fixed_sizes_becomes_a_constant() -> None:
    program = qk.fuse(torchscript(qwen3("sdpa"), 18))
    halves = [node for node in program.model.graph if node.op_type == "Div" and node.outputs[0].dtype == 7]
    assert not halves, "half of a fixed head size is a number"


def test_an_old_opset_is_raised_and_the_report_says_so() -> None:
    file = torchscript(qwen3("sdpa", layers=1), 17)
    report = qk.fuse(file).report
    assert [note for note in report.notes if "has ONNX opset 17; it was raised to 18" in note]
    inspection = inspect_model(file)
    assert len(inspection.recognised.fused) == len(report.fused) == 1
    assert report.notes[0] in inspection.present.notes


@pytest.mark.parametrize("target", ["custom-op", "primitive", "ort"])
def test_an_old_opset_serves_every_target(target: str) -> None:
    source = qwen3("eager", layers=1)
    program = qk.fuse(torchscript(source, 17), target=target)
    assert len(program.report.fused) == 1
    assert_right(program.to_proto(), source)


@pytest.mark.parametrize("read", [qk.fuse, inspect_model])
def test_an_opset_that_cannot_be_raised_is_refused_in_one_line(read) -> None:
    file = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 11]> f (float[n] x) => (float[n] y) { y = NoSuchOp(x) }')
    with pytest.raises(InputError, match="opset 11, and 18 or newer is needed") as caught:
        read(file)
    assert "\n" not in str(caught.value)


class Repeated(torch.nn.Module):
    """Keys and values repeated by hand, 4 heads over 2."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm_q, self.norm_k = (torch.nn.Parameter(torch.ones(16)) for _ in range(2))
        self.q, self.k, self.v = (torch.nn.Linear(64, size) for size in (64, 32, 32))

    def normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        batch, _, length, _ = x.shape
        if self.how == "repeat":
            return x.unsqueeze(2).repeat(1, 1, 2, 1, 1).flatten(1, 2)
        if self.how == "stack":
            return torch.stack([x, x], 2).reshape(batch, 4, length, 16)
        return x[:, :, None].expand(batch, 2, 2, length, 16).reshape(batch, 4, length, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.normed(self.q(x).view(batch, length, -1, 16), self.norm_q).transpose(1, 2)
        k = self.normed(self.k(x).view(batch, length, -1, 16), self.norm_k).transpose(1, 2)
        v = self.v(x).view(batch, length, -1, 16).transpose(1, 2)
        y = torch.nn.functional.scaled_dot_product_attention(q, self.heads(k), self.heads(v))
        return y.transpose(1, 2).reshape(batch, length, 64)


def by_hand(module: torch.nn.Module) -> Foreign:
    """A module of one input (batch, sequence, 64)."""
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.rand(parameter.shape) + 0.5 if "norm" in name else torch.randn(parameter.shape) / 4)
    example, inputs = ({"x": torch.randn(batch, length, 64)} for batch, length in ((2, 6), (3, 9)))
    return Foreign(module.eval(), example, inputs, 1)


X_AXES = {"x": {0: "batch", 1: "sequence"}}


@pytest.mark.parametrize("how", ["expand"])
def test_heads_repeated_by_hand(how: str) -> None:
    source = by_hand(Repeated(how))
    program = qk.fuse(torchscript(source, 17, X_AXES))
    assert [(fused.spec.attention.q_num_heads, fused.spec.attention.kv_num_heads) for fused in program.report.fused] == [(4, 2)]
    assert_right(program.to_proto(), source)


def test_without_stored_shapes_a_file_fuses_as_with_them() -> None:
    source = by_hand(Repeated("expand"))
    file = dynamo(source, 20, X_AXES)
    with_shapes = qk.fuse(file).report.fused
    del file.graph.value_info[:]
    program = qk.fuse(file)
    assert [fused.spec for fused in program.report.fused] == [fused.spec for fused in with_shapes]
    assert len(with_shapes) == 1
    assert_right(program.to_proto(), source)


@pytest.mark.parametrize("names", [("batch-size", "seq len"), ("x.0_axis", "x.1_axis"), ("", ""), ("2b", "a/b")])
def test_names_of_axes_may_be_any_text(names: tuple[str, str]) -> None:
    source = by_hand(Repeated("expand"))
    file = torchscript(source, 18, X_AXES)
    for value in (*file.graph.input, *file.graph.output):
        for dim, name in zip(value.type.tensor_type.shape.dim, names, strict=False):
            dim.dim_param = name
    program = qk.fuse(file)
    assert len(program.report.fused) == 1
    assert_right(program.to_proto(), source)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_file_that_runs_at_no_size_is_declined_for_that(attention: str) -> None:
    """The older exporter writes repeat_interleave over a negative axis wrong: the axis replaces every -1 of the file."""
    source = cohere(attention)
    report = qk.fuse(torchscript(source, 17)).report
    assert len(report.declined) == 2 and not report.fused and not report.plain
    for miss in report.declined:
        assert "contradict" in miss.reason and "Reshape" in miss.reason and "dynamo=True" in miss.hint
    program = qk.fuse(dynamo(source))
    assert len(program.report.fused) == 2, "what the hint says helps"
    assert_right(program.to_proto(), source)


@pytest.mark.parametrize(("attention", "opset"), [("eager", 14), ("sdpa", 17), ("eager", 18)])
def test_the_same_model_with_axes_from_the_front_fuses(attention: str, opset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    repeat = torch.repeat_interleave
    monkeypatch.setattr(torch, "repeat_interleave", lambda x, repeats, dim: repeat(x, repeats, dim=dim % x.ndim))
    source = cohere(attention)
    program = qk.fuse(torchscript(source, opset))
    assert len(program.report.fused) == 2 and not program.report.declined and not program.report.refused
    assert_right(program.to_proto(), source)
