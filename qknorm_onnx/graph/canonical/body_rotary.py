"""The rotary stage of a function body: `reference.rotate` in ONNX operators that exist from opset 18 on.

Both tables are brought to one factor per rotated value, the sign of the quarter turn goes into the sines, and q and k
share the result: y = x * cos + swapped(x) * signed_sin, where `swapped` exchanges the two values of each pair.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.canonical.body_builder import KEEP, BodyBuilder, Dim
from qknorm_onnx.graph.canonical.body_signature import BodySignature
from qknorm_onnx.spec.qk_norm_spec import RotarySpec, SpecError

_TO_THE_END = np.iinfo(np.int64).max


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryTables:
    """Factors per rotated value, broadcastable to (B, S, H, R), in the compute type."""

    cos_bshr: ir.Value
    signed_sin_bshr: ir.Value


def rotary_size(spec: RotarySpec, head_size: Dim) -> int:
    """R as a number. Raises SpecError where it is the head size and that is only known at run time."""
    if spec.embedding_dim:
        return spec.rotated_size(head_size) if isinstance(head_size, int) else spec.embedding_dim
    if not isinstance(head_size, int):
        raise SpecError(
            "the whole head is rotated, but its size is not known: give the last dimension of the projection as a number, "
            "or set rotary_embedding_dim"
        )
    return spec.rotated_size(head_size)


def make_tables(
    body: BodyBuilder,
    spec: RotarySpec,
    cos: ir.Value,
    sin: ir.Value,
    *,
    signature: BodySignature,
    head_size: Dim,
    compute: ir.DataType,
) -> RotaryTables:
    """The tables (S, W), (B, S, W) or (B, H, S, W) as `RotaryTables`. Raises SpecError if W is not known."""
    size = rotary_size(spec, head_size)
    factors = []
    for name, table in (("cos", cos), ("sin", sin)):
        given = signature[name]
        if given is None or given.rank is None or given.last_dim is None:
            raise SpecError(f"the rank and the last dimension of input {name} must be known, to tell R from R / 2 factors")
        table = _heads_last_but_one(body, body.cast(table, compute), given.rank, name=name)
        if given.last_dim != size:  # one factor per pair
            table = _per_value(body, spec, table, size, rank=min(given.rank + 1, 4), name=name)
        factors.append(table)
    signs = body.constant(_sign_of_value(spec, size).astype(compute.numpy()), name="signs")
    return RotaryTables(cos_bshr=factors[0], signed_sin_bshr=body.op("Mul", factors[1], signs, name="signed_sin"))


def rotate(body: BodyBuilder, spec: RotarySpec, x_bshd: ir.Value, tables: RotaryTables, *, head_size: Dim, tag: str) -> ir.Value:
    """x (B, S, H, D) with the values that the spec names rotated, the others unchanged."""
    size = rotary_size(spec, head_size)
    before, rotated, after = _parts(body, spec, x_bshd, size=size, head_size=head_size, tag=tag)
    kept = body.op("Mul", rotated, tables.cos_bshr, name=f"{tag}_times_cos")
    turned = body.op("Mul", _swap(body, spec, rotated, size, tag=tag), tables.signed_sin_bshr, name=f"{tag}_times_sin")
    y = body.op("Add", kept, turned, name=f"{tag}_rotated")
    parts = [part for part in (before, y, after) if part is not None]
    return y if len(parts) == 1 else body.op("Concat", *parts, name=f"{tag}_rotated_bshd", axis=-1)


def _heads_last_but_one(body: BodyBuilder, table: ir.Value, rank: int, *, name: str) -> ir.Value:
    if rank == 4:
        return body.op("Transpose", table, name=f"{name}_bshr", perm=[0, 2, 1, 3])
    return body.op("Unsqueeze", table, body.ints(-2), name=f"{name}_bshr")


def _parts(
    body: BodyBuilder, spec: RotarySpec, x: ir.Value, *, size: int, head_size: Dim, tag: str
) -> tuple[ir.Value | None, ir.Value, ir.Value | None]:
    """The values in front of the rotated ones, those, and the rest; None for a part that is known to be empty."""
    end = spec.offset + size

    def part(start: int, stop: int, name: str) -> ir.Value:
        return body.op("Slice", x, body.ints(start), body.ints(stop), body.ints(-1), name=f"{tag}_{name}")

    before = part(0, spec.offset, "before") if spec.offset else None
    after = None if head_size == end else part(end, _TO_THE_END, "after")
    return before, x if before is None and after is None else part(spec.offset, end, "turning"), after


def _pair_layout(spec: RotarySpec, size: int) -> tuple[list[int], int]:
    """The last axis split so that one axis (the second result, from the end) holds the two values of each pair."""
    if spec.interleaved:
        return [size // 2, 2], -1
    if spec.sections == 1:
        return [2, size // 2], -2
    return [spec.sections, 2, size // spec.sections // 2], -2


def _swap(body: BodyBuilder, spec: RotarySpec, x: ir.Value, size: int, *, tag: str) -> ir.Value:
    """x with the two values of each pair exchanged; a Gather of single values would be ten times as slow."""
    layout, axis = _pair_layout(spec, size)
    halves = spec.sections == 1 and not spec.interleaved
    pairs = x if halves else body.reshape(x, KEEP, KEEP, KEEP, *layout, name=f"{tag}_pairs")
    axis = -1 if halves else axis
    first, second = body.ops("Split", pairs, names=[f"{tag}_first", f"{tag}_second"], axis=axis, num_outputs=2)
    swapped = body.op("Concat", second, first, name=f"{tag}_swapped", axis=axis)
    return swapped if halves else body.reshape(swapped, KEEP, KEEP, KEEP, size, name=f"{tag}_swapped_bshr")


def _per_value(body: BodyBuilder, spec: RotarySpec, table: ir.Value, size: int, *, rank: int, name: str) -> ir.Value:
    """A table of one factor per pair, of `rank` axes, as one factor per value."""
    if spec.sections == 1 and not spec.interleaved:
        return body.op("Concat", table, table, name=f"{name}_full", axis=-1)
    layout, axis = _pair_layout(spec, size)
    leading = [KEEP] * (rank - 1)
    single = body.reshape(
        table, *leading, *(1 if part - len(layout) == axis else dim for part, dim in enumerate(layout)), name=name
    )
    both = body.op("Concat", single, single, name=f"{name}_pairs", axis=axis)
    return body.reshape(both, *leading, size, name=f"{name}_full")


def _sign_of_value(spec: RotarySpec, size: int) -> np.ndarray[Any, Any]:
    """-1 for the first value of each pair, 1 for the second."""
    layout, axis = _pair_layout(spec, size)
    signs = np.ones(layout)
    np.moveaxis(signs, axis, 0)[0] = -1.0
    return signs.reshape(size)
