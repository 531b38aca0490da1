"""Attention with more than one stream or map: queries and keys of several projections."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.zoo.attention_block import Attn
from tests.zoo.entries import B, Entries, S, entry, normal
from tests.zoo.norm_modules import L2, RMS, TorchRMS

ZOO: Entries = {}


@entry(
    ZOO,
    "h_joint_mmdit",
    {
        "lib": "handwritten",
        "family": "joint_mmdit",
        "norm": "rms, separate weights per stream (norm_q/norm_added_q)",
        "axis": "head_dim",
        "order": "before_rope",
        "rope": "interleaved on concat",
        "scale": "1/sqrt(d)",
        "mask": "bidirectional joint",
        "cache": False,
        "gqa": False,
        "extras": ["Flux/SD3/Qwen-Image/HunyuanVideo: norm, then Concat(txt,img), then RoPE, then SDPA"],
    },
)
def _mmdit(attention):
    class MM(nn.Module):
        def __init__(self, dim=64, h=4):
            super().__init__()
            d = dim // h
            self.h, self.d = h, d
            for n in ("xi", "xt"):
                for p in "qkv":
                    setattr(self, n + p, nn.Linear(dim, dim))
                setattr(self, n + "qn", TorchRMS(d))
                setattr(self, n + "kn", TorchRMS(d))
                setattr(self, n + "o", nn.Linear(dim, dim))
            self.r = Attn(dim, h, norm=L2, rope="int")

        def forward(self, x, context):
            def f(m, y):
                return m(y).unflatten(-1, (self.h, self.d))

            q = torch.cat([self.xtqn(f(self.xtq, context)), self.xiqn(f(self.xiq, x))], 1).transpose(1, 2)
            k = torch.cat([self.xtkn(f(self.xtk, context)), self.xikn(f(self.xik, x))], 1).transpose(1, 2)
            v = torch.cat([f(self.xtv, context), f(self.xiv, x)], 1).transpose(1, 2)
            o = functional.scaled_dot_product_attention(self.r.rotate(q), self.r.rotate(k), v).transpose(1, 2).flatten(2)
            t = context.shape[1]
            return torch.cat([self.xto(o[:, :t]), self.xio(o[:, t:])], 1)

    return (
        MM(),
        {"x": normal(B, S, 64), "context": normal(B, 5, 64, seed=5)},
        {"x": {0: "batch", 1: "seq"}, "context": {0: "batch", 1: "txt"}},
    )


@entry(
    ZOO,
    "h_diff_attention_qknorm",
    {
        "lib": "handwritten",
        "family": "diff_attn",
        "norm": "rms",
        "axis": "head_dim",
        "order": "no_rope",
        "rope": "none",
        "scale": "1/sqrt(d)",
        "mask": "bidirectional",
        "cache": False,
        "gqa": False,
        "extras": ["differential attention: softmax(q1k1)-lambda*softmax(q2k2): two fused ops"],
    },
)
def _diff(attention):
    class D(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Linear(64, 128)
            self.k = nn.Linear(64, 128)
            self.v = nn.Linear(64, 64)
            self.qn, self.kn = RMS(16), RMS(16)
            self.l = nn.Parameter(torch.tensor(0.4))
            self.o = nn.Linear(64, 64)

        def forward(self, x):
            q = self.qn(self.q(x).unflatten(-1, (2, 4, 16))).permute(2, 0, 3, 1, 4)
            k = self.kn(self.k(x).unflatten(-1, (2, 4, 16))).permute(2, 0, 3, 1, 4)
            v = self.v(x).unflatten(-1, (4, 16)).transpose(1, 2)
            a = functional.scaled_dot_product_attention(q[0], k[0], v) - self.l * functional.scaled_dot_product_attention(
                q[1], k[1], v
            )
            return self.o(a.transpose(1, 2).flatten(2))

    return D(), {"x": normal(B, S, 64)}, {"x": {0: "batch", 1: "seq"}}
