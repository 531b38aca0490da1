"""Attention in a form that is not known stays in the report: declined where it is normalised. Routers are no attention."""

from __future__ import annotations

import pytest

import qknorm_onnx as qk
from qknorm_onnx.inspection import inspect_model
from tests.graph.attention_text import NO_ROTARY, RMS, Spelling, attention_model

torch = pytest.importorskip("torch")
F = torch.nn.functional


class Handwritten(torch.nn.Module):
    def __init__(self, form, *, norm):
        super().__init__()
        torch.manual_seed(0)
        self.form, self.norm = form, norm
        self.q, self.k, self.v = (torch.nn.Linear(32, 32) for _ in range(3))
        self.router = torch.nn.Linear(32, 4)
        self.weight = torch.nn.Parameter(0.5 + torch.rand(8))

    def heads(self, x, *, norm):
        x = x.unflatten(-1, (4, 8))
        return F.rms_norm(x, (8,), self.weight, 1e-6) if norm else x

    def forward(self, x):
        q, k, v = self.heads(self.q(x), norm=self.norm), self.heads(self.k(x), norm=self.norm), self.heads(self.v(x), norm=False)
        y = getattr(self, self.form)(q, k, v)
        return y.flatten(2) * self.router(x).softmax(-1).sum(-1, keepdim=True)

    def einsum(self, q, k, v):
        return torch.einsum("bhst,bthd->bshd", (torch.einsum("bshd,bthd->bhst", q, k) / 8**0.5).softmax(-1), v)

    def renormalised(self, q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        p = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1)
        p = p * (p > 0.01)
        return ((p / p.sum(-1, keepdim=True)) @ v).transpose(1, 2)

    def three_axes(self, q, k, v):
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
        y = torch.bmm((torch.bmm(q, k.transpose(-1, -2)) / 8**0.5).softmax(-1), v)
        return y.unflatten(0, (-1, 4)).transpose(1, 2)


@pytest.mark.parametrize("form", ["einsum", "renormalised", "three_axes"])
@pytest.mark.parametrize("norm", [True, False])
def test_it_stays_in_the_report(form, norm):
    module = Handwritten(form, norm=norm).eval()
    report = qk.export(module, (torch.randn(2, 5, 32),)).report
    found = len(report.fused) + len(report.declined)
    if norm:
        assert found == 1, report
        assert not report.plain
        assert all(item.reason and item.node for item in report.declined)
    else:
        assert found == 0, report
        assert len(report.plain) <= 1


L2 = "  {n}_l = ReduceL2<keepdims=1>({x}, last)\n  {n}_c = Clip({n}_l, eps)\n  {y} = Div({x}, {n}_c)\n"
LAYER = "  {y} = LayerNormalization<axis=-1, epsilon=0.001>({x}, {w})\n"


@pytest.mark.parametrize("norm", [RMS, L2, LAYER])
@pytest.mark.parametrize("side", ["both", "queries"])
def test_what_was_lowered_to_plain_operators_is_named_and_not_called_plain(norm, side):
    """Bodies spell norms with their rows scaled, and grouped heads in a way of their own: not read back, but not lost either."""
    spelling = Spelling(q_norm=norm, k_norm=norm if side == "both" else NO_ROTARY)
    lowered = qk.fuse(attention_model(spelling), target="primitive", verify=False)
    assert len(lowered.report.fused) == 1
    report = inspect_model(lowered.to_proto()).present
    assert not report.plain and not report.fused
    (miss,) = report.declined
    assert miss.reason and miss.hint and miss.node
