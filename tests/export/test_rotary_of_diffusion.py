"""Rotary embeddings and joint attention as diffusion transformers write them: exported, fused, and equal at other sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import qknorm_onnx as qk
from qknorm_onnx.torch_export.exporter import export_graph

HEADS, SIZE, TOKENS, TEXT = 4, 6, 9, 4


def turned(x):
    """Neighbours (a, b) as (-b, a)."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([-b, a], dim=-1).flatten(-2)


def halves(x, cos, sin):
    """use_real_unbind_dim=-2: the halves of a head are pairs."""
    a, b = x.reshape(*x.shape[:-1], 2, -1).unbind(-2)
    return (x.float() * cos + torch.cat([-b, a], dim=-1).float() * sin).to(x.dtype)


def written(x, cos, sin):
    """Wan: even and odd places of an empty buffer."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    out = torch.empty_like(x)
    out[..., 0::2] = a * cos[..., 0::2] - b * sin[..., 1::2]
    out[..., 1::2] = a * sin[..., 1::2] + b * cos[..., 0::2]
    return out


def in_float64(x, cos, sin):
    return (x.double() * cos.double() + turned(x).double() * sin.double()).to(x.dtype)


def interleaved(x, cos, sin):
    return x * cos + turned(x) * sin


def columns(x, cos, sin):
    """PRX: both columns of a 2 x 2 matrix for each pair."""
    c, s = cos[..., 0::2], sin[..., 0::2]
    matrices = torch.stack([torch.stack([c, -s], -1), torch.stack([s, c], -1)], -2)
    pairs = x.unflatten(-1, (-1, 1, 2))
    return (matrices[..., 0] * pairs[..., 0] + matrices[..., 1] * pairs[..., 1]).flatten(-2)


def split(x):
    return x.unflatten(-1, (HEADS, SIZE))


def each_head(rotary):
    return lambda x, cos, sin: rotary(split(x), cos[:, None, :SIZE], sin[:, None, :SIZE])


def image_behind(x, cos, sin):
    x = split(x).transpose(1, 2).clone()
    x[:, :, TEXT:] = interleaved(x[:, :, TEXT:], cos[TEXT:, :SIZE], sin[TEXT:, :SIZE])
    return x.transpose(1, 2)


def image_in_front(x, cos, sin):
    x = split(x)
    image = interleaved(x[:, :-TEXT], cos[:-TEXT, None, :SIZE], sin[:-TEXT, None, :SIZE])
    return torch.cat([image, x[:, -TEXT:]], dim=1)


def image_between(x, cos, sin):
    x = split(x)
    first, image, last = x.split([2, TOKENS - 3, 1], dim=1)
    return torch.cat([first, interleaved(image, cos[2:-1, None, :SIZE], sin[2:-1, None, :SIZE]), last], dim=1)


def projection(rotary):
    """LTX: tables of the whole projection, of its own for each head."""
    return lambda x, cos, sin: split(rotary(x, cos, sin))


# (function of the normalised projection, whether pairs are neighbours)
FORMS = {
    "projection, a table for each head": (projection(interleaved), True),
    "written at even and odd places": (each_head(written), True),
    "halves by unbind -2": (each_head(halves), False),
    "columns of matrices": (each_head(columns), True),
    "in float64": (each_head(in_float64), True),
    "text in front": (image_behind, True),
    "text behind": (image_in_front, True),
    "tokens at both ends": (image_between, True),
}


class Attention(nn.Module):
    """RMS norm over the projection or over each head, then `rotary`, then attention."""

    def __init__(self, rotary, *, per_head=False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.to_q, self.to_k, self.to_v = (nn.Linear(10, HEADS * SIZE) for _ in range(3))
        self.norms = nn.ModuleList(nn.RMSNorm(SIZE if per_head else HEADS * SIZE, eps=1e-5) for _ in range(2))
        for norm in self.norms:
            nn.init.uniform_(norm.weight, 0.5, 2.0)
        angles = torch.randn(TOKENS, HEADS * SIZE // 2)
        self.register_buffer("cos", angles.cos().repeat_interleave(2, -1))
        self.register_buffer("sin", angles.sin().repeat_interleave(2, -1))
        if rotary in (FORMS["halves by unbind -2"][0],):
            own = angles[:, : SIZE // 2].repeat(1, 2)
            self.cos, self.sin = own.cos(), own.sin()
        self.rotary, self.per_head = rotary, per_head

    def normalised(self, norm, x):
        return norm(split(x)).flatten(-2) if self.per_head else norm(x)

    def forward(self, x):
        q, k = (
            self.rotary(self.normalised(norm, project(x)), self.cos, self.sin).transpose(1, 2)
            for norm, project in zip(self.norms, (self.to_q, self.to_k), strict=True)
        )
        return scaled_dot_product_attention(q, k, split(self.to_v(x)).transpose(1, 2)).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("name", FORMS)
def test_form_is_one_node(name, run_model):
    rotary, neighbours = FORMS[name]
    module = Attention(rotary, per_head=name.startswith("text")).eval()
    program = qk.export(module, (torch.randn(2, TOKENS, 10),), dynamic_shapes={"x": {0: "batch"}}, require_fusion=True)
    (attention,) = program.report.fused
    assert attention.note == ""
    assert attention.spec.rotary.order == "after_norm"
    assert attention.spec.rotary.interleaved == neighbours
    x = torch.randn(3, TOKENS, 10)
    torch.testing.assert_close(run_model(program.model, {"x": x})[0], module(x), rtol=1e-5, atol=1e-5)


def test_pairs_across_heads_are_left_outside(run_model):
    module = Attention(projection(halves)).eval()  # the halves of the projection lie in other heads
    program = qk.export(module, (torch.randn(2, TOKENS, 10),))
    assert not program.report.fused and len(program.report.declined) == 1
    x = torch.randn(2, TOKENS, 10)
    torch.testing.assert_close(run_model(program.model, {"x": x})[0], module(x), rtol=1e-5, atol=1e-5)


def half_written(x, cos, sin):
    """Only the even places: the others stay zeros."""
    out = torch.zeros_like(x)
    out[..., 0::2] = interleaved(x, cos, sin)[..., 0::2]
    return out


def test_writes_into_part_of_a_tensor_are_no_cache(run_model):
    module = Attention(each_head(half_written)).eval()
    program = qk.export(module, (torch.randn(2, TOKENS, 10),))
    (miss,) = program.report.declined
    assert "cache" not in miss.reason
    x = torch.randn(2, TOKENS, 10)
    torch.testing.assert_close(run_model(program.model, {"x": x})[0], module(x), rtol=1e-5, atol=1e-5)


def squared(x, cos, sin):
    """No rotary embedding: squares of what an index of an axis picks."""
    pairs = split(x).unflatten(-1, (-1, 2))
    return torch.stack([pairs[..., 0] ** 2, pairs[..., 1] ** 2], dim=-1).flatten(-2)


def test_norm_behind_an_index_is_seen():
    (miss,) = qk.export(Attention(squared).eval(), (torch.randn(2, TOKENS, 10),)).report.declined
    assert "norm" in miss.reason.lower() or "ReduceMean" in miss.reason


class Repeated(nn.Module):
    """Heads repeated by a number that is kept in a tensor (Cosmos)."""

    def forward(self, x, y):
        count = torch.tensor(x.shape[1]) // torch.tensor(y.shape[1])
        return x + y.repeat_interleave(count, dim=1) + torch.repeat_interleave(y, repeats=count, dim=1)


def test_repeats_by_a_tensor_of_one_number(run_model):
    x, y = torch.randn(2, 6, 3), torch.randn(2, 2, 3)
    model, _ = export_graph(Repeated(), (x, y))
    assert list(model.graph.outputs[0].shape) == [2, 6, 3]
    torch.testing.assert_close(run_model(model, {"x": x, "y": y})[0], Repeated()(x, y))


class CutTable(nn.Module):
    """LongCat-Audio: halves from a constant of more positions than there are, cut to the tokens."""

    def __init__(self):
        super().__init__()
        self.attention = Attention(lambda x, cos, sin: halves(split(x), cos[:, None], sin[:, None]))
        self.register_buffer("angles", torch.randn(50, SIZE // 2))

    def forward(self, x):
        angles = torch.cat([self.angles, self.angles], dim=-1)
        self.attention.cos, self.attention.sin = (function(angles)[: x.shape[1]] for function in (torch.cos, torch.sin))
        return self.attention(x)


def test_a_table_cut_from_a_longer_constant_is_one_node(run_model):
    module = CutTable().eval()
    program = qk.export(module, (torch.randn(2, TOKENS, 10),), require_fusion=True)
    assert [attention.note for attention in program.report.fused] == [""]
    x = torch.randn(2, TOKENS, 10)
    torch.testing.assert_close(run_model(program.model, {"x": x})[0], module(x), rtol=1e-5, atol=1e-5)


def summed_matrices(x, cos, sin):
    """Kandinsky: the same, as a sum of products, then rounded to bfloat16."""
    c, s = cos[..., 0::2], sin[..., 0::2]
    matrices = torch.stack([c, -s, s, c], dim=-1).unflatten(-1, (2, 2))
    return (matrices * x.unflatten(-1, (-1, 1, 2))).sum(-1).flatten(-2).to(torch.bfloat16).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_in_a_wider_model_is_no_part_of_a_node(dtype):
    module = Attention(each_head(summed_matrices), per_head=True).eval().to(dtype)
    program = qk.export(module, (torch.randn(2, TOKENS, 10, dtype=dtype),))
    if dtype == torch.bfloat16:  # it rounds nothing there
        assert len(program.report.fused) == 1
    else:
        (miss,) = program.report.declined
        assert "rounded to a narrower type" in miss.reason
