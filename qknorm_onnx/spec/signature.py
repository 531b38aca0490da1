"""The operators' outside: domain, version, inputs, outputs, types, and which kernels serve which type.

Legend of the dimension letters, used in every docstring, message and table of the project:

| letter | meaning |
|---|---|
| B | batch |
| S | new query positions |
| N | new key / value positions |
| P | cached key / value positions (with `cache_length`: entries of the past buffers) |
| T | all key / value positions: P + N, or max(P, largest `cache_length` + N) where that is given |
| Hq, Hkv | query heads, key / value heads |
| D, Dv | size of a query / key head, of a value head |
| R, W | rotated values of a head; width of the cos / sin tables, R or R / 2 |

Names of tensors that are split into heads spell their axes: `query_bshd` is (B, S, H, D), `query_bhsd` is (B, H, S, D).
"""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Final, Literal

DOMAIN: Final = "ai.qknorm"
VERSION: Final = 1
ATTENTION_OP: Final = "QKNormAttention"
ROTARY_OP: Final = "QKNormRotary"

# A file may need several function bodies of one operator, and many runtimes tell functions apart by domain and name only.
# So every distinct body has a name of its own, of which the native library registers this many for each operator.
NAMES_PER_OPERATOR: Final = 32

# Positions (`query_offset`) further out see the same keys as this one, and sums with windows stay inside int64.
FARTHEST_POSITION: Final = 1 << 61

Dtype = Literal["float32", "float64", "float16", "bfloat16"]
DTYPES: Final[tuple[Dtype, ...]] = ("float32", "float64", "float16", "bfloat16")
Provider = Literal["cpu", "cuda"]

TypeConstraint = Literal["T", "T or float", "bool, T or float", "int64"]


def numbered_name(operator: str, number: int) -> str:
    """What the nodes of an operator's body number 1, 2, ... are called: `QKNormAttention`, `QKNormAttention_2`, ..."""
    return operator if number == 1 else f"{operator}_{number}"


_OPERATORS: Final = MappingProxyType(
    {
        numbered_name(operator, number): (operator, number)
        for operator in (ATTENTION_OP, ROTARY_OP)
        for number in range(1, NAMES_PER_OPERATOR + 1)
    }
)


def operator_of(op_type: str) -> str | None:
    """The operator of a node of `ai.qknorm` called `op_type`, whichever of its bodies the node has; None for no operator."""
    found = _OPERATORS.get(op_type)
    return found[0] if found else None


def number_of(op_type: str) -> int | None:
    """Which name of its operator `op_type` is, as `numbered_name` counts; None for no operator."""
    found = _OPERATORS.get(op_type)
    return found[1] if found else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSignature:
    """One input or output of an operator. `shapes` are the allowed ones, in the letters of the legend above."""

    name: str
    shapes: str
    constraint: TypeConstraint
    doc: str
    optional: bool = False


def _tensor(name: str, shapes: str, doc: str, *, constraint: TypeConstraint = "T", optional: bool = False) -> TensorSignature:
    return TensorSignature(name=name, shapes=shapes, constraint=constraint, doc=doc, optional=optional)


def _parameter(name: str, shapes: str, doc: str) -> TensorSignature:
    return _tensor(name, shapes, doc, constraint="T or float", optional=True)


_TABLE_SHAPES = "(S, W), (B, S, W) or (B, H, S, W)"

ATTENTION_INPUTS: Final[tuple[TensorSignature, ...]] = (
    _tensor("query", "(B, S, Hq*D)", "projected queries, not yet normalised"),
    _tensor("key", "(B, N, Hkv*D)", "projected keys, not yet normalised"),
    _tensor("value", "(B, N, Hkv*Dv)", "projected values"),
    _parameter("q_norm_weight", "(D), (Hq, D) or (Hq*D)", "gain of the query norm"),
    _parameter("k_norm_weight", "(D), (Hkv, D) or (Hkv*D)", "gain of the key norm"),
    _parameter("q_norm_bias", "(D), (Hq, D) or (Hq*D)", "bias of the query norm"),
    _parameter("k_norm_bias", "(D), (Hkv, D) or (Hkv*D)", "bias of the key norm"),
    _parameter("q_scale", "broadcastable to (B, Hq, S, D)", "multiplies the queries last, after norm and rotary"),
    _parameter("cos", _TABLE_SHAPES, "cosines at the positions of the new tokens, for q and k"),
    _parameter("sin", _TABLE_SHAPES, "sines, shaped as cos"),
    _tensor(
        "attention_bias",
        "broadcastable to (B, Hq, S, T)",
        "added to the logits, or where a bool is False the key is not seen; with cache_length it may have fewer columns than "
        "T, and keys behind the last one are not seen",
        constraint="bool, T or float",
        optional=True,
    ),
    _parameter("head_sink", "(Hq)", "one more logit of each head in the softmax denominator"),
    _tensor("past_key", "(B, Hkv, P, D)", "cached keys, after norm and rotary", optional=True),
    _tensor("past_value", "(B, Hkv, P, Dv)", "cached values", optional=True),
    _tensor(
        "cache_length",
        "(B)",
        "so many entries of each row of the past buffers are valid; the new ones are written behind them, and buffers without "
        "room for them grow",
        constraint="int64",
        optional=True,
    ),
    _tensor("query_offset", "(B)", "key position of the first query, where no cache says it", constraint="int64", optional=True),
)

ATTENTION_OUTPUTS: Final[tuple[TensorSignature, ...]] = (
    _tensor("Y", "(B, S, Hq*Dv)", "attention output"),
    _tensor("present_key", "(B, Hkv, T, D)", "past_key and the new prepared keys", optional=True),
    _tensor("present_value", "(B, Hkv, T, Dv)", "past_value and the new values", optional=True),
)

ROTARY_INPUTS: Final[tuple[TensorSignature, ...]] = (
    _tensor("x", "(B, S, H*D)", "projected queries or keys"),
    _parameter("weight", "(D), (H, D) or (H*D)", "gain of the norm"),
    _parameter("bias", "(D), (H, D) or (H*D)", "bias of the norm"),
    _parameter("scale", "broadcastable to (B, H, S, D)", "multiplies last, after norm and rotary"),
    _parameter("cos", _TABLE_SHAPES, "cosines at the positions of the tokens"),
    _parameter("sin", _TABLE_SHAPES, "sines, shaped as cos"),
)

ROTARY_OUTPUTS: Final[tuple[TensorSignature, ...]] = (_tensor("Y", "(B, S, H*D)", "normalised and rotated x"),)

ATTENTION_INPUT_NAMES: Final[tuple[str, ...]] = tuple(tensor.name for tensor in ATTENTION_INPUTS)
ROTARY_INPUT_NAMES: Final[tuple[str, ...]] = tuple(tensor.name for tensor in ROTARY_INPUTS)

# Which (operator, provider) has a native kernel, and for which types. An ONNX Runtime session has no fallback from a
# missing kernel, so a lowering asks this table before it leaves a node to the native library.
KERNEL_DTYPES: Final[MappingProxyType[tuple[str, Provider], tuple[Dtype, ...]]] = MappingProxyType(
    {
        (ATTENTION_OP, "cpu"): DTYPES,
        (ROTARY_OP, "cpu"): DTYPES,
        (ATTENTION_OP, "cuda"): ("float32", "float16", "bfloat16"),
        (ROTARY_OP, "cuda"): ("float32", "float16", "bfloat16"),
    }
)
