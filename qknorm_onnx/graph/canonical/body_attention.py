"""The attention stages of a function body: visibility, logits, softmax and values, as in `reference.py`.

No mask is computed where nothing is hidden. Query heads that share a key / value head are rows of one matrix product, so
that keys and values are never repeated.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.canonical.body_builder import KEEP, BodyBuilder, Dim, RuntimeSize
from qknorm_onnx.graph.canonical.body_cache import KeyPositions, count
from qknorm_onnx.spec.qk_norm_spec import UNLIMITED_WINDOW, AttentionSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask:
    """What hides keys; None where there is no such.

    added: everything as one tensor to add to the logits, (..., S, T).
    visible, bias: the same in two parts, bool and float. A key that is not visible may hold NaN or Inf: no sum hides that.
    empty_rows: which rows see nothing, (..., S, 1) bool.
    """

    added: ir.Value | None = None
    visible: ir.Value | None = None
    bias: ir.Value | None = None
    empty_rows: ir.Value | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOperands:
    """Inputs of the softmax part in the attention type: q is prepared and scaled, keys and values are all of them."""

    query_bhsd: ir.Value
    key_bhtd: ir.Value
    value_bhtd: ir.Value
    num_queries: RuntimeSize
    used: ir.Value | None = None
    head_sink: ir.Value | None = None


def logit_factor(spec: AttentionSpec) -> float:
    """What q is multiplied by: the scale, over the soft cap where there is one, so that tanh needs no division."""
    return spec.scale / spec.softcap if spec.softcap else spec.scale


def limits_view(spec: AttentionSpec, positions: KeyPositions) -> bool:
    """Whether causality, a window or the filled part of a cache can hide a key."""
    unlimited = spec.right_window_size == spec.left_window_size == UNLIMITED_WINDOW
    return spec.is_causal or not unlimited or positions.valid_keys is not None


def visible_keys(
    body: BodyBuilder,
    spec: AttentionSpec,
    positions: KeyPositions,
    *,
    num_queries: RuntimeSize,
    num_keys: RuntimeSize,
    columns: ir.Value | None = None,
) -> ir.Value | None:
    """Bool (S, T), (B, 1, 1, T) or (B, 1, S, T): what causality, windows and a cache let see. None where nothing is hidden.

    `columns` (1) is how many keys a bias is given for, with `cache_length`: those behind them are not seen.
    """
    ahead = 0 if spec.is_causal else spec.right_window_size
    queries = body.op("Unsqueeze", count(body, num_queries, name="query_index"), body.ints(1), name="query_column")
    if positions.first_query is not None:
        queries = body.op("Add", queries, positions.first_query, name="query_position")
    keys = count(body, num_keys, name="key_position")
    end = None if ahead == UNLIMITED_WINDOW else body.op("Add", queries, body.ints(ahead + 1), name="end_of_view")
    if positions.valid_keys is not None:
        valid = positions.valid_keys
        if columns is not None:
            valid = body.op("Min", valid, columns, name="valid_keys_with_bias")
        end = valid if end is None else body.op("Min", end, valid, name="end_of_view_in_cache")
    visible = None if end is None else body.op("Less", keys, end, name="before_end", dtype=ir.DataType.BOOL)
    if spec.left_window_size != UNLIMITED_WINDOW:
        start = body.op("Sub", queries, body.ints(spec.left_window_size), name="start_of_view")
        before = body.op("Less", keys, start, name="before_start", dtype=ir.DataType.BOOL)
        after = body.op("Not", before, name="after_start", dtype=ir.DataType.BOOL)  # tract 0.23 cuts the two without it
        visible = after if visible is None else body.op("And", visible, after, name="visible")
    return visible


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bias:
    """An attention bias with a column for every key, or one for all of them; `columns` (1): it had so many, None if all."""

    value: ir.Value | None = None
    columns: ir.Value | None = None


def widened_bias(body: BodyBuilder, bias: ir.Value, num_keys: RuntimeSize) -> Bias:
    """`bias` of any number of columns: one is for all keys, and keys behind the last one are not seen."""
    assert bias.dtype is not None, "the builder types every value"
    given = body.op("Shape", bias, name="bias_columns", dtype=ir.DataType.INT64, start=-1)
    for_all = body.op("Equal", given, body.ints(1), name="bias_for_all_keys", dtype=ir.DataType.BOOL)
    total = body.as_vector(num_keys)
    columns = body.op("Where", for_all, total, given, name="keys_with_bias", dtype=ir.DataType.INT64)
    leading = body.op("Shape", bias, name="bias_rows", dtype=ir.DataType.INT64, start=0, end=-1)
    shape = body.op("Concat", leading, body.op("Sub", total, columns, name="keys_without_bias"), name="more_bias_shape", axis=0)
    zero = body.constant(np.zeros(1, dtype=bias.dtype.numpy()), name="no_bias")
    widened = body.op("Concat", bias, body.op("Expand", zero, shape, name="more_bias"), name="bias_of_all_keys", axis=-1)
    return Bias(value=widened, columns=columns)


def rows_see_something(spec: AttentionSpec, positions: KeyPositions, *, per_row_positions: bool) -> bool:
    """Whether every query sees key 0, by the spec alone: then no row of the mask can be empty."""
    return spec.left_window_size == UNLIMITED_WINDOW and positions.valid_keys is None and not per_row_positions


def make_mask(
    body: BodyBuilder, visible: ir.Value | None, bias: ir.Value | None, *, dtype: ir.DataType, may_be_empty: bool
) -> Mask:
    """The mask of `visible` (bool) and of a bias in `dtype` or bool. Rows that see nothing get zeros here and in Y."""
    if bias is not None and bias.dtype == ir.DataType.BOOL:
        visible = bias if visible is None else body.op("And", visible, bias, name="visible_and_unmasked")
        bias = None
    if visible is None and bias is None:
        return Mask()
    minus_infinity, zero = body.scalar(float("-inf"), dtype), body.scalar(0.0, dtype)
    added = bias
    if visible is not None:
        added = body.op("Where", visible, zero if bias is None else bias, minus_infinity, name="mask", dtype=dtype)
    assert added is not None, "one of the two is given"
    if not may_be_empty:
        return Mask(added=added, visible=visible, bias=bias)
    empty = _empty_rows(body, visible, bias)
    seeing = body.op("Where", empty, zero, added, name="mask_of_seeing_rows", dtype=dtype)
    return Mask(added=seeing, visible=visible, bias=bias, empty_rows=empty)


def _empty_rows(body: BodyBuilder, visible: ir.Value | None, bias: ir.Value | None) -> ir.Value:
    """Which rows of the mask see nothing, (..., S, 1).

    Counted in zeros and ones: OpenVINO and tract have the lowest finite number for the maximum of infinities.
    """
    seen = visible
    if bias is not None:
        assert bias.dtype is not None, "the builder types every value"
        least = float(ml_dtypes.finfo(bias.dtype.numpy()).min)  # type: ignore[no-untyped-call]
        lowest = body.scalar(least, bias.dtype)
        hidden = body.op("Less", bias, lowest, name="hidden_by_bias", dtype=ir.DataType.BOOL)
        kept = body.op("Not", hidden, name="kept_by_bias", dtype=ir.DataType.BOOL)
        seen = kept if visible is None else body.op("And", visible, kept, name="seen", dtype=ir.DataType.BOOL)
    assert seen is not None, "one of the two is given"
    number = body.cast(seen, ir.DataType.FLOAT)
    most = body.op("ReduceMax", number, body.ints(-1), name="any_seen", keepdims=1)
    half = body.scalar(0.5, ir.DataType.FLOAT)
    return body.op("Less", most, half, name="empty_rows", dtype=ir.DataType.BOOL)


def attend(body: BodyBuilder, spec: AttentionSpec, operands: AttentionOperands, mask: Mask) -> ir.Value:
    """Softmax attention of prepared operands: (B, Hq, S, Dv) in the attention type."""
    grouped = spec.group_size > 1
    by_query_head: list[Dim] = [KEEP, spec.q_num_heads, operands.num_queries, KEEP]
    rows = body.times(operands.num_queries, spec.group_size)
    by_kv_head: list[Dim] = [KEEP, spec.kv_num_heads, rows, KEEP]
    per_head = mask.added is not None or operands.used is not None or operands.head_sink is not None

    query = operands.query_bhsd
    query = body.reshape(query, *by_kv_head, name="query_by_kv_head") if grouped else query
    logits = _logits(body, spec, query, operands.key_bhtd)
    if grouped and per_head:
        logits = body.reshape(logits, *by_query_head, name="logits_by_query_head")
    weights = _softmax(body, _masked(body, logits, operands, mask), operands.head_sink)
    if grouped and per_head:
        weights = body.reshape(weights, *by_kv_head, name="weights_by_kv_head")
    y = body.op("MatMul", weights, operands.value_bhtd, name="weighed_values")
    if grouped:
        y = body.reshape(y, *by_query_head, name="y_bhsd")
    if mask.empty_rows is None:
        return y
    assert y.dtype is not None, "the builder types every value"
    return body.op("Where", mask.empty_rows, body.scalar(0.0, y.dtype), y, name="y_of_seeing_rows", dtype=y.dtype)


def without_unused_entries(body: BodyBuilder, value_bhtd: ir.Value, used: ir.Value | None) -> ir.Value:
    """Zeros for the entries of a fixed-size cache that were never written."""
    if used is None:
        return value_bhtd
    assert value_bhtd.dtype is not None, "the builder types every value"
    column = body.op("Transpose", used, name="used_entries_b1t1", perm=[0, 1, 3, 2])
    zero = body.scalar(0.0, value_bhtd.dtype)
    return body.op("Where", column, value_bhtd, zero, name="used_values", dtype=value_bhtd.dtype)


def _logits(body: BodyBuilder, spec: AttentionSpec, query: ir.Value, key_bhtd: ir.Value) -> ir.Value:
    keys_bhdt = body.op("Transpose", key_bhtd, name="key_bhdt", perm=[0, 1, 3, 2])
    logits = body.op("MatMul", query, keys_bhdt, name="logits")
    dtype = logits.dtype
    assert dtype is not None, "the builder types every value"
    if spec.logit_clamp:
        bound = spec.logit_clamp / (spec.softcap or 1.0)
        logits = body.op("Clip", logits, body.scalar(-bound, dtype), body.scalar(bound, dtype), name="clamped_logits")
    if spec.softcap:
        logits = body.op("Tanh", logits, name="logits_over_cap")
        logits = body.op("Mul", logits, body.scalar(spec.softcap, dtype), name="capped_logits")
    return logits


def _masked(body: BodyBuilder, logits: ir.Value, operands: AttentionOperands, mask: Mask) -> ir.Value:
    dtype = logits.dtype
    assert dtype is not None, "the builder types every value"
    if mask.visible is None:
        assert operands.used is None, "entries of a cache that were never written are not visible"
        return logits if mask.added is None else body.op("Add", logits, mask.added, name="masked_logits")
    if mask.bias is not None:
        logits = body.op("Add", logits, mask.bias, name="biased_logits")
    hidden = body.scalar(float("-inf"), dtype)
    if mask.empty_rows is not None:
        zero = body.scalar(0.0, dtype)
        hidden = body.op("Where", mask.empty_rows, zero, hidden, name="hidden_logit", dtype=dtype)
    return body.op("Where", mask.visible, logits, hidden, name="masked_logits", dtype=dtype)


def _softmax(body: BodyBuilder, logits: ir.Value, head_sink: ir.Value | None) -> ir.Value:
    """Softmax over the last axis; a sink is one more column that is dropped afterwards."""
    if head_sink is None:
        return body.op("Softmax", logits, name="weights", axis=-1)
    sink = body.op("Unsqueeze", head_sink, body.ints(0, 2, 3), name="sink_1h11")
    leading = body.op("Shape", logits, name="logits_bhs", dtype=ir.DataType.INT64, start=0, end=3)
    shape = body.op("Concat", leading, body.ints(1), name="sink_shape", axis=0)
    column = body.op("Expand", sink, shape, name="sink_column")
    widened = body.op("Concat", logits, column, name="logits_and_sink", axis=-1)
    weights = body.op("Softmax", widened, name="weights_and_sink", axis=-1)
    return body.op("Slice", weights, body.ints(0), body.ints(-1), body.ints(-1), name="weights")
