"""PyTorch's attention with a boolean mask, written so that a query which may see no key gives zeros, as in PyTorch.

torch.onnx writes such a mask as float32's lowest number instead of minus infinity below opset 23: a fully hidden row then
becomes the mean of all values (measured with torch 2.13; PyTorch itself gives zeros since 2.5).
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Translation of `aten::scaled_dot_product_attention` on (B, H, S, D): ours for a boolean mask, else torch's own."""
    head_size, num_heads, kv_heads = query.shape[3], query.shape[1], key.shape[1]
    fixed = all(isinstance(size, int) for size in (head_size, num_heads, kv_heads))
    if attn_mask is None or attn_mask.dtype != ir.DataType.BOOL or dropout_p or not fixed:
        return aten_scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if enable_gqa and num_heads != kv_heads:
        key, value = (_repeated(tensor, num_heads) for tensor in (key, value))
    return _attention(query, key, value, attn_mask, scale=head_size**-0.5 if scale is None else scale)


def _attention(query: Any, key: Any, value: Any, mask: Any, *, scale: float) -> Any:
    # The root of the scale on both sides keeps half-precision logits in range, as torch.onnx does it.
    root = _like(query, math.sqrt(abs(scale)))
    query, key = op.Mul(query, root), op.Mul(op.Transpose(key, perm=[0, 1, 3, 2]), root)
    scores = op.MatMul(query if scale >= 0 else op.Neg(query), key)
    logits = op.Add(scores, op.Where(mask, _like(query, 0.0), _like(query, -math.inf)))
    weights = op.Softmax(logits, axis=-1)
    weights = op.Where(op.IsNaN(weights), _like(query, 0.0), weights)  # a row without keys is 0 / 0
    return op.MatMul(weights, value)


def _repeated(tensor: Any, num_heads: int) -> Any:
    """Each key / value head as often as query heads read it: (B, Hkv, T, D) -> (B, Hq, T, D)."""
    copies = _integers(1, 1, num_heads // tensor.shape[1], 1, 1)
    repeated = op.Expand(op.Unsqueeze(tensor, _integers(2)), copies)
    return op.Reshape(repeated, _integers(0, num_heads, -1, tensor.shape[3]))


def _integers(*numbers: int) -> Any:
    return op.Constant(value_ints=list(numbers))


def _like(tensor: Any, number: float) -> Any:
    constant: Any = op.Constant(value_float=number)
    return op.CastLike(constant, tensor)
