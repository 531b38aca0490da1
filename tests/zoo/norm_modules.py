"""Norms of queries and keys, and what may happen to the logits, as small modules: `norm(head_dim, heads)`."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional


class L2(nn.Module):
    def __init__(self, d=None, h=None):
        super().__init__()

    def forward(self, x):
        return functional.normalize(x, dim=-1)


class L2Rsqrt(nn.Module):
    def __init__(self, d=None, h=None):
        super().__init__()

    def forward(self, x):
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


class L2Param(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.w = nn.Parameter(0.5 + torch.rand(h, d))

    def forward(self, x):
        return functional.normalize(x, dim=-1) * self.w


class RMS(nn.Module):
    def __init__(self, d, h=None, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(0.5 + torch.rand(d))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class RMSPerHead(RMS):
    def __init__(self, d, h):
        super().__init__(d)
        self.weight = nn.Parameter(0.5 + torch.rand(h, d))


class TorchRMS(nn.Module):
    def __init__(self, d, h=None):
        super().__init__()
        self.n = nn.RMSNorm(d, eps=1e-5)
        nn.init.uniform_(self.n.weight, 0.5, 1.5)

    def forward(self, x):
        return self.n(x)


class LNb(nn.Module):
    def __init__(self, d, h=None, bias=True):
        super().__init__()
        self.n = nn.LayerNorm(d, eps=1e-6, bias=bias)
        nn.init.uniform_(self.n.weight, 0.5, 1.5)
        bias and nn.init.uniform_(self.n.bias, -0.3, 0.3)

    def forward(self, x):
        return self.n(x)


class LN0(nn.Module):
    def __init__(self, d, h=None):
        super().__init__()
        self.n = nn.LayerNorm(d, eps=1e-5, elementwise_affine=False)

    def forward(self, x):
        return self.n(x)


class GN(nn.Module):  # GroupNorm over the concatenated head channels, one group per head; x (B,S,H,D)
    def __init__(self, d, h, groups=None):
        super().__init__()
        self.n = nn.GroupNorm(groups or h, h * d)
        nn.init.uniform_(self.n.weight, 0.5, 1.5)
        nn.init.uniform_(self.n.bias, -0.3, 0.3)

    def forward(self, x):
        b, s, h, d = x.shape
        return self.n(x.reshape(b * s, h * d)).reshape(b, s, h, d)


class BN(nn.Module):  # BatchNorm1d on q/k channels in eval mode == affine per (head,dim)
    def __init__(self, d, h):
        super().__init__()
        self.n = nn.BatchNorm1d(h * d)
        nn.init.uniform_(self.n.weight, 0.5, 1.5)
        self.n.running_mean.uniform_(-0.2, 0.2)
        self.n.running_var.uniform_(0.5, 2)

    def forward(self, x):
        b, s, h, d = x.shape
        return self.n(x.reshape(b * s, h * d)).reshape(b, s, h, d)


class DyT(nn.Module):  # DynamicTanh used as q/k norm by diffusers autoencoder_same
    def __init__(self, d, h=None):
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.7))
        self.w = nn.Parameter(0.5 + torch.rand(d))
        self.b = nn.Parameter(torch.rand(d) - 0.5)

    def forward(self, x):
        return torch.tanh(self.alpha * x) * self.w + self.b


class FullHidden(nn.Module):
    def __init__(self, d, h, kind="rms"):
        super().__init__()
        self.n = RMS(h * d) if kind == "rms" else LNb(h * d)

    def forward(self, x):
        return self.n(x.flatten(-2)).unflatten(-1, x.shape[-2:])


class Tau(nn.Module):
    def __init__(self, h=None, init=8.0):
        super().__init__()
        self.tau = nn.Parameter(init * (0.5 + torch.rand((h, 1, 1) if h else ())))

    def forward(self, s):
        return s * self.tau


class ClampTau(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.linspace(1.5, 5.5, h).view(h, 1, 1))

    def forward(self, s):
        return s * torch.clamp(self.logit_scale, max=math.log(1 / 0.01)).exp()


class ClampLogits(nn.Module):
    def __init__(self, sc, lim):
        super().__init__()
        self.sc, self.lim = sc, lim

    def forward(self, s):
        return (s * self.sc).clamp(-self.lim, self.lim)


class NGPT(nn.Module):  # nGPT: q = norm(rope(q)) * s_qk, k likewise, scale sqrt(d)
    def __init__(self, d, h):
        super().__init__()
        self.sqk = nn.Parameter(torch.full((h, d), d**-0.5) * (0.5 + torch.rand(h, d)))
        self.g = d**0.5

    def forward(self, x):
        return functional.normalize(x, dim=-1) * (self.sqk * self.g)
