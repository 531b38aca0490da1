"""A module that the command line can name as SOURCE."""

from __future__ import annotations

import torch

import qknorm_onnx as qk


def article():
    torch.manual_seed(0)
    module = qk.QKNormAttention(32, 4).eval()
    return module, (torch.randn(2, 6, 32),), {}, {"x": {0: "batch", 1: "length"}}
