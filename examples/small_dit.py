"""A diffusion transformer of 700,000 weights with what the large ones have: QK norm, rotary places in two dimensions, adaLN.

It learns a flow (Liu et al., "Flow Straight and Fast", arXiv:2209.03003): between a picture x and noise z lie the points
(1 - t) x + t z, and the network is asked for the way from one to the other, z - x, at any of them. Blocks and their modulation
are those of DiT (Peebles and Xie, arXiv:2212.09748), the norm of queries and keys is that of Stable Diffusion 3 (Esser et al.,
arXiv:2403.03206).
"""

from __future__ import annotations

import math

import torch
from torch import nn

PATCH = 2
TIME_FEATURES = 64


def geometric(first: float, last: float, count: int) -> torch.Tensor:
    """Frequencies `(count,)` from `first` to `last`.

    The network keeps them as buffers, so that they are numbers in the exported file. Computed in `forward` they would be computed
    anew by each runtime, rounded otherwise, and a time multiplies that by 1000: `qk.validate` finds it, 3e-6 instead of 5e-7.
    """
    return torch.logspace(math.log10(first), math.log10(last), count, dtype=torch.float64).float()


def rotary_table(rows: int, columns: int, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines `(rows * columns, 4 * frequencies)`: half of the pairs of a head turn by its row, half by its column."""
    row = torch.arange(rows, device=frequencies.device)[:, None, None] * frequencies
    column = torch.arange(columns, device=frequencies.device)[None, :, None] * frequencies
    angles = torch.cat([row.expand(-1, columns, -1), column.expand(rows, -1, -1)], dim=-1).flatten(0, 1)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Turn channel i of x `(batch, heads, tokens, width)` together with channel i + width / 2."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-second, first], dim=-1) * sine


class Attention(nn.Module):
    """Self attention over the patches of a picture; queries and keys are normalised in each head, then turned by their place."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_norm = nn.RMSNorm(width // heads, eps=1e-6)
        self.k_norm = nn.RMSNorm(width // heads, eps=1e-6)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """x and the result are `(batch, tokens, width)`."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q = rotate(self.q_norm(q), cosine, sine)
        k = rotate(self.k_norm(k), cosine, sine)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a perceptron; time and class shift, scale and gate both (adaLN-Zero: all gates start closed)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 6 * width)
        self.attention = Attention(width, heads)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: torch.Tensor, condition: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """x `(batch, tokens, width)`, condition `(batch, 1, width)`."""
        shift_a, scale_a, gate_a, shift_p, scale_p, gate_p = self.modulation(nn.functional.silu(condition)).chunk(6, dim=-1)
        x = x + gate_a * self.attention(modulated(x, shift_a, scale_a), cosine, sine)
        return x + gate_p * self.perceptron(modulated(x, shift_p, scale_p))


def modulated(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A LayerNorm whose gain and bias are told from outside."""
    return nn.functional.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


class SmallDiT(nn.Module):
    """The velocity z - x at the point x of the way from a picture to noise, at the time t, for a class; any even picture size.

    Class number `classes` means "any": it is what the other ones are compared with in classifier-free guidance.
    """

    def __init__(self, classes: int, width: int = 96, heads: int = 3, depth: int = 4) -> None:
        super().__init__()
        self.register_buffer("place_frequencies", geometric(1, 0.02, width // heads // 4), persistent=False)
        self.register_buffer("time_frequencies", geometric(1, 1000, TIME_FEATURES // 2), persistent=False)
        self.patches = nn.Linear(PATCH * PATCH, width)
        self.time = nn.Sequential(nn.Linear(TIME_FEATURES, width), nn.SiLU(), nn.Linear(width, width))
        self.kind = nn.Embedding(classes + 1, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.modulation = nn.Linear(width, 2 * width)
        self.pixels = nn.Linear(width, PATCH * PATCH)

    def forward(self, x: torch.Tensor, t: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """x `(batch, 1, height, width)`, t `(batch,)` in 0..1, label `(batch,)` int64; the velocity has the shape of x."""
        batch, _, height, width = x.shape
        rows, columns = height // PATCH, width // PATCH
        tokens = x.reshape(batch, rows, PATCH, columns, PATCH).transpose(2, 3).reshape(batch, rows * columns, PATCH * PATCH)
        angles = t[:, None] * self.time_frequencies
        condition = (self.time(torch.cat([angles.cos(), angles.sin()], dim=-1)) + self.kind(label))[:, None]
        cosine, sine = rotary_table(rows, columns, self.place_frequencies)
        y = self.patches(tokens)
        for block in self.blocks:
            y = block(y, condition, cosine, sine)
        shift, scale = self.modulation(nn.functional.silu(condition)).chunk(2, dim=-1)
        y = self.pixels(modulated(y, shift, scale))
        return y.reshape(batch, rows, columns, PATCH, PATCH).transpose(2, 3).reshape(batch, 1, height, width)
