"""Rotary embeddings by 2 x 2 matrices that are computed from positions, as FLUX has them; signs in tables."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import qknorm_onnx as qk

HEADS, AXES = 3, (2, 4, 6)
SIZE = sum(AXES)
Tensor = torch.Tensor
SHAPES = {"x": {0: "batch", 1: "seq"}, "ids": {0: "batch", 1: "seq"}}


def angles(positions: Tensor, width: int) -> Tensor:
    """(..., S) -> (..., S, width / 2), in float64."""
    frequencies = 1.0 / 100.0 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    return positions[..., None].double() * frequencies


def matrices(angle: Tensor, *, entries=lambda c, s: (c, -s, s, c)) -> Tensor:
    """The matrix of each pair and position, as the original code of FLUX makes it: stacked, then cut to 2 by 2."""
    return torch.stack(entries(angle.cos(), angle.sin()), -1).unflatten(-1, (2, 2)).float()


def embedded(ids: Tensor, **options) -> Tensor:
    """A rotary embedding for each axis of an image: (B, S, D / 2, 2, 2)."""
    return torch.cat([matrices(angles(ids[..., axis], width), **options) for axis, width in enumerate(AXES)], -3)


def turned(x: Tensor, table: Tensor) -> Tensor:
    pairs = x.float().reshape(*x.shape[:-1], -1, 1, 2)
    return (table[..., 0] * pairs[..., 0] + table[..., 1] * pairs[..., 1]).reshape(x.shape).type_as(x)


def by_products(x: Tensor, table: Tensor) -> Tensor:
    return (table @ x.reshape(*x.shape[:-1], -1, 2, 1)).reshape(x.shape)


def by_rows(x: Tensor, table: Tensor) -> Tensor:
    """Row vectors times the matrices of the opposite angle."""
    return (x.unflatten(-1, (-1, 1, 2)) @ table.transpose(-1, -2)).reshape(x.shape)


def original(q: Tensor, k: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    table = embedded(ids).unsqueeze(1)
    return turned(q, table), turned(k, table)


def one_table_for_all(q: Tensor, k: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    table = embedded(ids[0])
    return turned(q, table), turned(k, table)


def heads_behind_tokens(q: Tensor, k: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    table = embedded(ids)[:, :, None]
    return turned(q.transpose(1, 2), table).transpose(1, 2), turned(k.transpose(1, 2), table).transpose(1, 2)


def together(q: Tensor, k: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    q, k = turned(torch.stack([q, k]), embedded(ids).unsqueeze(1)).unbind(0)
    return q, k


def expanded(q: Tensor, k: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    table = embedded(ids).unsqueeze(1).expand(-1, HEADS, -1, -1, -1, -1)
    return turned(q, table), turned(k, table)


def with_matmul(q: Tensor, k: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    table = embedded(ids).unsqueeze(1)
    return by_products(q, table), by_products(k, table)


def with_rows(q: Tensor, k: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    table = embedded(ids).unsqueeze(1)
    return by_rows(q, table), by_rows(k, table)


def with_entries(entries):
    """Other matrices than those of a turn."""

    def rotary(q: Tensor, k: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        table = embedded(ids, entries=entries).unsqueeze(1)
        return turned(q, table), turned(k, table)

    return rotary


def sign_in_the_table(q: Tensor, k: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Halves change places, and the table of sines has the sign."""
    angle = angles(ids[..., 0], SIZE)[:, None]
    cos, sin = torch.cat([angle.cos()] * 2, -1).float(), torch.cat([-angle.sin(), angle.sin()], -1).float()
    q, k = (x * cos + x.roll(SIZE // 2, -1) * sin for x in (q, k))
    return q, k


# (function of queries and keys, whether pairs are neighbours)
FORMS = {
    "original": (original, True),
    "one table for all": (one_table_for_all, True),
    "heads behind tokens": (heads_behind_tokens, True),
    "queries and keys together": (together, True),
    "a table for each head": (expanded, True),
    "matrix times pair": (with_matmul, True),
    "pair times matrix": (with_rows, True),
    "backwards": (with_entries(lambda c, s: (c, s, -s, c)), True),
    # Tables with one factor for each value hold these as well.
    "one cosine scaled": (with_entries(lambda c, s: (c, -s, s, 2 * c)), True),
    "a sine for a cosine": (with_entries(lambda c, s: (c, -s, s, s)), True),
    "sign in the table": (sign_in_the_table, False),
}


class Attention(nn.Module):
    def __init__(self, rotary) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.to_q, self.to_k, self.to_v = (nn.Linear(10, HEADS * SIZE) for _ in range(3))
        self.q_norm, self.k_norm = nn.RMSNorm(SIZE, eps=1e-5), nn.RMSNorm(SIZE, eps=1e-5)
        for norm in (self.q_norm, self.k_norm):
            nn.init.uniform_(norm.weight, 0.5, 2.0)
        self.rotary = rotary

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for project in (self.to_q, self.to_k, self.to_v))
        q, k = self.rotary(self.q_norm(q), self.k_norm(k), ids)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def inputs(batch: int, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, 40, (batch, length, len(AXES)), generator=generator)
    return {"x": torch.randn(batch, length, 10, generator=generator), "ids": ids.float()}


def assert_right(program: qk.Program, module: nn.Module, run_model) -> None:
    others = inputs(3, 9)
    torch.testing.assert_close(run_model(program.model, others)[0], module(**others), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FORMS)
def test_form_is_one_node(name, run_model):
    rotary, neighbours = FORMS[name]
    module = Attention(rotary).eval()
    program = qk.export(module, kwargs=inputs(2, 5), dynamic_shapes=SHAPES, require_fusion=True)
    (attention,) = program.report.fused
    assert attention.note == ""
    assert (attention.spec.rotary.order, attention.spec.rotary.interleaved) == ("after_norm", neighbours)
    assert_right(program, module, run_model)


@pytest.mark.parametrize("entries", [lambda c, s: (c, s, s, -c), lambda c, s: (c, s, s, c)], ids=["mirror", "no minus"])
@pytest.mark.parametrize("apply", [turned, by_products])
def test_matrices_that_do_not_turn_stay_outside(entries, apply, run_model):
    def rotary(q, k, ids):
        table = embedded(ids, entries=entries).unsqueeze(1)
        return apply(q, table), apply(k, table)

    module = Attention(rotary).eval()
    program = qk.export(module, kwargs=inputs(2, 5), dynamic_shapes=SHAPES)
    assert not program.report.fused and len(program.report.declined) == 1
    assert_right(program, module, run_model)
