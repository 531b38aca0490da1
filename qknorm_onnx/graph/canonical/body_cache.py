"""The cache stage of a function body: `reference.append_to_cache`, for caches without and with lengths of their rows."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from qknorm_onnx.graph.canonical.body_builder import BodyBuilder, RuntimeSize
from qknorm_onnx.spec.signature import FARTHEST_POSITION


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyPositions:
    """Where the new tokens are, as int64 tensors; None where the step has no such thing.

    first_query: position of the first query, (1) or (B, 1, 1, 1); None is 0.
    write_at: positions (B, 1, N, 1) of the buffers at which the new keys are written, with `cache_length`.
    valid_keys: entries of each row that are valid after the step, (B, 1, 1, 1), with `cache_length`.
    total: T (1), entries of the buffers after the step, with `cache_length`.
    """

    first_query: ir.Value | None = None
    write_at: ir.Value | None = None
    valid_keys: ir.Value | None = None
    total: ir.Value | None = None


def key_positions(
    body: BodyBuilder,
    *,
    key: ir.Value,
    past_key: ir.Value | None,
    cache_length: ir.Value | None,
    query_offset: ir.Value | None,
) -> KeyPositions:
    """Positions for projected keys (B, N, Hkv*D) and a past (B, Hkv, P, D)."""
    if cache_length is not None:
        assert past_key is not None, "checked with the shapes"
        length = _per_row(body, cache_length, key, name="cache_length")
        num_new = body.size(key, 1, name="num_new_keys")
        new = body.op("Unsqueeze", count(body, num_new, name="new_key"), body.ints(1), name="new_key_column")
        return KeyPositions(
            first_query=length,
            write_at=body.op("Add", never_from_the_end(body, length), new, name="write_at"),
            valid_keys=body.op("Add", length, body.as_vector(num_new), name="valid_keys"),
            total=entries_after(body, cache_length, past_key, body.as_vector(num_new)),
        )
    if query_offset is not None:
        offset = _per_row(body, query_offset, key, name="query_offset")
        bounds = (body.scalar(bound, ir.DataType.INT64) for bound in (-FARTHEST_POSITION, FARTHEST_POSITION))
        return KeyPositions(first_query=body.op("Clip", offset, *bounds, name="query_offset_in_range"))
    if past_key is not None:
        return KeyPositions(first_query=body.size(past_key, 2, name="past_length").vector)
    return KeyPositions()


def append(body: BodyBuilder, past: ir.Value | None, new_bhsd: ir.Value, positions: KeyPositions, *, tag: str) -> ir.Value:
    """past ++ new, or past with the new entries written behind the valid ones of each row: (B, Hkv, T, size)."""
    if past is None:
        return new_bhsd
    if positions.write_at is None:
        return body.op("Concat", past, new_bhsd, name=f"present_{tag}", axis=2)
    assert positions.total is not None, "they come together"
    past = _with_room(body, past, positions.total, tag=tag)
    shape = body.op("Shape", new_bhsd, name=f"new_{tag}_shape", dtype=ir.DataType.INT64)
    indices = body.op("Expand", positions.write_at, shape, name=f"{tag}_write_at")
    return body.op("ScatterElements", past, indices, new_bhsd, name=f"present_{tag}", axis=2)


def used_entries(body: BodyBuilder, present_bhsd: ir.Value, positions: KeyPositions) -> ir.Value | None:
    """Whether an entry of a buffer is valid, (B, 1, 1, T); None where all are. The others may hold NaN."""
    if positions.valid_keys is None:
        return None
    keys = count(body, body.size(present_bhsd, 2, name="capacity"), name="entry")
    return body.op("Less", keys, positions.valid_keys, name="used_entries", dtype=ir.DataType.BOOL)


def count(body: BodyBuilder, size: RuntimeSize, *, name: str) -> ir.Value:
    """0 .. size - 1."""
    zero, one = (body.scalar(number, ir.DataType.INT64) for number in (0, 1))
    end = body.op("Squeeze", body.as_vector(size), body.ints(0), name=f"{name}_end")
    return body.op("Range", zero, end, one, name=name)


def entries_after(body: BodyBuilder, cache_length: ir.Value, past_key: ir.Value, num_new: ir.Value) -> ir.Value:
    """max(P, largest length + N), (1). Lengths out of range make no room: writing there is to fail."""
    past = body.size(past_key, 2, name="past_entries").vector
    least = body.op("Sub", past, num_new, name="full_past")
    every = body.op("Concat", body.op("Min", cache_length, past, name="lengths_of_past"), least, name="lengths_and_past", axis=0)
    longest = body.op("ReduceMax", every, body.ints(0), name="longest_past", keepdims=1)
    return body.op("Add", longest, num_new, name="num_entries")


def _with_room(body: BodyBuilder, past: ir.Value, total: ir.Value, *, tag: str) -> ir.Value:
    """past (B, Hkv, P, size) with zeros behind it, `total` entries in all."""
    assert past.dtype is not None, "the builder types every value"
    edges = [body.size(past, axis, name=f"past_{tag}_{axis}").vector for axis in range(4)]
    missing = body.op("Sub", total, edges[2], name=f"{tag}_entries_to_add")
    shape = body.op("Concat", *edges[:2], missing, edges[3], name=f"{tag}_room_shape", axis=0)
    zero = ir.tensor([0.0], dtype=ir.DataType.FLOAT)
    room = body.op("ConstantOfShape", shape, name=f"{tag}_room", dtype=ir.DataType.FLOAT, value=zero)
    return body.op("Concat", past, body.cast(room, past.dtype), name=f"past_{tag}_with_room", axis=2)


def _per_row(body: BodyBuilder, lengths: ir.Value, key: ir.Value, *, name: str) -> ir.Value:
    """(B) -> (B, 1, 1, 1), failing in the runtime where it is not one number for each row of the batch.

    One number for all would be spread out silently. A Reshape to the batch size is no check: ONNX Runtime makes it one to -1.
    """
    shape = body.op("Concat", body.size(key, 0, name=f"{name}_batch").vector, body.ints(1), name=f"{name}_b1", axis=0)
    zero = ir.tensor([0], dtype=ir.DataType.INT64)
    zeros = body.op("ConstantOfShape", shape, name=f"{name}_of_each_row", dtype=ir.DataType.INT64, value=zero)
    column = body.op("Unsqueeze", lengths, body.ints(1), name=f"{name}_column")
    joined = body.op("Concat", column, zeros, name=f"{name}_joined", axis=1)
    first = body.op("Slice", joined, body.ints(0), body.ints(1), body.ints(1), name=f"{name}_for_each_row")
    return body.op("Unsqueeze", first, body.ints(2, 3), name=f"{name}_b111")


def never_from_the_end(body: BodyBuilder, length: ir.Value) -> ir.Value:
    """A negative length as one behind the buffer, so that writing there fails: a negative index counts from the end."""
    negative = body.op("Less", length, body.ints(0), name="length_is_negative", dtype=ir.DataType.BOOL)
    beyond = body.scalar(FARTHEST_POSITION, ir.DataType.INT64)
    return body.op("Where", negative, beyond, length, name="first_written", dtype=ir.DataType.INT64)
