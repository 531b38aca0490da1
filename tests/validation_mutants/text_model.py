"""A small transformer in plain PyTorch whose attention can be made in many ways, right and wrong."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor, nn

WIDTH, VOCABULARY, MOST_POSITIONS = 24, 300, 96


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextForm:
    """What the model computes. The inputs are `tokens` (or `x`), and `mask`, `positions` and a cache where it has them."""

    norm: Literal["rms", "layer", "l2", "none"] = "rms"
    norm_axis: Literal["head", "hidden"] = "head"
    epsilon: float = 1e-6
    epsilon_mode: Literal["inside_sqrt", "clamp", "outside_sqrt"] = "inside_sqrt"
    gains: bool = True
    rotary: Literal["none", "halves", "neighbours"] = "halves"
    rotary_first: bool = False
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 8
    layers: int = 1
    scale: float | None = None
    softcap: float = 0.0
    causal: bool = True
    window: int = 0
    sink: bool = False
    bias: bool = False
    tokens: bool = True
    mask: bool = False
    positions: bool = False
    learned_positions: bool = False
    past: bool = False
    pooled: bool = False  # the row of the last real token instead of all rows


class Norm(nn.Module):
    """Of (B, H, S, D), or over all heads."""

    def __init__(self, form: TextForm, heads: int) -> None:
        super().__init__()
        self.form = form
        shape = (heads, 1, form.head_size) if form.norm_axis == "hidden" or form.norm == "layer" else (form.head_size,)
        self.gain = nn.Parameter(0.5 + torch.rand(shape)) if form.gains and form.norm != "none" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.form.norm == "none":
            return x
        axes = (1, 3) if self.form.norm_axis == "hidden" else (3,)
        x = x - x.mean(axes, keepdim=True) if self.form.norm == "layer" else x
        square = x.pow(2).sum(axes, keepdim=True) if self.form.norm == "l2" else x.pow(2).mean(axes, keepdim=True)
        if self.form.epsilon_mode == "inside_sqrt":
            x = x * torch.rsqrt(square + self.form.epsilon)
        elif self.form.epsilon_mode == "clamp":
            x = x / square.sqrt().clamp(min=self.form.epsilon)
        else:
            x = x / (square.sqrt() + self.form.epsilon)
        return x if self.gain is None else x * self.gain


class Block(nn.Module):
    """Attention and a small MLP, each behind an RMSNorm and added to its input."""

    def __init__(self, form: TextForm) -> None:
        super().__init__()
        self.form = form
        self.block_norm, self.mlp_norm = (nn.RMSNorm(WIDTH, eps=1e-5) for _ in range(2))
        self.q_proj = nn.Linear(WIDTH, form.heads * form.head_size, bias=form.bias)
        self.k_proj = nn.Linear(WIDTH, form.kv_heads * form.head_size, bias=form.bias)
        self.v_proj = nn.Linear(WIDTH, form.kv_heads * form.head_size, bias=form.bias)
        self.o_proj = nn.Linear(form.heads * form.head_size, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.q_norm, self.k_norm = Norm(form, form.heads), Norm(form, form.kv_heads)
        self.sink = nn.Parameter(torch.randn(form.heads)) if form.sink else None

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor] | None, seen: Tensor, past: Any) -> tuple[Tensor, Any]:
        form, h = self.form, self.block_norm(x)
        q = self._prepared(self._heads(self.q_proj(h)), self.q_norm, tables)
        k = self._prepared(self._heads(self.k_proj(h)), self.k_norm, tables)
        v = self._heads(self.v_proj(h))
        if past is not None:
            k, v = torch.cat([past["key"], k], 2), torch.cat([past["value"], v], 2)
        ratio = form.heads // form.kv_heads
        scale = form.head_size**-0.5 if form.scale is None else form.scale
        logits = q @ k.repeat_interleave(ratio, 1).transpose(-1, -2) * scale
        if form.softcap:
            logits = form.softcap * torch.tanh(logits / form.softcap)
        logits = logits.masked_fill(~seen, torch.finfo(logits.dtype).min)
        if self.sink is not None:
            sinks = self.sink[:, None, None].expand(*logits.shape[:3], 1)
            weights = torch.softmax(torch.cat([logits, sinks], -1), -1)[..., :-1]
        else:
            weights = torch.softmax(logits, -1)
        y = weights @ v.repeat_interleave(ratio, 1)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.silu(self.up(self.mlp_norm(x)))), {"key": k, "value": v}

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.form.head_size)).transpose(1, 2)

    def _prepared(self, x: Tensor, norm: Norm, tables: tuple[Tensor, Tensor] | None) -> Tensor:
        steps = (self._turned, lambda x, _: norm(x)) if self.form.rotary_first else (lambda x, _: norm(x), self._turned)
        for step in steps:
            x = step(x, tables)
        return x

    def _turned(self, x: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
        if tables is None:
            return x
        cos, sin = tables
        if self.form.rotary == "halves":
            first, second = x.chunk(2, -1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        first, second = x[..., ::2], x[..., 1::2]
        return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)


class TextModel(nn.Module):
    """Logits (B, S, vocabulary), or rows of the last real token, or hidden states; with the cache where it has one."""

    def __init__(self, form: TextForm, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.form = form
        self.table = nn.Embedding(VOCABULARY, WIDTH) if form.tokens else None
        self.places = nn.Embedding(MOST_POSITIONS, WIDTH) if form.learned_positions else None
        self.blocks = nn.ModuleList(Block(form) for _ in range(form.layers))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.sliding_window = form.window or None
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if "norm" in name:
                    parameter.copy_(0.5 + torch.rand_like(parameter))

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        past: Any = None,
    ) -> Any:
        form = self.form
        x = self.table(tokens) if self.table is not None else tokens
        start = 0 if past is None else past[0]["key"].shape[2]
        places = torch.arange(start, start + x.shape[1], device=x.device)
        if positions is None:
            positions = places[None]
        if self.places is not None:
            x = x + self.places(positions)
        tables = self._tables(positions, x) if form.rotary != "none" else None
        seen = self._seen(places, start + x.shape[1], mask)
        present = []
        for index, block in enumerate(self.blocks):
            x, made = block(x, tables, seen, None if past is None else past[index])
            present.append(made)
        x = self.norm(x)
        if form.pooled:
            last = x.shape[1] - 1 - mask.flip(1).argmax(1) if mask is not None else torch.full(x.shape[:1], x.shape[1] - 1)
            x = x[torch.arange(x.shape[0]), last]
        elif self.table is not None:
            x = x @ self.table.weight.T
        return {"logits": x, "present": present} if form.past else x

    def _tables(self, positions: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        half = self.form.head_size // 2
        angles = positions[:, None, :, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def _seen(self, places: Tensor, keys: int, mask: Tensor | None) -> Tensor:
        """(B or 1, 1, S, N)."""
        distance = places[:, None] - torch.arange(keys)[None]
        seen = distance >= 0 if self.form.causal else distance == distance
        if self.form.window:
            seen = seen & (distance.abs() < self.form.window)
        seen = seen[None, None]
        return seen if mask is None else seen & (mask[:, None, None, :] != 0)


@dataclasses.dataclass(frozen=True)
class Example:
    """How a model is called, and which sizes may vary."""

    kwargs: dict[str, Any]
    dynamic_shapes: dict[str, Any]


def example_of(form: TextForm, *, seed: int = 1, batch: int = 2, length: int = 6, cached: int = 4) -> Example:
    """Tokens from the middle of the vocabulary, a mask that hides nothing, positions that go on counting."""
    random = torch.Generator().manual_seed(seed)
    kwargs: dict[str, Any] = {}
    if form.tokens:
        kwargs["tokens"] = torch.randint(40, 200, (batch, length), generator=random)
    else:
        kwargs["tokens"] = torch.randn(batch, length, WIDTH, generator=random)
    shapes: dict[str, Any] = {"tokens": {0: "batch", 1: "length"}}
    start = cached if form.past else 0
    if form.mask:
        kwargs["mask"] = torch.ones(batch, start + length, dtype=torch.int64)
        shapes["mask"] = {0: "batch", 1: "past_length + length" if form.past else "length"}
    if form.positions:
        kwargs["positions"] = torch.arange(start, start + length).expand(batch, length).contiguous()
        shapes["positions"] = {0: "batch", 1: "length"}
    if form.past:
        size = (batch, form.kv_heads, cached, form.head_size)
        kwargs["past"] = [{part: torch.randn(size, generator=random) for part in ("key", "value")} for _ in range(form.layers)]
        shapes["past"] = [{part: {0: "batch", 2: "past_length"} for part in ("key", "value")} for _ in range(form.layers)]
    return Example(kwargs, shapes)


def twin(model: TextModel, **changes: Any) -> TextModel:
    """The model with the same weights in another form."""
    other = TextModel(dataclasses.replace(model.form, **changes))
    other.load_state_dict(model.state_dict(), strict=False)
    return other.eval()
