"""Random specs with inputs that fit them: every field of the spec, awkward sizes, missing optionals."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import numpy as np

from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormKind, NormSpec, QKNormRotarySpec, QKNormSpec, RotarySpec
from tests.contract.spec_cases import epsilon_modes

Tensor = Any


@dataclasses.dataclass(frozen=True)
class Case:
    """A spec and inputs in float64 (masks bool, positions int64)."""

    spec: QKNormSpec
    inputs: dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class RotaryCase:
    """As Case, for QKNormRotary."""

    spec: QKNormRotarySpec
    inputs: dict[str, Tensor]


def _pick(rng: np.random.Generator, *values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def _chance(rng: np.random.Generator, probability: float = 0.5) -> bool:
    return bool(rng.random() < probability)


def _divisor(rng: np.random.Generator, size: int) -> int:
    return int(_pick(rng, *[d for d in range(1, min(size, 8) + 1) if size % d == 0]))


def random_norm(rng: np.random.Generator) -> NormSpec:
    mode = _pick(rng, "inside_sqrt", "inside_sqrt", "clamp", "outside_sqrt")
    kinds = [kind for kind in get_args(NormKind) if mode in epsilon_modes(kind)]
    return NormSpec(
        q_kind=_pick(rng, *kinds),
        k_kind=_pick(rng, *kinds),
        axis=_pick(rng, "head", "head", "hidden"),
        q_epsilon=_pick(rng, 0.0, 1e-6, 1e-5, 0.01),
        k_epsilon=_pick(rng, 0.0, 1e-6, 1e-5, 0.01),
        epsilon_mode=mode,
        weight_order=_pick(rng, "before_cast", "after_cast"),
    )


def random_rotary(rng: np.random.Generator, head_size: int, *, before_norm: bool) -> RotarySpec:
    if head_size < 2 or _chance(rng, 0.25):
        return RotarySpec()
    sections = _pick(rng, 1, 1, 2)
    size = int(rng.integers(1, head_size // (2 * sections) + 1)) * 2 * sections if head_size >= 2 * sections else 0
    if size == 0:
        sections, size = 1, 2
    whole = size == head_size and _chance(rng)
    return RotarySpec(
        order=_pick(rng, "after_norm", "before_norm") if before_norm else "after_norm",
        interleaved=_chance(rng),
        embedding_dim=0 if whole else size,
        offset=0 if whole else int(rng.integers(0, head_size - size + 1)),
        sections=sections,
    )


def _gain(rng: np.random.Generator, heads: int, head_size: int) -> Tensor:
    shape = _pick(rng, (head_size,), (heads, head_size), (heads * head_size,))
    return rng.normal(1.0, 0.5, shape)


def _tables(
    rng: np.random.Generator, rotary: RotarySpec, batch: int, heads: int, length: int, head_size: int
) -> dict[str, Tensor]:
    if rotary.order == "none":
        return {}
    size = rotary.rotated_size(head_size)
    width = _pick(rng, size, size // 2)
    shape = _pick(
        rng, (length, width), (batch, length, width), (1, length, width), (batch, heads, length, width), (1, 1, length, width)
    )
    angle = rng.uniform(-3.0, 3.0, shape)
    return {"cos": np.cos(angle) * 1.1, "sin": np.sin(angle) * 1.1}


def _broadcastable(rng: np.random.Generator, target: tuple[int, ...]) -> tuple[int, ...]:
    shape = tuple(dim if _chance(rng, 0.7) else 1 for dim in target)
    return shape[int(rng.integers(0, len(shape) + 1)) :]


def random_case(rng: np.random.Generator, *, largest: int = 40) -> Case:
    """One attention: sizes up to `largest`, sometimes empty ones."""
    kv_heads, group = _pick(rng, 1, 2, 3), _pick(rng, 1, 1, 2, 3, 5)
    heads = kv_heads * group
    head_size = int(_pick(rng, 1, 2, 3, 4, 8, 12, 16, 20, 33, 36, 64))
    value_size = head_size if _chance(rng, 0.7) else int(_pick(rng, 1, 5, 16, 17, 40))
    batch = int(_pick(rng, 1, 1, 2, 3, 0) if _chance(rng, 0.1) else _pick(rng, 1, 2))
    length = int(_pick(rng, 0, 1, 1, 2, 3, 7, int(rng.integers(1, largest + 1))))
    norm = random_norm(rng)
    has_norm = (norm.q_kind, norm.k_kind) != ("none", "none")
    rotary = random_rotary(rng, head_size, before_norm=has_norm and norm.axis == "head")
    groups = _divisor(rng, head_size)
    norm = dataclasses.replace(norm, groups=groups if _chance(rng, 0.3) else 1)
    attention = AttentionSpec(
        q_num_heads=heads,
        kv_num_heads=kv_heads,
        scale=float(_pick(rng, head_size**-0.5, 1.0, 1.0 / head_size, -0.3)),
        softcap=float(_pick(rng, 0.0, 0.0, 0.0, 2.0, 30.0)),
        logit_clamp=float(_pick(rng, 0.0, 0.0, 0.0, 1.5)),
        is_causal=_chance(rng),
        left_window_size=int(_pick(rng, -1, -1, 0, 3, int(rng.integers(0, largest)))),
        right_window_size=int(_pick(rng, -1, -1, -1, 0, 2)),
        softmax_precision=_pick(rng, "float32", "float32", "float64", "float16"),
    )
    spec = QKNormSpec(attention=attention, norm=norm, rotary=rotary)
    new = length if rotary.order != "none" or _chance(rng, 0.6) else int(rng.integers(0, largest + 1))
    inputs: dict[str, Tensor] = {
        "query": rng.normal(0.0, 1.5, (batch, length, heads * head_size)),
        "key": rng.normal(0.2, 1.5, (batch, new, kv_heads * head_size)),
        "value": rng.normal(0.0, 1.0, (batch, new, kv_heads * value_size)),
    }
    for side, kind, count in (("q", norm.q_kind, heads), ("k", norm.k_kind, kv_heads)):
        if kind != "none":
            if _chance(rng, 0.8):
                inputs[f"{side}_norm_weight"] = _gain(rng, count, head_size)
            if _chance(rng, 0.3):
                inputs[f"{side}_norm_bias"] = _gain(rng, count, head_size) - 1.0
    inputs |= _tables(rng, rotary, batch, heads if group == 1 else 1, length, head_size)
    if _chance(rng, 0.3):
        inputs["q_scale"] = rng.normal(1.0, 0.3, _broadcastable(rng, (batch, heads, length, head_size)))
    total = _add_cache(
        rng, inputs, batch=batch, kv_heads=kv_heads, new=new, head_size=head_size, value_size=value_size, largest=largest
    )
    _add_bias(rng, inputs, (batch, heads, length, total))
    if _chance(rng, 0.2):
        inputs["head_sink"] = rng.normal(0.0, 2.0, heads)
    return Case(spec, inputs)


def _add_cache(
    rng: np.random.Generator,
    inputs: dict[str, Tensor],
    *,
    batch: int,
    kv_heads: int,
    new: int,
    head_size: int,
    value_size: int,
    largest: int,
) -> int:
    kind = _pick(rng, "none", "none", "past", "fixed", "offset")
    if kind == "offset":
        inputs["query_offset"] = rng.integers(-3, largest, batch)
    if kind in ("none", "offset"):
        return new
    past = int(_pick(rng, 0, 1, int(rng.integers(0, 4 * largest))))
    room = int(_pick(rng, 0, int(rng.integers(0, new + 1)), new, new + int(rng.integers(0, 5))))
    rows = past + room if kind == "fixed" else past
    inputs["past_key"] = rng.normal(0.0, 1.0, (batch, kv_heads, rows, head_size))
    inputs["past_value"] = rng.normal(0.0, 1.0, (batch, kv_heads, rows, value_size))
    if kind == "past":
        return past + new
    inputs["cache_length"] = rng.integers(0, rows + 1, batch)
    return max(rows, int(inputs["cache_length"].max(initial=-new)) + new)


def _add_bias(rng: np.random.Generator, inputs: dict[str, Tensor], target: tuple[int, ...]) -> None:
    kind = _pick(rng, "none", "none", "bool", "float", "inf")
    if kind == "none":
        return
    shape = _broadcastable(rng, target)
    if "cache_length" in inputs and shape and shape[-1] > 1 and _chance(rng):
        shape = (*shape[:-1], int(rng.integers(1, shape[-1] + 1)))
    if kind == "bool":
        inputs["attention_bias"] = rng.random(shape) < 0.8
        return
    bias = rng.normal(0.0, 2.0, shape)
    inputs["attention_bias"] = np.where(rng.random(shape) < 0.2, -np.inf, bias) if kind == "inf" else bias


def random_rotary_case(rng: np.random.Generator, *, largest: int = 20) -> RotaryCase:
    """One QKNormRotary."""
    heads = int(_pick(rng, 1, 2, 3, 6))
    head_size = int(_pick(rng, 1, 2, 3, 8, 16, 20, 33, 64))
    batch, length = int(_pick(rng, 1, 2, 0)), int(rng.integers(0, largest))
    norm = random_norm(rng)
    rotary = random_rotary(rng, head_size, before_norm=norm.q_kind != "none")
    width = heads * head_size if norm.axis == "hidden" else head_size
    spec = QKNormRotarySpec(
        num_heads=heads,
        kind=norm.q_kind,
        epsilon=norm.q_epsilon,
        axis=norm.axis,
        groups=_divisor(rng, width) if _chance(rng, 0.3) else 1,
        epsilon_mode=norm.epsilon_mode,
        weight_order=norm.weight_order,
        rotary=rotary,
    )
    inputs: dict[str, Tensor] = {"x": rng.normal(0.2, 1.5, (batch, length, heads * head_size))}
    if spec.kind != "none":
        if _chance(rng, 0.8):
            inputs["weight"] = _gain(rng, heads, head_size)
        if _chance(rng, 0.3):
            inputs["bias"] = _gain(rng, heads, head_size) - 1.0
    inputs |= _tables(rng, rotary, batch, heads, length, head_size)
    if _chance(rng, 0.3):
        inputs["scale"] = rng.normal(1.0, 0.3, _broadcastable(rng, (batch, heads, length, head_size)))
    return RotaryCase(spec, inputs)


def rounded(
    inputs: dict[str, Tensor], dtype: np.dtype[Any], rng: np.random.Generator, *, mixed: bool = True
) -> dict[str, Tensor]:
    """The inputs in `dtype`; with `mixed`, parameters and tables stay in float32 half of the time."""
    same = {"query", "key", "value", "past_key", "past_value", "x"}
    out = {}
    for name, value in inputs.items():
        if value.dtype != np.float64:
            out[name] = value
        else:
            wide = mixed and name not in same and _chance(rng)
            out[name] = value.astype(np.float32 if wide else dtype)
    return out
