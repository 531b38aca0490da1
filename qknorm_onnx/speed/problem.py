"""One attention of a certain size: its inputs and its true result."""

from __future__ import annotations

import dataclasses
from typing import Any, Final, assert_never

import numpy as np
import numpy.typing as npt

from qknorm_onnx.spec.qk_norm_spec import NormKind, QKNormSpec, rotates, spans_heads
from qknorm_onnx.spec.reference import qk_norm_attention
from qknorm_onnx.spec.signature import Dtype

Tensor = npt.NDArray[Any]
Tensors = dict[str, Tensor]

ROTARY_BASE: Final = 1e6  # Qwen3's
SPARE_ENTRIES: Final = 16  # of a fixed-size cache, behind the new token
# Inputs that are weights of a model: always float32 here, and constants of the graph.
PARAMETERS: Final = ("q_norm_weight", "k_norm_weight", "q_norm_bias", "k_norm_bias", "q_scale")
CACHES: Final = ("past_key", "past_value")
_NUMPY_TYPES: Final[dict[Dtype, Any]] = {"float32": np.float32, "float16": np.float16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """`new` tokens of a model, behind `cached` ones, as one attention sees them. Values and caches are of type `dtype`."""

    spec: QKNormSpec
    head_size: int
    new: int
    cached: int = 0
    batch: int = 1
    dtype: Dtype = "float32"
    temperature: bool = False  # a learned factor of each head, as L2-normalised queries and keys need it

    def inputs(self) -> Tensors:
        """Random inputs by the names of `signature.ATTENTION_INPUTS`, the same on every call; the cache is just full."""
        rng = np.random.default_rng(0)
        kind = _NUMPY_TYPES[self.dtype]
        attention, size = self.spec.attention, self.head_size

        def normal(*shape: int) -> Tensor:
            return rng.standard_normal(shape, dtype=np.float32).astype(kind)

        out = {"query": normal(self.batch, self.new, attention.q_num_heads * size)}
        out |= {name: normal(self.batch, self.new, attention.kv_num_heads * size) for name in ("key", "value")}
        out |= self._parameters(rng)
        if rotates(self.spec.rotary.order):
            cos, sin = rotary_tables(self.cached + self.new, size)
            out |= {"cos": cos[self.cached :], "sin": sin[self.cached :]}
        if self.cached:
            out |= {name: normal(self.batch, attention.kv_num_heads, self.cached, size) for name in CACHES}
        return out

    def _parameters(self, rng: np.random.Generator) -> Tensors:
        attention, norm, size = self.spec.attention, self.spec.norm, self.head_size
        out: Tensors = {}
        for side, kind, heads in (("q", norm.q_kind, attention.q_num_heads), ("k", norm.k_kind, attention.kv_num_heads)):
            values = heads * size if spans_heads(norm.axis) else size
            weighted, biased = _parameters_of(kind)
            if weighted:
                out[f"{side}_norm_weight"] = rng.normal(1, 0.3, values).astype(np.float32)
            if biased:
                out[f"{side}_norm_bias"] = rng.normal(0, 0.3, values).astype(np.float32)
        if self.temperature:
            out["q_scale"] = rng.uniform(5, 15, (attention.q_num_heads, 1, 1)).astype(np.float32)
        return out

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values that one call must read."""
        rows = self.batch * self.spec.attention.kv_num_heads * (self.cached + self.new)
        return 2 * rows * self.head_size * np.dtype(_NUMPY_TYPES[self.dtype]).itemsize

    @property
    def floating_operations(self) -> float:
        """Of the two matrix products; what a causal mask hides is not counted."""
        pairs = self.new * (self.cached + self.new)
        if self.spec.attention.is_causal:
            pairs = self.new * self.cached + self.new * (self.new + 1) // 2
        return 4.0 * self.batch * self.spec.attention.q_num_heads * pairs * self.head_size


def _parameters_of(kind: NormKind) -> tuple[bool, bool]:
    """Whether such a norm usually has a gain, and a bias."""
    match kind:
        case "none" | "l2":
            return False, False
        case "rms":
            return True, False
        case "layer":
            return True, True
        case _:
            assert_never(kind)


def rotary_tables(length: int, head_size: int) -> tuple[Tensor, Tensor]:
    """cos and sin (length, D / 2) of the first positions, in float32."""
    angles = np.outer(np.arange(length), ROTARY_BASE ** (-np.arange(0, head_size, 2) / head_size))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def with_room(inputs: Tensors, cached: int, new: int) -> Tensors:
    """The same inputs with a cache of a fixed size: room for the new tokens behind the cached ones, and some more."""
    out = dict(inputs)
    for name in CACHES:
        past = inputs[name]
        out[name] = np.zeros((*past.shape[:2], cached + new + SPARE_ENTRIES, past.shape[3]), dtype=past.dtype)
        out[name][:, :, :cached] = past
    out["cache_length"] = np.full(past.shape[0], cached, dtype=np.int64)
    return out


def true_output(problem: Problem, inputs: Tensors) -> Tensor:
    """Y in float64, one key head after the other where the norm allows it, so that the logits fit into memory."""
    spec, size = problem.spec, problem.head_size
    attention = spec.attention
    if spans_heads(spec.norm.axis):
        return qk_norm_attention(spec, inputs)["Y"]
    group = attention.group_size
    alone = dataclasses.replace(spec, attention=dataclasses.replace(attention, q_num_heads=group, kv_num_heads=1))
    parts = []
    for head in range(attention.kv_num_heads):
        queries, keys = slice(head * group, (head + 1) * group), slice(head, head + 1)
        part = dict(inputs)
        part["query"] = inputs["query"][..., head * group * size : (head + 1) * group * size]
        part |= {name: inputs[name][..., head * size : (head + 1) * size] for name in ("key", "value")}
        part |= {name: inputs[name][:, keys] for name in CACHES if name in inputs}
        part |= {name: inputs[name][queries] for name in ("q_scale",) if name in inputs}
        parts.append(qk_norm_attention(alone, part)["Y"])
    return np.concatenate(parts, axis=2)
