"""Keys and values repeated by hand for grouped queries, as both exporters write it."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest
import torch

import qknorm_onnx as qk
from tests.foreign.foreign_models import Foreign, assert_right, dynamo, torchscript

HEADS, KV_HEADS, SIZE = 4, 2, 16
AXES = {"x": {0: "batch", 1: "sequence"}}


def repeated(x: torch.Tensor) -> torch.Tensor:
    return x.unsqueeze(2).repeat(1, 1, HEADS // KV_HEADS, 1, 1).flatten(1, 2)


def stacked(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x] * (HEADS // KV_HEADS), 2).reshape(x.shape[0], HEADS, x.shape[2], SIZE)


def tiled(x: torch.Tensor) -> torch.Tensor:
    """Not the same: query head h reads key head h modulo their number."""
    return x.repeat(1, HEADS // KV_HEADS, 1, 1)


class RMSNorm(torch.nn.Module):
    """Written out, since the older exporter has no F.rms_norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(SIZE) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(torch.nn.Module):
    """One attention with RMS norms of 4:2 heads, scores in plain products."""

    def __init__(self, repeat: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.projections = torch.nn.ModuleList(torch.nn.Linear(32, heads * SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
        self.norms = torch.nn.ModuleList(RMSNorm() for _ in range(2))
        self.repeat = repeat

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (project(x).view(batch, length, -1, SIZE) for project in self.projections)
        q, k, v = (each.transpose(1, 2) for each in (self.norms[0](q), self.norms[1](k), v))
        k, v = self.repeat(k), self.repeat(v)
        weights = torch.softmax(q @ k.transpose(-1, -2) * 0.3, dim=-1)
        return (weights @ v).transpose(1, 2).reshape(batch, length, HEADS * SIZE)


def source_of(repeat: Callable[[torch.Tensor], torch.Tensor]) -> Foreign:
    generator = torch.Generator().manual_seed(5)
    sizes = ((2, 6, 32), (3, 9, 32))
    example, other = ({"x": torch.randn(shape, generator=generator)} for shape in sizes)
    return Foreign(Attention(repeat).eval(), example, other, 1)


def written(exporter: str, source: Foreign) -> onnx.ModelProto:
    return torchscript(source, 17, AXES) if exporter == "TorchScript" else dynamo(source, axes=AXES)


@pytest.mark.parametrize("exporter", ["TorchScript", "dynamo"])
@pytest.mark.parametrize("repeat", [repeated, stacked])
def test_heads_repeated_by_hand_are_grouped_heads(repeat: Callable[[torch.Tensor], torch.Tensor], exporter: str) -> None:
    source = source_of(repeat)
    program = qk.fuse(written(exporter, source))
    (fused,) = program.report.fused
    assert (fused.spec.attention.q_num_heads, fused.spec.attention.kv_num_heads) == (HEADS, KV_HEADS)
    assert_right(program.to_proto(), source)


@pytest.mark.parametrize("exporter", ["TorchScript", "dynamo"])
def test_heads_in_another_order_are_not(exporter: str) -> None:
    source = source_of(tiled)
    program = qk.fuse(written(exporter, source))
    assert len(program.report.fused) + len(program.report.declined) == 1 and not program.report.refused
    assert all(fused.spec.attention.kv_num_heads == HEADS for fused in program.report.fused)
    assert_right(program.to_proto(), source)
