"""Which kernels are compiled ahead of time, and the types of their parameters.

A *plain* image is compiled for what most models need; its parameter hints (`divisor`) let the compiler load 16 bytes at a
time, and whoever launches it must check them. A *general* image has no hints and every feature, for one size of head
that holds them all: it serves what no plain image does, more slowly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final

from qknorm_onnx.custom_ops.kernels.cuda.arguments import Logits, Mask, Positions, Rotary, Rows, Side
from qknorm_onnx.custom_ops.kernels.cuda.tiles import (
    HEADS_OF_DECODE,
    STATISTICS_WIDTH,
    Tile,
    decode_tile,
    prefill_tile,
    prologue_tile,
)

PADDED_HEADS: Final = (64, 128, 256)
TRITON_TYPES: Final = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
MOST_SPLITS: Final = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Image:
    """One kernel compiled for one set of compile-time choices. Fields that a kernel does not have are at their default."""

    kernel: str
    dtype: str
    padded: int = 0
    interleaved: bool = False
    statistics: bool = False
    capped: bool = False
    masked: bool = False
    hinted: bool = False

    @property
    def name(self) -> str:
        """A readable name, unique in the set."""
        features = [field for field in ("interleaved", "statistics", "capped", "masked") if getattr(self, field)]
        parts = [self.kernel, self.dtype, f"d{self.padded}" if self.padded else "", *features, "" if self.hinted else "general"]
        return "-".join(part for part in parts if part)

    def tile(self, capability: int) -> Tile:
        """Tile sizes, warps and stages for a compute capability."""
        wide = self.dtype == "float32"
        if self.kernel == "prefill":
            return prefill_tile(self.padded, wide=wide, masked=self.masked, capability=capability)
        if self.kernel == "decode":
            return decode_tile(self.padded, wide=wide, masked=self.masked)
        if self.kernel == "prepare":
            return prologue_tile(self.padded)
        return Tile(rows=1, keys=0, warps=4, stages=1)

    def constants(self, capability: int) -> dict[str, Any]:
        """The compile-time parameters by name."""
        tile = self.tile(capability)
        head = {"DP": self.padded}
        turn = {"INTERLEAVED": self.interleaved}
        logits = {"CAP": self.capped, "MASK": self.masked, "PRECISION": "tf32x3"}
        of_kernel: dict[str, dict[str, Any]] = {
            "prepare": {"BM": tile.rows, **head, **turn, "STATISTICS": self.statistics},
            "row_statistics": {"WIDTH": STATISTICS_WIDTH},
            "prefill": {"BM": tile.rows, "BN": tile.keys, **head, **logits},
            "decode": {"HEADS": HEADS_OF_DECODE, "BN": tile.keys, **head, **turn, **logits},
            "combine": {"NS": MOST_SPLITS, **head},
        }
        return of_kernel[self.kernel]


def all_images() -> tuple[Image, ...]:
    """The images of one architecture."""
    return (*_plain_images(), *_general_images())


def _plain_images() -> Iterator[Image]:
    for dtype in TRITON_TYPES:
        for padded in PADDED_HEADS:
            yield from (
                Image(kernel="prepare", dtype=dtype, padded=padded, interleaved=interleaved, hinted=True)
                for interleaved in (False, True)
            )
            yield Image(kernel="combine", dtype=dtype, padded=padded, hinted=True)
            yield from (Image(dtype=dtype, padded=padded, hinted=True, **choice) for choice in _attention_choices(dtype))


def _attention_choices(dtype: str) -> Iterator[dict[str, Any]]:
    yield from ({"kernel": kernel} for kernel in ("prefill", "decode"))
    if dtype == "float32":
        return
    yield from ({"kernel": "prefill", "capped": capped, "masked": masked} for capped, masked in ((1, 0), (0, 1), (1, 1)))
    yield from ({"kernel": "decode", **choice} for choice in ({"capped": True}, {"interleaved": True}, {"masked": True}))


def _general_images() -> Iterator[Image]:
    padded = PADDED_HEADS[-1]
    for dtype in TRITON_TYPES:
        yield Image(kernel="row_statistics", dtype=dtype)
        yield Image(kernel="prefill", dtype=dtype, padded=padded, capped=True, masked=True)
        for interleaved in (False, True):
            yield Image(kernel="decode", dtype=dtype, padded=padded, interleaved=interleaved, capped=True, masked=True)
            for statistics in (False, True):
                yield Image(kernel="prepare", dtype=dtype, padded=padded, interleaved=interleaved, statistics=statistics)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """One run-time parameter: `name` is `argument` or `argument.field`; values are multiples of `divisor` (pointers: bytes)."""

    name: str
    type: str
    divisor: int


# Type and hint of each argument. `*` is a pointer to T. Hints: 8 halves or 16 bytes make one load of 16 bytes.
_SIDE: Final = Side(
    x=("*", 16),
    batch_stride=("i64", 8),
    row_stride=("i64", 8),
    weight=("*", 16),
    weight_stride=("i32", 8),
    bias=("*", 16),
    bias_stride=("i32", 8),
    scale=("*", 16),
    scale_batch=("i64", 1),
    scale_head=("i64", 1),
    scale_row=("i64", 1),
    scale_column=("i64", 1),
    statistics=("*fp32", 4),
    groups=("i32", 1),
    group_size=("i32", 1),
    flags=("i32", 1),
    epsilon=("fp32", 1),
    inverse_count=("fp32", 1),
)
_ROTARY: Final = Rotary(
    cos=("*", 16),
    sin=("*", 16),
    batch_stride=("i64", 8),
    head_stride=("i64", 8),
    row_stride=("i64", 8),
    size=("i32", 8),
    section=("i32", 16),
    offset=("i32", 8),
)
_ROWS: Final = Rows(data=("*", 16), batch_stride=("i64", 8), head_stride=("i64", 8), row_stride=("i64", 8))
_POSITIONS: Final = Positions(starts=("*i64", 8), kind=("i32", 1), first=("i32", 1), new_keys=("i32", 1), capacity=("i32", 1))
_MASK: Final = Mask(
    data=("*", 1),
    kind=("i32", 1),
    batch_stride=("i64", 1),
    head_stride=("i64", 1),
    row_stride=("i64", 1),
    column_stride=("i64", 1),
)
_LOGITS: Final = Logits(
    scale=("fp32", 1),
    clamp=("fp32", 1),
    cap=("fp32", 1),
    keys_before=("i32", 1),
    keys_after=("i32", 1),
    sink=("*", 4),
    has_sink=("i32", 1),
    sink_float32=("i32", 1),
)
_SIZE: Final = ("i32", 1)
_HEAD: Final = ("i32", 8)

ARGUMENTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "prepare": {
        "query": _SIDE,
        "key": _SIDE,
        "value": _ROWS,
        "rotary": _ROTARY,
        "query_out": _ROWS,
        "key_out": _ROWS,
        "value_out": _ROWS,
        "positions": _POSITIONS,
        "num_queries": _SIZE,
        "q_heads": _SIZE,
        "kv_heads": _SIZE,
        "D": _HEAD,
        "Dv": _HEAD,
    },
    "row_statistics": {"side": _SIDE, "out": ("*fp32", 4), "length": _SIZE},
    "prefill": {
        "query": _ROWS,
        "keys": _ROWS,
        "values": _ROWS,
        "out": _ROWS,
        "mask": _MASK,
        "logits": _LOGITS,
        "positions": _POSITIONS,
        "num_queries": _SIZE,
        "group": _SIZE,
        "D": _HEAD,
        "Dv": _HEAD,
    },
    "decode": {
        "query": _SIDE,
        "key": _SIDE,
        "value": _ROWS,
        "rotary": _ROTARY,
        "keys": _ROWS,
        "values": _ROWS,
        "out": _ROWS,
        "partial": ("*fp32", 16),
        "partial_state": ("*fp32", 4),
        "mask": _MASK,
        "logits": _LOGITS,
        "positions": _POSITIONS,
        "group": _SIZE,
        "D": _HEAD,
        "Dv": _HEAD,
    },
    "combine": {
        "partial": ("*fp32", 16),
        "partial_state": ("*fp32", 4),
        "out": _ROWS,
        "logits": _LOGITS,
        "splits": _SIZE,
        "Dv": _HEAD,
    },
}


def parameters(image: Image) -> tuple[Parameter, ...]:
    """The run-time parameters in the order of the kernel's parameter block, without the two scratch pointers at its end."""
    return tuple(parameter for _, parameter in _flattened(image))


def _flattened(image: Image) -> Iterator[tuple[tuple[int, ...], Parameter]]:
    """Each parameter with its path in the kernel's arguments."""
    for index, (name, declared) in enumerate(ARGUMENTS[image.kernel].items()):
        if isinstance(declared[0], str):
            yield (index,), _parameter(image, name, declared)
            continue
        for inner, field in enumerate(declared._fields):
            yield (index, inner), _parameter(image, f"{name}.{field}", declared[inner])


def _parameter(image: Image, name: str, declared: tuple[str, int]) -> Parameter:
    kind, divisor = declared
    pointed = f"*{TRITON_TYPES[image.dtype]}" if kind == "*" else kind
    return Parameter(name=name, type=pointed, divisor=divisor if image.hinted else 1)


def triton_signature(image: Image, capability: int) -> tuple[dict[str, Any], dict[tuple[int, ...], list[list[Any]]]]:
    """`signature` and `attrs` of Triton's ASTSource."""
    signature: dict[str, Any] = {}
    for name, declared in ARGUMENTS[image.kernel].items():
        if isinstance(declared[0], str):
            signature[name] = _parameter(image, name, declared).type
        else:
            signature[name] = type(declared)(*(_parameter(image, name, field).type for field in declared))
    signature |= dict.fromkeys(image.constants(capability), "constexpr")
    hints = {path: [["tt.divisibility", p.divisor]] for path, p in _flattened(image) if p.divisor > 1}
    return signature, hints
