"""One attention written out in plain operators, with its norm, rotary embedding, scale and mask to choose."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


def rot_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rot_int(x):
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((-b, a), -1).flatten(-2)


class Attn(nn.Module):
    """One self-contained attention block with explicit ops: norm/rope/scale/mask chosen by ctor args."""

    def __init__(
        self,
        dim=64,
        heads=4,
        kv=None,
        hd=None,
        norm=None,
        order="before",
        rope="half",
        scale=None,
        causal=True,
        softcap=None,
        post_logits=None,
        bias=False,
        rotary_frac=1.0,
        cross_dim=None,
        impl="eager",
        window=None,
        q_post=None,
    ):
        super().__init__()
        kv = kv or heads
        hd = hd or dim // heads
        self.h, self.kv, self.hd, self.order, self.rope, self.causal, self.softcap, self.impl, self.window = (
            heads,
            kv,
            hd,
            order,
            rope,
            causal,
            softcap,
            impl,
            window,
        )
        self.q = nn.Linear(dim, heads * hd, bias=bias)
        self.k = nn.Linear(cross_dim or dim, kv * hd, bias=bias)
        self.v = nn.Linear(cross_dim or dim, kv * hd, bias=bias)
        self.o = nn.Linear(heads * hd, dim, bias=bias)
        self.qn, self.kn = norm(hd, heads), norm(hd, kv)
        self.scale = hd**-0.5 if scale is None else scale
        self.post = post_logits
        self.q_post = q_post
        self.rd = int(hd * rotary_frac)
        inv = 1.0 / (10000 ** (torch.arange(0, self.rd, 2).float() / max(self.rd, 1)))
        self.register_buffer("inv", inv, persistent=False)

    def rotate(self, x):
        if self.rope == "none":
            return x
        ang = torch.arange(x.shape[-2], device=x.device).float()[:, None] * self.inv
        if self.rope == "half":
            e = torch.cat((ang, ang), -1)
            r = rot_half
        else:
            e = ang.repeat_interleave(2, -1)
            r = rot_int
        xr, xp = x[..., : self.rd], x[..., self.rd :]
        xr = xr * e.cos() + r(xr) * e.sin()
        return torch.cat((xr, xp), -1) if self.rd < self.hd else xr

    def forward(self, x, context=None, key_mask=None):
        c = x if context is None else context
        q = self.q(x).unflatten(-1, (self.h, self.hd))
        k = self.k(c).unflatten(-1, (self.kv, self.hd))
        v = self.v(c).unflatten(-1, (self.kv, self.hd)).transpose(1, 2)
        if self.order == "before":
            q, k = self.qn(q), self.kn(k)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        q, k = self.rotate(q), self.rotate(k)
        if self.order == "after":
            q, k = self.qn(q.transpose(1, 2)).transpose(1, 2), self.kn(k.transpose(1, 2)).transpose(1, 2)
        if self.q_post is not None:
            q = self.q_post(q)
        if self.kv != self.h:
            k, v = k.repeat_interleave(self.h // self.kv, 1), v.repeat_interleave(self.h // self.kv, 1)
        if self.impl == "sdpa":
            o = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
        else:
            s = q @ k.transpose(-1, -2)
            s = self.post(s) if self.post is not None else s * self.scale
            if self.softcap:
                s = self.softcap * torch.tanh(s / self.softcap)
            if self.causal:
                i = torch.arange(s.shape[-2])[:, None]
                j = torch.arange(s.shape[-1])[None]
                vis = j <= i
                if self.window:
                    vis = vis & (i - j < self.window)
                s = s.masked_fill(~vis, float("-inf"))
            if key_mask is not None:
                s = s.masked_fill(~key_mask[:, None, None, :], torch.finfo(s.dtype).min)
            o = s.softmax(-1) @ v
        return self.o(o.transpose(1, 2).flatten(2))


class Block2(nn.Module):
    """two layers x = x + attn(norm(x))"""

    def __init__(self, mk, dim=64):
        super().__init__()
        self.n = nn.ModuleList([nn.LayerNorm(dim) for _ in range(2)])
        self.a = nn.ModuleList([mk() for _ in range(2)])

    def forward(self, x, context=None, key_mask=None):
        for n, a in zip(self.n, self.a, strict=False):
            x = x + a(n(x), context=context, key_mask=key_mask)
        return x
