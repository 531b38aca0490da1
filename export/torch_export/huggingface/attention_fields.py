"""Fields that the attention modules of transformers share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qknorm_onnx.spec.qk_norm_spec import UNLIMITED_WINDOW, AttentionSpec, SoftmaxPrecision

_PRECISIONS: dict[torch.dtype, SoftmaxPrecision] = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float64: "float64",
}


def head_counts(attention: Any) -> tuple[int, int]:
    """Query heads and key / value heads, read off the projections."""
    head_size = int(attention.head_dim)
    return attention.q_proj.out_features // head_size, attention.k_proj.out_features // head_size


def causal_attention(
    attention: Any, *, sliding_window: int | None = None, softmax_precision: SoftmaxPrecision = "float32"
) -> AttentionSpec:
    """Causal attention with the module's own scale. A sliding window of W tokens sees the query's own and W - 1 before it."""
    heads, kv_heads = head_counts(attention)
    return AttentionSpec(
        q_num_heads=heads,
        kv_num_heads=kv_heads,
        scale=float(attention.scaling),
        is_causal=True,
        left_window_size=UNLIMITED_WINDOW if sliding_window is None else sliding_window - 1,
        softmax_precision=softmax_precision,
    )


def model_precision(attention: nn.Module) -> SoftmaxPrecision:
    """The softmax precision of a module that leaves logits and softmax in the model's own type."""
    return _PRECISIONS.get(next(attention.parameters()).dtype, "float32")
