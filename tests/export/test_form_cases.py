"""The forms of `tests/graph/test_missed_forms.py` as torch.onnx writes them: one attention each, fused for every target."""

from __future__ import annotations

import pytest

import qknorm_onnx as qk

torch = pytest.importorskip("torch")
F = torch.nn.functional


def rms(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


class Attention(torch.nn.Module):
    """`form` makes (q, k, v) of heads (batch, heads, positions, values); their attention is scaled_dot_product_attention."""

    def __init__(self, form, *, heads=4, kv_heads=2, size=16):
        super().__init__()
        torch.manual_seed(0)
        self.form, self.size = form, size
        self.q, self.k, self.v = (torch.nn.Linear(32, count * size) for count in (heads, kv_heads, kv_heads))
        self.q_gain, self.k_gain = (torch.nn.Parameter(0.5 + torch.rand(size)) for _ in range(2))
        turn = torch.zeros(size, size)
        half = size // 2
        for index in range(half):
            turn[index + half, index], turn[index, index + half] = -1, 1
        self.register_buffer("turn", turn)

    def forward(self, x, *tables):
        q, k, v = (projection(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for projection in (self.q, self.k, self.v))
        q, k, v = self.form(self, q, k, v, *tables)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
        return y.transpose(1, 2).flatten(2)


def weightless(module, q, k, v):
    return F.rms_norm(q, (16,)), F.rms_norm(k, (16,)), v


def in_groups(norm):
    def form(_module, q, k, v):
        return *(norm(x.reshape(*x.shape[:3], 4, 4)).reshape(x.shape) for x in (q, k)), v

    return form


def copied(copies):
    def form(module, q, k, v):
        return rms(q, module.q_gain), copies(rms(k, module.k_gain)), copies(v)

    return form


def turned(turn):
    def form(module, q, k, v, cos, sin):
        q, k = rms(q, module.q_gain), rms(k, module.k_gain)
        return *(x * cos + turn(module, x) * sin for x in (q, k)), v

    return form


def halves(_module, x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


FORMS = {
    "repeat": copied(lambda x: x.unsqueeze(2).repeat(1, 1, 2, 1, 1).flatten(1, 2)),
    "stack": copied(lambda x: torch.stack([x, x], 2).reshape(x.shape[0], 4, x.shape[2], 16)),
    "cat": copied(lambda x: torch.cat([x.unsqueeze(2)] * 2, 2).reshape(x.shape[0], 4, x.shape[2], 16)),
    "one by one": copied(lambda x: torch.cat([x[:, [head // 2]] for head in range(4)], 1)),
    "l2": in_groups(lambda x: F.normalize(x, dim=-1)),
    "rms": in_groups(lambda x: F.rms_norm(x, (4,), None, 1e-6)),
    "layer": in_groups(lambda x: F.layer_norm(x, (4,))),
}


def fused(module, *args, dynamic, opset=20, target="custom-op"):
    """The report of the file that torch.onnx writes; every rewrite is proven."""
    shapes = None
    if dynamic:
        batch, seq = torch.export.Dim("batch"), torch.export.Dim("seq")
        shapes = {"x": {0: batch, 1: seq}} | ({"tables": tuple({0: seq} for _ in args[1:])} if args[1:] else {})
    program = torch.onnx.export(module.eval(), args, dynamo=True, opset_version=opset, dynamic_shapes=shapes, verbose=False)
    report = qk.fuse(program.model_proto, target=target, require_fusion=True).report
    (entry,) = report.fused
    assert "unverified" not in entry.note
    return entry.spec


@pytest.mark.slow
@pytest.mark.parametrize("opset", [23, 25])
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_norm_without_weight(opset, dynamic):
    module = Attention(weightless).eval()
    for target in ("custom-op", "ort", "onnx"):
        spec = fused(module, torch.randn(2, 5, 32), dynamic=dynamic, opset=opset, target=target)
        assert (spec.norm.q_kind, spec.norm.k_kind, spec.attention.scale) == ("rms", "rms", 0.25)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_groups_and_copies(name):
    groups = name in ("l2", "rms", "layer")
    spec = fused(Attention(FORMS[name], kv_heads=4 if groups else 2), torch.randn(2, 5, 32), dynamic=True)
    assert spec.attention.kv_num_heads == (4 if groups else 2)
    assert (spec.norm.q_kind, spec.norm.groups) == (name, 4) if groups else ("rms", 1)


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize("dynamic", [True, False])
def test_one_head_with_norm_before_rotary(size, dynamic):
    module = Attention(turned(halves), heads=1, kv_heads=1, size=size)
    spec = fused(module, torch.randn(2, 5, 32), torch.randn(5, size), torch.randn(5, size), dynamic=dynamic)
    assert (spec.attention.q_num_heads, spec.rotary.order) == (1, "after_norm")


@pytest.mark.slow
def test_a_rotary_embedding_by_a_matrix():
    module = Attention(turned(lambda module, x: x @ module.turn), kv_heads=4)
    spec = fused(module, torch.randn(2, 5, 32), torch.randn(5, 16), torch.randn(5, 16), dynamic=True)
    assert spec.rotary.order == "after_norm"
