"""What a spec hides, as one tensor of added logits, as large as fused operators want it: they broadcast no lengths."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.canonical.body_attention import Mask, limits_view, make_mask, rows_see_something, visible_keys
from qknorm_onnx.graph.canonical.body_builder import BodyBuilder, RuntimeSize
from qknorm_onnx.graph.canonical.body_cache import KeyPositions, key_positions
from qknorm_onnx.graph.canonical.body_signature import BodySignature
from qknorm_onnx.graph.canonical.function_body import Inputs, bias_of_rows
from qknorm_onnx.lowering.emit.head_layout import HeadTensor
from qknorm_onnx.spec.qk_norm_spec import AttentionSpec


def whole_mask(
    body: BodyBuilder, spec: AttentionSpec, inputs: Inputs, signature: BodySignature, *, dtype: ir.DataType, four_axes: bool
) -> Mask:
    """The mask of windows, causality and bias in `dtype`, (..., S, T); with `four_axes` (1 or B, 1 or Hq, S, T)."""
    past, cache_length = inputs.get("past_key"), inputs.get("cache_length")
    positions = key_positions(
        body, key=inputs["key"], past_key=past, cache_length=cache_length, query_offset=inputs.get("query_offset")
    )
    if "attention_bias" not in inputs and not limits_view(spec, positions):
        return Mask()
    num_queries = body.size(inputs["query"], 1, name="num_queries")
    num_keys = _num_keys(body, inputs, positions)
    rows = bias_of_rows(body, inputs, signature, dtype=dtype, num_keys=None if cache_length is None else num_keys)
    bias = above_lowest(body, rows.value)
    visible = None
    if limits_view(spec, positions):
        visible = visible_keys(body, spec, positions, num_queries=num_queries, num_keys=num_keys, columns=rows.columns)
    sees = bias is None and rows_see_something(spec, positions, per_row_positions="query_offset" in inputs)
    mask = make_mask(body, visible, bias, dtype=dtype, may_be_empty=not sees)
    if mask.added is None or (visible is not None and not four_axes):
        return mask
    sizes = [body.ints(1, 1)] if four_axes else []
    shape = body.op("Concat", *sizes, num_queries.vector, num_keys.vector, name="mask_shape", axis=0)
    return dataclasses.replace(mask, added=body.op("Expand", mask.added, shape, name="whole_mask"))


def _num_keys(body: BodyBuilder, inputs: Inputs, positions: KeyPositions) -> RuntimeSize:
    if positions.total is not None:
        return RuntimeSize(vector=positions.total)
    num_new = body.size(inputs["key"], 1, name="num_new_keys")
    past = inputs.get("past_key")
    if past is None:
        return num_new
    past_length = body.size(past, 2, name="num_past_keys")
    return RuntimeSize(vector=body.op("Add", num_new.vector, past_length.vector, name="num_keys"))


def above_lowest(body: BodyBuilder, bias: ir.Value | None) -> ir.Value | None:
    """A float bias without the lowest finite number: ONNX Runtime (1.32) takes that for -inf and makes such a row zero.

    Adding it or its neighbour makes no difference to a softmax: a row that holds nothing else is the mean of the values.
    """
    if bias is None or bias.dtype is None or bias.dtype == ir.DataType.BOOL:
        return bias
    limits = np.finfo(bias.dtype.numpy())
    lowest, above = float(limits.min), float(np.nextafter(limits.min, limits.dtype.type(0)))
    is_lowest = body.op("Equal", bias, body.scalar(lowest, bias.dtype), name="bias_is_lowest", dtype=ir.DataType.BOOL)
    return body.op("Where", is_lowest, body.scalar(above, bias.dtype), bias, name="bias_above_lowest", dtype=bias.dtype)


def without_empty_rows(y: HeadTensor, mask: Mask) -> HeadTensor:
    """y with zeros in the rows that see nothing, in the layout (B, S, H, Dv)."""
    if mask.empty_rows is None:
        return y
    body, rows = y.body, mask.empty_rows
    rows = body.op("Expand", rows, body.ints(1, 1, 1, 1), name="empty_rows_bhs1")
    rows = body.op("Transpose", rows, name="empty_rows_bsh1", perm=[0, 2, 1, 3])
    shown = y.as_bshd()
    assert shown.dtype is not None, "the builder types every value"
    zero = body.scalar(0.0, shown.dtype)
    return y.replaced(bshd=body.op("Where", rows, zero, shown, name="y_of_seeing_rows", dtype=shown.dtype))
