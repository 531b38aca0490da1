"""The float64 reference against PyTorch's own modules and functionals in float64: none of them shares code with it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormRotarySpec, QKNormSpec, RotarySpec
from qknorm_onnx.spec.reference import qk_norm_attention, qk_norm_rotary
from qknorm_onnx.spec.variants import VARIANTS, Variant, example_inputs

torch = pytest.importorskip("torch")
functional = torch.nn.functional

EXACT = 1e-12


def difference(ours: Any, theirs: Any) -> float:
    """Largest difference relative to the largest value; NaN where either side has one."""
    ours, theirs = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    assert ours.shape == theirs.shape
    return float(np.max(np.abs(ours - theirs), initial=0.0) / max(np.max(np.abs(theirs), initial=0.0), 1e-300))


def tensor(array: Any) -> Any:
    array = np.asarray(array)
    return torch.from_numpy(array if array.dtype == np.bool_ else array.astype(np.float64))


def random(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def norm_only(**fields: Any) -> QKNormRotarySpec:
    return QKNormRotarySpec(num_heads=3, **fields)


# --- norms ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.0, 1e-6, 0.25])
@pytest.mark.parametrize("head_size", [1, 5, 8, 31])
def test_rms_is_torch_rms_norm(epsilon: float, head_size: int) -> None:
    x, weight = random(2, 4, 3 * head_size), random(head_size, seed=1)
    ours = qk_norm_rotary(norm_only(kind="rms", epsilon=epsilon), {"x": x, "weight": weight})["Y"]
    heads = tensor(x).view(2, 4, 3, head_size)
    theirs = functional.rms_norm(heads, (head_size,), tensor(weight), eps=float(np.float32(epsilon)))
    assert difference(ours, theirs.reshape(2, 4, -1)) < EXACT


@pytest.mark.parametrize("per_head", [False, True])
def test_layer_is_torch_layer_norm(per_head: bool) -> None:
    x, epsilon = random(2, 4, 3 * 7) + 5.0, 0.125
    weight, bias = (random(*((3, 7) if per_head else (7,)), seed=seed) for seed in (1, 2))
    ours = qk_norm_rotary(norm_only(kind="layer", epsilon=epsilon), {"x": x, "weight": weight, "bias": bias})["Y"]
    theirs = functional.layer_norm(tensor(x).view(2, 4, 3, 7), (7,), eps=epsilon) * tensor(weight) + tensor(bias)
    assert difference(ours, theirs.reshape(2, 4, -1)) < EXACT


def test_layer_norm_of_values_with_a_large_mean() -> None:
    x = random(1, 3, 3 * 16) * 1e-3 + 1e6
    ours = qk_norm_rotary(norm_only(kind="layer", epsilon=0.0), {"x": x})["Y"]
    exact = x.astype(np.longdouble).reshape(1, 3, 3, 16)
    exact = exact - exact.mean(-1, keepdims=True)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True))
    assert difference(ours, exact.reshape(1, 3, -1)) < 1e-6  # x itself carries 1e6 * 2^-53 / 1e-3 = 1e-7 of noise


@pytest.mark.parametrize("epsilon", [0.0, 1e-12, 4.0])
def test_clamped_l2_is_torch_normalize(epsilon: float) -> None:
    x = random(2, 4, 3 * 8)
    ours = qk_norm_rotary(norm_only(kind="l2", epsilon=epsilon, epsilon_mode="clamp"), {"x": x})["Y"]
    theirs = functional.normalize(tensor(x).view(2, 4, 3, 8), dim=-1, eps=float(np.float32(epsilon)))
    assert difference(ours, theirs.reshape(2, 4, -1)) < EXACT


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_layer_with_groups_is_torch_group_norm(groups: int) -> None:
    x, weight, bias = random(2, 4, 3 * 8), random(24, seed=1), random(24, seed=2)
    spec = norm_only(kind="layer", epsilon=0.125, groups=groups)
    ours = qk_norm_rotary(spec, {"x": x, "weight": weight, "bias": bias})["Y"]
    module = torch.nn.GroupNorm(3 * groups, 24, eps=0.125, dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(tensor(weight))
        module.bias.copy_(tensor(bias))
        theirs = module(tensor(x).reshape(8, 24)).reshape(2, 4, 24)
    assert difference(ours, theirs) < EXACT


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_hidden_axis_normalises_all_heads_together(kind: Any) -> None:
    x, weight = random(2, 4, 3 * 8), random(24, seed=1)
    ours = qk_norm_rotary(norm_only(kind=kind, axis="hidden", epsilon=0.125), {"x": x, "weight": weight})["Y"]
    norm = functional.rms_norm if kind == "rms" else functional.layer_norm
    assert difference(ours, norm(tensor(x), (24,), tensor(weight), eps=0.125)) < EXACT


def test_hidden_groups_cross_head_borders() -> None:
    x = random(2, 4, 3 * 8)
    ours = qk_norm_rotary(norm_only(kind="layer", axis="hidden", groups=2, epsilon=0.125), {"x": x})["Y"]
    theirs = functional.group_norm(tensor(x).reshape(8, 24), 2, eps=0.125).reshape(2, 4, 24)
    assert difference(ours, theirs) < EXACT


# --- rotary, as a product of complex numbers -----------------------------------------------------------------------------


def complex_rotary(x: Any, angles: Any, *, interleaved: bool) -> Any:
    """x (..., r) with pairs turned by angles (..., r/2)."""
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    out = torch.empty_like(x)
    if interleaved:
        out[..., 0::2], out[..., 1::2] = turned.real, turned.imag
    else:
        out[..., :half], out[..., half:] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("size", "offset", "sections"), [(12, 0, 1), (4, 0, 1), (8, 4, 1), (8, 2, 2), (12, 0, 3), (2, 10, 1)])
def test_rotary_is_complex_multiplication(interleaved: bool, size: int, offset: int, sections: int) -> None:
    x, angles = random(2, 5, 3 * 12), 9 * random(2, 5, size // 2, seed=1)
    rotary = RotarySpec(order="after_norm", interleaved=interleaved, embedding_dim=size, offset=offset, sections=sections)
    ours = qk_norm_rotary(norm_only(rotary=rotary), {"x": x, "cos": np.cos(angles), "sin": np.sin(angles)})["Y"]
    theirs = tensor(x).view(2, 5, 3, 12).clone()
    width = size // sections
    for block in range(sections):
        here = slice(offset + block * width, offset + (block + 1) * width)
        turn = tensor(angles)[:, :, None, block * width // 2 : (block + 1) * width // 2].expand(-1, -1, 3, -1)
        theirs[..., here] = complex_rotary(theirs[..., here], turn, interleaved=interleaved)
    assert difference(ours, theirs.reshape(2, 5, -1)) < EXACT


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("sections", [1, 2])
def test_a_wide_table_gives_each_value_a_factor_of_its_own(interleaved: bool, sections: int) -> None:
    x, cos, sin = random(1, 3, 3 * 8), random(3, 8, seed=1), random(3, 8, seed=2)
    spec = norm_only(rotary=RotarySpec(order="after_norm", interleaved=interleaved, sections=sections))
    ours = qk_norm_rotary(spec, {"x": x, "cos": cos, "sin": sin})["Y"].reshape(3, 3, 8)
    width = 8 // sections
    for i in range(8):
        start, inside = i - i % width, i % width
        if interleaved:
            partner, sign = (i + 1, -1) if inside % 2 == 0 else (i - 1, 1)
        else:
            partner, sign = (i + width // 2, -1) if inside < width // 2 else (i - width // 2, 1)
        assert start <= partner < start + width
        rows = x.reshape(3, 3, 8)
        expected = rows[..., i] * cos[:, None, i] + sign * rows[..., partner] * sin[:, None, i]
        assert difference(ours[..., i], expected) < EXACT


def test_a_table_of_pairs_equals_the_wide_table_of_repeated_factors() -> None:
    x, angles = random(2, 3, 3 * 8), random(2, 3, 4, seed=1)
    for interleaved, repeat in ((False, lambda t: np.concatenate([t, t], -1)), (True, lambda t: np.repeat(t, 2, -1))):
        spec = norm_only(rotary=RotarySpec(order="after_norm", interleaved=interleaved))
        narrow = qk_norm_rotary(spec, {"x": x, "cos": np.cos(angles), "sin": np.sin(angles)})["Y"]
        wide = qk_norm_rotary(spec, {"x": x, "cos": repeat(np.cos(angles)), "sin": repeat(np.sin(angles))})["Y"]
        assert difference(narrow, wide) < EXACT


def test_tables_of_every_rank_mean_the_same() -> None:
    x, angles = random(2, 3, 3 * 8), random(3, 4, seed=1)
    spec = norm_only(rotary=RotarySpec(order="after_norm"))
    results = []
    for shape in ((3, 4), (1, 3, 4), (2, 3, 4), (1, 1, 3, 4), (2, 3, 3, 4)):
        cos, sin = (np.broadcast_to(table, shape) for table in (np.cos(angles), np.sin(angles)))
        results.append(qk_norm_rotary(spec, {"x": x, "cos": cos, "sin": sin})["Y"])
    assert all(difference(result, results[0]) == 0 for result in results)


def test_tables_per_head_are_read_by_head() -> None:
    x, angles = random(2, 3, 3 * 8), random(2, 3, 3, 4, seed=1)
    spec = norm_only(rotary=RotarySpec(order="after_norm"))
    ours = qk_norm_rotary(spec, {"x": x, "cos": np.cos(angles), "sin": np.sin(angles)})["Y"]
    theirs = complex_rotary(tensor(x).view(2, 3, 3, 8).transpose(1, 2), tensor(angles), interleaved=False).transpose(1, 2)
    assert difference(ours, theirs.reshape(2, 3, -1)) < EXACT


def test_norm_and_rotary_do_not_commute_with_random_gains() -> None:
    x, weight, angles = random(1, 4, 3 * 8), random(8, seed=3), 3 * random(4, 4, seed=1)
    inputs = {"x": x, "weight": weight, "cos": np.cos(angles), "sin": np.sin(angles)}
    after, before = (
        qk_norm_rotary(norm_only(kind="rms", epsilon=1e-6, rotary=RotarySpec(order=order)), inputs)["Y"]
        for order in ("after_norm", "before_norm")
    )
    assert difference(after, before) > 0.1
    inputs["weight"] = np.ones(8)
    after, before = (
        qk_norm_rotary(norm_only(kind="rms", epsilon=1e-6, rotary=RotarySpec(order=order)), inputs)["Y"]
        for order in ("after_norm", "before_norm")
    )
    assert difference(after, before) < EXACT


# --- attention -----------------------------------------------------------------------------------------------------------


def split(x: Any, heads: int) -> Any:
    return tensor(x).unflatten(-1, (heads, -1)).transpose(1, 2)


def sdpa(spec: AttentionSpec, inputs: dict[str, Any], **options: Any) -> Any:
    out = functional.scaled_dot_product_attention(
        split(inputs["query"], spec.q_num_heads),
        split(inputs["key"], spec.kv_num_heads),
        split(inputs["value"], spec.kv_num_heads),
        scale=spec.scale,
        enable_gqa=True,
        **options,
    )
    return out.transpose(1, 2).flatten(2)


def qkv(q_heads: int, kv_heads: int, *, batch: int = 2, queries: int = 5, keys: int = 5, size: int = 8, values: int = 8) -> Any:
    return {
        "query": random(batch, queries, q_heads * size),
        "key": random(batch, keys, kv_heads * size, seed=1),
        "value": random(batch, keys, kv_heads * values, seed=2),
    }


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (6, 2), (5, 1), (48, 2)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("values", [8, 3])
def test_core_is_scaled_dot_product_attention(q_heads: int, kv_heads: int, causal: bool, values: int) -> None:
    spec = AttentionSpec(q_num_heads=q_heads, kv_num_heads=kv_heads, scale=0.25, is_causal=causal)
    inputs = qkv(q_heads, kv_heads, values=values)
    assert difference(qk_norm_attention(QKNormSpec(attention=spec), inputs)["Y"], sdpa(spec, inputs, is_causal=causal)) < EXACT


@pytest.mark.parametrize(("queries", "keys"), [(3, 7), (7, 3), (1, 5), (5, 1)])
def test_causal_without_cache_is_upper_left_aligned(queries: int, keys: int) -> None:
    spec = AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=0.25, is_causal=True)
    inputs = qkv(4, 2, queries=queries, keys=keys)
    assert difference(qk_norm_attention(QKNormSpec(attention=spec), inputs)["Y"], sdpa(spec, inputs, is_causal=True)) < EXACT


@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (2, 1, 5, 7), (1, 4, 1, 7), (5, 7), (7,), (1,)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_bias_broadcasts_as_in_torch(shape: tuple[int, ...], kind: str) -> None:
    spec = AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=0.25)
    inputs = qkv(4, 2, keys=7)
    bias = random(*shape, seed=5) > -1 if kind == "bool" else random(*shape, seed=5)
    ours = qk_norm_attention(QKNormSpec(attention=spec), inputs | {"attention_bias": bias})["Y"]
    theirs = sdpa(spec, inputs, attn_mask=tensor(np.broadcast_to(bias, (2, 4, 5, 7)).copy()))
    assert difference(ours, theirs) < EXACT


def test_a_query_that_sees_nothing_is_zero_as_in_torch() -> None:
    spec = AttentionSpec(q_num_heads=4, kv_num_heads=4, scale=0.25)
    inputs, mask = qkv(4, 4, queries=8, keys=8), np.ones((2, 4, 8, 8), dtype=np.bool_)
    mask[0, 0, 0] = False
    ours = qk_norm_attention(QKNormSpec(attention=spec), inputs | {"attention_bias": mask})["Y"]
    assert difference(ours, sdpa(spec, inputs, attn_mask=tensor(mask))) < EXACT
    assert np.array_equal(ours[0, 0, :8], np.zeros(8))
    as_float = qk_norm_attention(QKNormSpec(attention=spec), inputs | {"attention_bias": np.where(mask, 0.0, -np.inf)})["Y"]
    assert np.array_equal(as_float, ours)


# --- every variant against a second implementation -------------------------------------------------------------------------


def torch_norm(spec: QKNormRotarySpec, x: Any) -> Any:
    """x (B, H, S, D) normalised with PyTorch's functions where they have the kind."""
    if spec.kind == "none":
        return x
    batch, heads, length, size = x.shape
    rows = x.transpose(1, 2).reshape(batch, length, 1 if spec.axis == "hidden" else heads, -1)
    rows = rows.unflatten(-1, (spec.groups, -1))
    count = rows.shape[-1]
    match spec.kind:
        case "l2":
            root_of_count = 1.0
        case "rms" | "layer":
            root_of_count = math.sqrt(count)
        case _:
            pytest.fail(f"write the norm {spec.kind!r} with PyTorch's functions here, in torch_norm")
    if spec.kind == "layer":
        rows = rows - rows.mean(-1, keepdim=True)
    if spec.kind == "l2" and spec.epsilon_mode == "clamp":
        rows = functional.normalize(rows, dim=-1, eps=spec.epsilon)
    elif spec.epsilon_mode == "inside_sqrt":
        rows = functional.rms_norm(rows, (count,), eps=spec.epsilon)
    else:
        root = torch.linalg.vector_norm(rows, dim=-1, keepdim=True) / root_of_count
        rows = rows / (root.clamp_min(spec.epsilon) if spec.epsilon_mode == "clamp" else root + spec.epsilon)
    return rows.reshape(batch, length, heads, size).transpose(1, 2)


def torch_rotary(rotary: RotarySpec, x: Any, cos: Any, sin: Any) -> Any:
    """x (B, H, S, D) rotated with a matrix: y = (diag(cos) + diag(sin) J) x, J the quarter turn of each pair."""
    size = rotary.rotated_size(x.shape[-1])
    width = size // rotary.sections
    quarter = torch.zeros(size, size, dtype=torch.float64)
    pair_of = torch.zeros(size, dtype=torch.long)
    for pair in range(size // 2):
        block, inside = divmod(pair, width // 2)
        start = block * width
        one, two = (
            (start + 2 * inside, start + 2 * inside + 1) if rotary.interleaved else (start + inside, start + inside + width // 2)
        )
        quarter[one, two], quarter[two, one] = -1, 1
        pair_of[one] = pair_of[two] = pair
    tables = [tensor(t) if t.shape[-1] == size else tensor(t)[..., pair_of] for t in (cos, sin)]
    tables = [t[:, None] if t.ndim == 3 else t for t in tables]
    part = x[..., rotary.offset : rotary.offset + size]
    turned = part * tables[0] + (part @ quarter.T) * tables[1]
    return torch.cat([x[..., : rotary.offset], turned, x[..., rotary.offset + size :]], -1)


def torch_prepare(spec: QKNormRotarySpec, inputs: dict[str, Any], name: str) -> Any:
    side = name[0]
    x = split(inputs[name], spec.num_heads)
    if spec.rotary.order == "before_norm":
        x = torch_rotary(spec.rotary, x, inputs["cos"], inputs["sin"])
    x = torch_norm(spec, x)
    for part, combine in (("weight", torch.mul), ("bias", torch.add)):
        given = inputs.get(f"{side}_norm_{part}")
        if given is not None:
            shared = given.shape == x.shape[-1:]
            x = combine(x, tensor(given) if shared else tensor(given).reshape(spec.num_heads, 1, -1))
    return torch_rotary(spec.rotary, x, inputs["cos"], inputs["sin"]) if spec.rotary.order == "after_norm" else x


def torch_attention(spec: QKNormSpec, inputs: dict[str, Any]) -> Any:
    """The whole node without a cache, with masks as -inf logits and the sink as one more column."""
    attention = spec.attention
    query = torch_prepare(spec.query_preparation, inputs, "query")
    if "q_scale" in inputs:
        query = query * tensor(inputs["q_scale"])
    key = torch_prepare(spec.key_preparation, inputs, "key").repeat_interleave(attention.group_size, 1)
    value = split(inputs["value"], attention.kv_num_heads).repeat_interleave(attention.group_size, 1)
    logits = torch.einsum("bhsd,bhtd->bhst", query, key) * attention.scale
    if attention.logit_clamp:
        logits = logits.clamp(-attention.logit_clamp, attention.logit_clamp)
    if attention.softcap:
        logits = attention.softcap * torch.tanh(logits / attention.softcap)
    bias = inputs.get("attention_bias")
    if bias is not None:
        logits = logits.masked_fill(~tensor(bias), -math.inf) if bias.dtype == np.bool_ else logits + tensor(bias)
    distance = torch.arange(logits.shape[2])[:, None] - torch.arange(logits.shape[3])
    if attention.is_causal:
        logits = logits.masked_fill(distance < 0, -math.inf)
    if attention.left_window_size >= 0:
        logits = logits.masked_fill(distance > attention.left_window_size, -math.inf)
    if attention.right_window_size >= 0:
        logits = logits.masked_fill(distance < -attention.right_window_size, -math.inf)
    if "head_sink" in inputs:
        column = tensor(inputs["head_sink"])[None, :, None, None].expand(*logits.shape[:3], 1)
        weights = torch.cat([logits, column], -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1).nan_to_num(0.0)
    return (weights @ value).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize(("batch", "length", "value_size"), [(1, 1, None), (2, 5, None), (3, 7, 3)])
def test_variant_equals_a_second_implementation(variant: Variant, batch: int, length: int, value_size: int | None) -> None:
    inputs = example_inputs(variant, batch=batch, length=length, value_size=value_size, dtype=np.float64)
    ours = qk_norm_attention(variant.spec, inputs)
    assert difference(ours["Y"], torch_attention(variant.spec, inputs)) < EXACT
    assert difference(ours["present_key"], torch_prepare(variant.spec.key_preparation, inputs, "key")) < EXACT


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_small_values_show_where_epsilon_is(variant: Variant) -> None:
    spec = dataclasses.replace(variant.spec, norm=_with_large_epsilon(variant.spec.norm))
    inputs = example_inputs(variant, batch=2, length=4, magnitude=0.3, dtype=np.float64)
    assert difference(qk_norm_attention(spec, inputs)["Y"], torch_attention(spec, inputs)) < EXACT


def _with_large_epsilon(norm: NormSpec) -> NormSpec:
    q_epsilon = 0.5 if norm.q_kind != "none" else 0.0
    return dataclasses.replace(norm, q_epsilon=q_epsilon, k_epsilon=0.75)
