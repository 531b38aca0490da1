"""PyTorch's attention with a boolean mask, written so that a query which may see no key gives zeros, as in PyTorch.

torch.onnx writes such a mask as float32's lowest number instead of minus infinity below opset 23: a fully hidden row then
becomes the mean of all values (measured with torch 2.13; PyTorch itself gives zeros since 2.5).
"""

from __future__ import annotations

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
    """Translation of `aten::scaled_dot_product_attention`: torch's own, after a boolean mask was made additive."""
    if attn_mask is not None and attn_mask.dtype == ir.DataType.BOOL:
        numbers: list[Any] = [op.Constant(value_float=number) for number in (0.0, float("-inf"))]
        seen, hidden = (op.CastLike(number, query) for number in numbers)
        attn_mask = op.Where(attn_mask, seen, hidden)
    return aten_scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
