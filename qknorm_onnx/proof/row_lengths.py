"""Inputs for a GroupQueryAttention: the lengths of its rows, its past and its new tokens only make sense together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import onnx_ir as ir

from qknorm_onnx.proof.region_inputs import Kind, RegionCase, random_values
from qknorm_onnx.proof.region_sizes import SymbolTable


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowLengthInputs:
    """Names of the inputs that hold `seqlens_k` and `total_sequence_length`, and the dimensions that must go with them.

    `dims` are dimensions of the file, each with its size or the field of a `Call` that says it. `is_buffer`: past and
    present have one size, so that there must be room for the new keys.
    """

    last: str
    total: str
    dims: tuple[tuple[int | ir.SymbolicDim, str | int], ...]
    has_past: bool
    is_buffer: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One call: `new` tokens for each row, `keys` of each row afterwards, and a past of size `past`."""

    what: str
    new: int
    past: int
    keys: tuple[int, ...]
    kinds: tuple[Kind, ...] = ("ordinary",)

    @property
    def batch(self) -> int:
        """Number of rows."""
        return len(self.keys)


# What the operator allows: a first prompt; one token for each row; a chunk of several tokens only for a single row.
CALLS: Final = (
    Call(what="a first prompt", new=7, past=0, keys=(7, 7, 7), kinds=("ordinary", "small rows", "tiny rows")),
    Call(what="a first prompt into a buffer", new=7, past=11, keys=(7, 7)),
    Call(what="a token behind pasts of different lengths", new=1, past=9, keys=(10, 5, 1), kinds=("ordinary", "small rows")),
    Call(what="a token into a buffer", new=1, past=13, keys=(10, 6)),
    Call(what="a chunk of tokens", new=5, past=9, keys=(14,)),
    Call(what="a chunk of tokens into a buffer", new=5, past=15, keys=(11,)),
)


def row_lengths(region: ir.Model) -> RowLengthInputs | None:
    """What the inputs of a region with a GroupQueryAttention must agree on; None for any other region."""
    names = {value.name for value in region.graph.inputs}
    for node in region.graph:
        if node.op_type != "GroupQueryAttention" or len(node.inputs) < 7:
            continue
        query, last, total = (node.inputs[index] for index in (0, 5, 6))
        if last is None or total is None or query is None or query.shape is None or not {last.name, total.name} <= names:
            continue
        dims: list[tuple[int | ir.SymbolicDim, str | int]] = [(query.shape[0], "batch"), (query.shape[1], "new")]
        pasts = [value for value in node.inputs[3:5] if value is not None and value.shape is not None]
        for past in pasts:
            assert past.shape is not None
            dims += [(past.shape[0], "batch"), (past.shape[2], "past"), (past.shape[3], _head_size(node, query))]
        return RowLengthInputs(
            last=str(last.name),
            total=str(total.name),
            dims=tuple(dims),
            has_past=bool(pasts),
            is_buffer=bool(pasts) and _size(pasts[0]) == _size(node.outputs[1] if len(node.outputs) > 1 else None),
        )
    return None


def _head_size(node: ir.Node, query: ir.Value) -> int:
    """The size of a head; the queries have a fixed width, or the operator would not have been recognised."""
    assert query.shape is not None
    width = query.shape[2]
    return width // node.attributes["num_heads"].as_int() if isinstance(width, int) else 0


def _size(cache: ir.Value | None) -> int | ir.SymbolicDim | None:
    return cache.shape[2] if cache is not None and cache.shape is not None else None


def length_cases(
    lengths: RowLengthInputs, inputs: Sequence[ir.Value], table: SymbolTable, *, seed: int, half: bool = False
) -> Iterator[RegionCase]:
    """The calls that the sizes of the region allow."""
    random = np.random.default_rng(seed)
    for call in CALLS:
        sizes = _sizes(lengths, call)
        if sizes is None:
            continue
        for kind in call.kinds:
            arrays = {
                name: random_values(value, table.shape(name, sizes, may_be_empty=True), kind, random, half=half)
                for value in inputs
                if (name := str(value.name)) not in (lengths.last, lengths.total)
            }
            keys = np.asarray(call.keys)
            types = {str(value.name): value.dtype for value in inputs}
            for name, array in ((lengths.last, keys - 1), (lengths.total, keys.max())):
                dtype = types[name]
                assert dtype is not None, "inputs without a type are refused before"
                arrays[name] = np.asarray(array).astype(dtype.numpy())
            yield RegionCase(what=f"{kind}; {call.what}", inputs=arrays, may_be_undefined=kind == "tiny rows", keys=keys)


def _sizes(lengths: RowLengthInputs, call: Call) -> dict[str, int] | None:
    """Sizes for the symbols, None where a fixed size or a buffer excludes the call."""
    total = max(call.keys)
    if lengths.is_buffer and call.past < total:
        return None
    if not lengths.has_past and (call.past or total != call.new):
        return None
    sizes: dict[str, int] = {}
    for dim, wanted in lengths.dims:
        size = wanted if isinstance(wanted, int) else getattr(call, wanted)
        if isinstance(dim, int) and dim != size:
            return None
        if isinstance(dim, ir.SymbolicDim) and sizes.setdefault(str(dim.value), size) != size:
            return None
    return sizes
