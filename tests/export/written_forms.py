"""Attention as people write it: each function makes queries, keys and values of heads (B, H, S, D) in a way of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn import functional

HEADS: Final = 4
KV_HEADS: Final = 2
SIZE: Final = 16
WIDTH: Final = 32


class Written(torch.nn.Module):
    """`form(module, q, k, v, *tables)` of heads (B, H, S, D), whose result is attended to; linear layers and gains are random."""

    def __init__(self, form: Callable[..., Any], *, heads: int = HEADS, kv_heads: int = KV_HEADS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.heads, self.kv_heads = heads, kv_heads
        self.q, self.k, self.v = (torch.nn.Linear(WIDTH, count * SIZE) for count in (heads, kv_heads, kv_heads))
        self.q_gain, self.k_gain = (torch.nn.Parameter(0.5 + torch.rand(SIZE)) for _ in range(2))
        self.part = torch.nn.Parameter(0.5 + torch.rand(4))
        turn = torch.zeros(SIZE, SIZE)
        for index in range(SIZE // 2):
            turn[index + SIZE // 2, index], turn[index, index + SIZE // 2] = -1, 1
        self.register_buffer("turn", turn)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            projection(x).view(batch, length, heads, SIZE).transpose(1, 2)
            for projection, heads in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        q, k, v = self.form(self, q, k, v, cos, sin)
        scores = q @ k.transpose(-1, -2) / math.sqrt(SIZE)
        y = scores.softmax(-1) @ v
        return y.transpose(1, 2).reshape(batch, length, -1)


def rms(x: torch.Tensor, gain: torch.Tensor | None = None) -> torch.Tensor:
    """As Llama's class has it."""
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return x if gain is None else gain * x


def twice(x: torch.Tensor) -> torch.Tensor:
    """Each head twice, as transformers does it."""
    batch, heads, length, size = x.shape
    return x[:, :, None].expand(batch, heads, 2, length, size).reshape(batch, heads * 2, length, size)


def normed(norm: Callable[[Written, torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """A form whose queries and keys go through `norm(module, x, gain)`."""
    return lambda module, q, k, v, *_: (norm(module, q, module.q_gain), twice(norm(module, k, module.k_gain)), twice(v))


def copied(copy: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """A form with RMS norms, whose heads of keys and values are repeated by `copy`."""
    return lambda module, q, k, v, *_: (rms(q, module.q_gain), copy(rms(k, module.k_gain)), copy(v))


def turned(turn: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A form with RMS norms and then `turn(module, x, cos, sin)`; the tables are (S, D)."""

    def form(module: Written, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        q, k = (turn(module, rms(x, gain), cos, sin) for x, gain in ((q, module.q_gain), (k, module.k_gain)))
        return q, k if k.shape[1] == q.shape[1] else twice(k), v if k.shape[1] == q.shape[1] else twice(v)

    return form


def grouped(norm: Callable[[Written, torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """A form whose norm runs over groups of four values."""
    return lambda module, q, k, v, *_: (norm(module, q), twice(norm(module, k)), twice(v))


def by_pieces(x: torch.Tensor) -> torch.Tensor:
    pieces = []
    for head in range(KV_HEADS):
        pieces += [x[:, head], x[:, head]]
    return torch.stack(pieces, 1)


def expand_whole(x: torch.Tensor) -> torch.Tensor:
    batch, heads, length, size = x.shape
    return x.unsqueeze(2).expand(-1, -1, 2, -1, -1).contiguous().view(batch, heads * 2, length, size)


def by_rows(x: torch.Tensor) -> torch.Tensor:
    """Behind the transposition back: (B, S, H, D), each head twice, (B, 2H, S, D)."""
    x = x.transpose(1, 2)
    x = x.unsqueeze(3).expand(*x.shape[:3], 2, x.shape[-1]).flatten(2, 3)
    return x.transpose(1, 2)


def halves(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((-x[..., SIZE // 2 :], x[..., : SIZE // 2]), -1)


def complex_turn(_module: Written, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Llama's own, by complex numbers."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    turn = torch.complex(cos[:, : SIZE // 2], sin[:, : SIZE // 2])
    return torch.view_as_real(pairs * turn).flatten(-2)


def stacked_turn(_module: Written, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x[..., 0::2], x[..., 1::2]
    c, s = cos[:, : SIZE // 2], sin[:, : SIZE // 2]
    return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)


def unbound_turn(_module: Written, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned_pairs = torch.stack((-b, a), -1).reshape(x.shape)
    return x * cos + turned_pairs * sin


def halved_turn(_module: Written, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As GPT-OSS and FlashAttention write it: halves, two products each."""
    a, b = x.chunk(2, -1)
    c, s = cos[:, : SIZE // 2], sin[:, : SIZE // 2]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def reshaped_turn(_module: Written, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Halves by a view of two rows, turned by a flip with a sign."""
    rows = x.unflatten(-1, (2, SIZE // 2))
    sign = torch.tensor([[-1.0], [1.0]])
    return x * cos + (rows.flip(-2) * sign).flatten(-2) * sin


def einsum_turn(module: Written, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + torch.einsum("bhsd,de->bhse", x, module.turn) * sin


def matrix_of_pairs(_module: Written, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As FLUX writes it: a matrix of 2 by 2 for each pair."""
    c, s = cos[:, : SIZE // 2], sin[:, : SIZE // 2]
    freqs = torch.stack((c, -s, s, c), -1).reshape(*c.shape, 2, 2)
    pairs = x.reshape(*x.shape[:-1], -1, 1, 2)
    return (freqs[..., 0] * pairs[..., 0] + freqs[..., 1] * pairs[..., 1]).reshape(x.shape)


NORMS: Final = {
    "F.rms_norm": normed(lambda _m, x, _g: functional.rms_norm(x, (SIZE,))),
    "F.rms_norm with eps": normed(lambda _m, x, _g: functional.rms_norm(x, (SIZE,), None, 1e-5)),
    "F.rms_norm over [-1:]": normed(lambda _m, x, _g: functional.rms_norm(x, x.shape[-1:], None, 1e-6)),
    "F.rms_norm of ones": normed(lambda _m, x, _g: functional.rms_norm(x, (SIZE,), torch.ones(SIZE), 1e-6)),
    "F.rms_norm in float32": normed(lambda _m, x, _g: functional.rms_norm(x.float(), (SIZE,)).type_as(x)),
    "expanded gain": normed(lambda _m, x, g: rms(x) * g.expand_as(x)),
    "gain of rows": normed(lambda _m, x, g: rms(x) * g.view(1, 1, 1, -1).expand(1, x.shape[1], 1, SIZE)),
    "gain of repeated rows": normed(lambda _m, x, g: rms(x) * g.repeat(x.shape[1], 1).unsqueeze(1)),
    "gain plus one": normed(lambda _m, x, g: rms(x) * (1.0 + g).to(x.dtype)),
    "gain by full_like": normed(lambda _m, x, _g: rms(x) * torch.full_like(x, 1.3)),
    "vector norm": normed(lambda _m, x, g: x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + 1e-6) * g),
    "x.norm times root": normed(lambda _m, x, g: x / (x.norm(2, dim=-1, keepdim=True) * SIZE**-0.5 + 1e-6) * g),
    "variance without mean": normed(lambda _m, x, g: g * (x / (x.square().sum(-1, keepdim=True) / SIZE + 1e-6).sqrt())),
}
GROUPS: Final = {
    "normalize": grouped(lambda _m, x: functional.normalize(x.unflatten(-1, (4, 4)), dim=-1).flatten(-2)),
    "normalize, view": grouped(lambda _m, x: functional.normalize(x.reshape(*x.shape[:3], 4, 4), dim=-1).reshape(*x.shape)),
    "rms with gain": grouped(lambda m, x: rms(x.unflatten(-1, (4, 4)), m.part).flatten(-2)),
    "F.rms_norm": grouped(lambda m, x: functional.rms_norm(x.unflatten(-1, (4, 4)), (4,), m.part, 1e-6).flatten(-2)),
    "layer_norm": grouped(lambda m, x: functional.layer_norm(x.unflatten(-1, (4, 4)), (4,), m.part).flatten(-2)),
    "chunks": grouped(lambda _m, x: torch.cat([functional.normalize(part, dim=-1) for part in x.chunk(4, -1)], -1)),
    "stacked chunks": grouped(lambda _m, x: functional.normalize(torch.stack(x.split(4, -1), -2), dim=-1).flatten(-2)),
    "group_norm": grouped(lambda _m, x: functional.group_norm(x.reshape(-1, SIZE), 4).reshape(x.shape)),
}
COPIES: Final = {
    "repeat": copied(lambda x: x.unsqueeze(2).repeat(1, 1, 2, 1, 1).flatten(1, 2)),
    "repeat, view": copied(lambda x: x[:, :, None].repeat(1, 1, 2, 1, 1).view(x.shape[0], -1, x.shape[2], x.shape[3])),
    "repeat_interleave": copied(lambda x: x.repeat_interleave(2, 1)),
    "repeat_interleave of a tensor": copied(lambda x: torch.repeat_interleave(x, torch.tensor([2, 2]), dim=1)),
    "stack": copied(lambda x: torch.stack((x, x), 2).flatten(1, 2)),
    "stack, reshape": copied(lambda x: torch.stack([x] * 2, dim=2).reshape(x.shape[0], HEADS, -1, SIZE)),
    "cat": copied(lambda x: torch.cat((x[:, :, None], x[:, :, None]), 2).flatten(1, 2)),
    "cat of values": copied(
        lambda x: torch.cat((x, x), -1).view(x.shape[0], KV_HEADS, x.shape[2], 2, SIZE).transpose(2, 3).flatten(1, 2)
    ),
    "expand, contiguous": copied(expand_whole),
    "expand behind a transposition": copied(by_rows),
    "index": copied(lambda x: x[:, torch.tensor([0, 0, 1, 1])]),
    "index_select": copied(lambda x: x.index_select(1, torch.arange(HEADS) // 2)),
    "pieces": copied(by_pieces),
    "slices": copied(lambda x: torch.cat([x[:, i // 2 : i // 2 + 1] for i in range(HEADS)], 1)),
    "broadcast by a product with ones": copied(lambda x: (x.unsqueeze(2) * torch.ones(1, 1, 2, 1, 1)).flatten(1, 2)),
    "unbind": copied(lambda x: torch.stack([head for head in x.unbind(1) for _ in range(2)], 1)),
    "chunk": copied(lambda x: torch.cat([part.expand(-1, 2, -1, -1) for part in x.chunk(2, 1)], 1)),
}
TURNS: Final = {
    "halves": turned(lambda _m, x, c, s: x * c + halves(x) * s),
    "halves, split": turned(halved_turn),
    "halves, rows flipped": turned(reshaped_turn),
    "halves, rolled": turned(lambda _m, x, c, s: x * c + x.roll(SIZE // 2, -1) * torch.cat((-torch.ones(8), torch.ones(8))) * s),
    "matrix": turned(lambda m, x, c, s: x * c + (x @ m.turn) * s),
    "matrix, linear": turned(lambda m, x, c, s: x * c + functional.linear(x, m.turn.T) * s),
    "matrix, einsum": turned(einsum_turn),
    "matrix, sin first": turned(lambda m, x, c, s: torch.addcmul(torch.matmul(x, m.turn) * s, x, c)),
    "complex": turned(complex_turn),
    "stack, flatten": turned(stacked_turn),
    "unbind, stack": turned(unbound_turn),
    "matrix of pairs": turned(matrix_of_pairs),
}
_WITH_ONE_HEAD: Final = ("halves", "halves, split", "matrix", "complex", "stack, flatten", "unbind, stack")
ONE_HEAD: Final = {name: TURNS[name] for name in _WITH_ONE_HEAD}
KINDS: Final = {"norm": NORMS, "groups": GROUPS, "copies": COPIES, "turn": TURNS, "one head": ONE_HEAD}


def module_of(kind: str, name: str) -> Written:
    """The module of a form."""
    heads = {"heads": 1, "kv_heads": 1} if kind == "one head" else {}
    return Written(KINDS[kind][name], **heads).eval()
