"""What a named variant is, and random inputs for it.

Shapes of optional inputs are written in the letters of `signature.py`: "(D)", "(Hq, 1, 1)", "(B, S, R/2)", and K, the keys
of the longest row (T where buffers have no room to spare). Weights are
always random: with a gain of ones, norm before rotary and norm after rotary are the same function.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, QKNormSpec, SpecError, rotates

Claim = Literal["official", "article", "composed"]
Values = Literal["gain", "bias", "scale", "cos", "sin", "logits", "bool mask", "float mask"]
Array = npt.NDArray[Any]

MAX_POSITION: Final = 512
TRANSFORMERS_VERSION: Final = "transformers 5.24.0"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptionalInput:
    """An optional input that a variant takes: its name in `signature.ATTENTION_INPUTS`, its shape, and what it holds.

    `center` is the typical size of its random values where that matters (a temperature near sqrt(D), a gain near 1).
    """

    name: str
    shape: str
    values: Values
    center: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One published (or claimed) form of attention. Head counts and sizes are small; everything else is the model's.

    `claim` is "official" for what the paper or the official code at `source`, `version` does, "article" for what explainers
    of QK-Norm describe, and "composed" for a mixture of fields that no published model is known to have. Names of article
    claims about a model that does otherwise end in `-article`; the official form stands beside them.
    """

    name: str
    spec: QKNormSpec
    head_size: int
    summary: str
    source: str
    version: str = ""
    claim: Claim = "official"
    inputs: tuple[OptionalInput, ...] = ()

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the optional inputs."""
        return tuple(tensor.name for tensor in self.inputs)


def transformers_source(family: str) -> str:
    """Where transformers' code of a model family is."""
    return f"https://github.com/huggingface/transformers/tree/v5.24.0/src/transformers/models/{family}"


def causal_attention(
    q_num_heads: int, kv_num_heads: int, scale: float, *, softcap: float = 0.0, window: int = 0
) -> AttentionSpec:
    """Causal attention; `window` counts the tokens that a query sees, its own included (0: all)."""
    return AttentionSpec(
        q_num_heads=q_num_heads,
        kv_num_heads=kv_num_heads,
        scale=scale,
        softcap=softcap,
        is_causal=True,
        left_window_size=window - 1,
    )


def norm_gains(per: Literal["D", "H, D", "H*D"] = "D", *, center: float = 1.0, biased: bool = False) -> tuple[OptionalInput, ...]:
    """Gains, and with `biased` biases, of both norms: one per value, per head and value, or the same in one row."""
    out: list[OptionalInput] = []
    for side, heads in (("q", "Hq"), ("k", "Hkv")):
        shape = f"({per})".replace("H", heads)
        out.append(OptionalInput(name=f"{side}_norm_weight", shape=shape, values="gain", center=center))
        if biased:
            out.append(OptionalInput(name=f"{side}_norm_bias", shape=shape, values="bias"))
    return tuple(out)


def rotary_tables(shape: str = "(B, S, R/2)") -> tuple[OptionalInput, ...]:
    """cos and sin of the given shape."""
    return tuple(OptionalInput(name=name, shape=shape, values=name) for name in ("cos", "sin"))


def query_scale(shape: str, *, center: float = 1.0) -> OptionalInput:
    """A learned or position-dependent factor of the prepared queries."""
    return OptionalInput(name="q_scale", shape=shape, values="scale", center=center)


def attention_bias(shape: str, values: Literal["logits", "bool mask", "float mask"]) -> OptionalInput:
    """Added logits, a mask of bools, or a float mask with -inf entries."""
    return OptionalInput(name="attention_bias", shape=shape, values=values)


def example_inputs(
    variant: Variant,
    *,
    batch: int = 2,
    length: int = 5,
    key_length: int | None = None,
    past_length: int | None = None,
    capacity: int | None = None,
    value_size: int | None = None,
    magnitude: float = 1.0,
    seed: int = 0,
    dtype: npt.DTypeLike = np.float32,
    parameter_dtype: npt.DTypeLike | None = None,
) -> dict[str, Array]:
    """Random inputs of `QKNormAttention` for `variant`, by input name.

    Args:
        variant: says which optional inputs there are.
        batch: B, may be 0.
        length: S, may be 0.
        key_length: N where it is not S (cross attention; not with a rotary embedding).
        past_length: P cached positions that grow by N, 0 included; None is no cache.
        capacity: gives the past buffers this many entries: row b holds a random number of valid ones up to
            `past_length`, NaN behind them, and `cache_length` says how many. Where new ones have no room, T is larger.
        value_size: Dv, by default D.
        magnitude: factor of query and key; small ones make the epsilon of a norm visible.
        seed: of the random numbers; equal arguments give equal inputs.
        dtype: type T of query, key, value and caches.
        parameter_dtype: type of the other float inputs, by default T.

    Raises:
        SpecError: arguments that the variant does not allow.
    """
    attention = variant.spec.attention
    keys = length if key_length is None else key_length
    if keys != length and rotates(variant.spec.rotary.order):
        raise SpecError(f"{variant.name} rotates q and k with one table: key_length must be {length}, or left out")
    if capacity is not None and (past_length is None or past_length > capacity):
        raise SpecError(f"a cache of capacity {capacity} needs a past_length that fits into it")
    rng = np.random.default_rng([seed, batch, length, keys])
    sizes = _sizes(variant, batch=batch, length=length, keys=keys, values=value_size or variant.head_size)
    out: dict[str, Array] = {
        "query": magnitude * rng.normal(size=(batch, length, attention.q_num_heads * sizes["D"])),
        "key": magnitude * rng.normal(size=(batch, keys, attention.kv_num_heads * sizes["D"])),
        "value": rng.normal(size=(batch, keys, attention.kv_num_heads * sizes["Dv"])),
    }
    if past_length is not None:
        out |= _cache(rng, sizes, attention.kv_num_heads, past_length, capacity)
    sizes["K"] = keys + (past_length or 0 if capacity is None else int(out["cache_length"].max(initial=0)))
    sizes["T"] = max(sizes["K"], capacity or 0)
    main = {name: value if value.dtype == np.int64 else value.astype(dtype) for name, value in out.items()}
    parameters = _parameters(rng, variant, sizes)
    kept = dtype if parameter_dtype is None else parameter_dtype
    return main | {name: value if value.dtype == np.bool_ else value.astype(kept) for name, value in parameters.items()}


def _sizes(variant: Variant, *, batch: int, length: int, keys: int, values: int) -> dict[str, int]:
    attention = variant.spec.attention
    rotated = variant.spec.rotary.rotated_size(variant.head_size) if rotates(variant.spec.rotary.order) else 0
    sizes = {"B": batch, "S": length, "N": keys, "D": variant.head_size, "Dv": values, "R": rotated, "R/2": rotated // 2, "1": 1}
    sizes |= {"Hq": attention.q_num_heads, "Hkv": attention.kv_num_heads}
    sizes |= {"Hq*D": sizes["Hq"] * sizes["D"], "Hkv*D": sizes["Hkv"] * sizes["D"]}
    return sizes


def shape_in_numbers(shape: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The sizes that a shape in letters stands for: `(B, S, R/2)` is (2, 5, 4), `()` is ()."""
    return tuple(sizes[letter.strip()] for letter in shape.strip("()").split(",") if letter.strip())


def _cache(
    rng: np.random.Generator, sizes: Mapping[str, int], heads: int, past_length: int, capacity: int | None
) -> dict[str, Array]:
    entries = past_length if capacity is None else capacity
    past_key = rng.normal(size=(sizes["B"], heads, entries, sizes["D"]))
    past_value = rng.normal(size=(sizes["B"], heads, entries, sizes["Dv"]))
    if capacity is None:
        return {"past_key": past_key, "past_value": past_value}
    valid = rng.integers(0, past_length + 1, size=sizes["B"], dtype=np.int64)
    for row, count in enumerate(valid):
        past_key[row, :, count:] = np.nan
        past_value[row, :, count:] = np.nan
    return {"past_key": past_key, "past_value": past_value, "cache_length": valid}


def _parameters(rng: np.random.Generator, variant: Variant, sizes: Mapping[str, int]) -> dict[str, Array]:
    out: dict[str, Array] = {}
    angles: Array | None = None
    for tensor in variant.inputs:
        shape = shape_in_numbers(tensor.shape, sizes)
        if tensor.values in ("cos", "sin"):
            # Both tables come from the same angles; a table as wide as the rotated part has two unlike halves.
            angles = _angles(rng, shape) if angles is None else angles
            out[tensor.name] = np.cos(angles) if tensor.values == "cos" else np.sin(angles)
        else:
            out[tensor.name] = _random_values(rng, tensor, shape)
    return out


def _angles(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    positions = rng.integers(0, MAX_POSITION, size=(*shape[:-1], 1))
    frequencies = np.exp(rng.uniform(-math.log(1e4), 0, size=shape[-1:]))
    return np.asarray(positions * frequencies)


def _random_values(rng: np.random.Generator, tensor: OptionalInput, shape: tuple[int, ...]) -> Array:
    if tensor.values == "gain":
        return np.asarray(tensor.center * (1 + 0.5 * rng.normal(size=shape)))
    if tensor.values == "scale":
        return np.asarray(tensor.center * rng.uniform(0.5, 1.5, size=shape))
    if tensor.values == "bias":
        return np.asarray(0.3 * rng.normal(size=shape))
    if tensor.values == "logits":
        return np.asarray(tensor.center * rng.normal(size=shape))
    seen = rng.uniform(size=shape) < 0.75
    if seen.size:
        seen.reshape(-1, shape[-1])[0] = False  # a query that sees nothing at all
    return seen if tensor.values == "bool mask" else np.where(seen, 0.0, -np.inf)
