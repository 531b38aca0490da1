"""What the operator promises, with numbers worked out by hand and cases from public bug reports."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormRotarySpec, QKNormSpec, RotarySpec, SpecError
from qknorm_onnx.spec.reference import qk_norm_attention, qk_norm_rotary
from qknorm_onnx.spec.variants import VARIANTS, Variant, example_inputs

EVERY_NORM = [
    (kind, mode, groups, axis)
    for kind in ("rms", "layer", "l2")
    for mode in ("inside_sqrt", "clamp", "outside_sqrt")
    for groups in (1, 2)
    for axis in ("head", "hidden")
    if not (kind == "l2" and mode == "inside_sqrt")
]


def plain(q_heads: int = 1, kv_heads: int = 1, *, scale: float = 1.0, **fields: Any) -> QKNormSpec:
    return QKNormSpec(attention=AttentionSpec(q_num_heads=q_heads, kv_num_heads=kv_heads, scale=scale, **fields))


def column(*values: float) -> Any:
    """(1, N, 1): one head of size one."""
    return np.array(values, dtype=np.float64).reshape(1, -1, 1)


def attention(spec: QKNormSpec, **inputs: Any) -> Any:
    return qk_norm_attention(spec, inputs)["Y"]


# --- norms -----------------------------------------------------------------------------------------------------------------


def test_rms_over_a_head_and_over_the_projection() -> None:
    q = np.array([[[3.0, 4.0, 0.3, 0.4]]])
    head = qk_norm_rotary(QKNormRotarySpec(num_heads=2, kind="rms"), {"x": q})["Y"][0, 0]
    hidden = qk_norm_rotary(QKNormRotarySpec(num_heads=2, kind="rms", axis="hidden"), {"x": q})["Y"][0, 0]
    assert np.allclose(head, [0.848528, 1.131371, 0.848528, 1.131371], atol=1e-6)
    assert np.allclose(hidden, [1.194045, 1.592061, 0.119405, 0.159206], atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "mode", "denominator"),
    [
        ("rms", "inside_sqrt", math.sqrt(12.5 + 0.5)),
        ("rms", "clamp", math.sqrt(12.5)),
        ("rms", "outside_sqrt", math.sqrt(12.5) + 0.5),
        ("l2", "clamp", 5.0),
        ("l2", "outside_sqrt", 5.5),
    ],
)
def test_where_epsilon_enters(kind: Any, mode: Any, denominator: float) -> None:
    x = np.array([[[3.0, 4.0]]])
    y = qk_norm_rotary(QKNormRotarySpec(num_heads=1, kind=kind, epsilon=0.5, epsilon_mode=mode), {"x": x})["Y"]
    assert np.allclose(y, x / denominator, rtol=1e-15)


def test_clamp_is_a_lower_bound_of_the_size() -> None:
    x = np.array([[[3.0, 4.0]]])
    y = qk_norm_rotary(QKNormRotarySpec(num_heads=1, kind="l2", epsilon=8.0, epsilon_mode="clamp"), {"x": x})["Y"]
    assert np.array_equal(y, x / 8)


def test_root_of_sum_and_epsilon_is_rms_with_epsilon_over_d_and_gain_of_one_over_root_d() -> None:
    x, epsilon = np.random.default_rng(0).normal(size=(2, 3, 16)), 0.25
    spec = QKNormRotarySpec(num_heads=2, kind="rms", epsilon=epsilon / 8)
    y = qk_norm_rotary(spec, {"x": x, "weight": np.full(8, 8**-0.5)})["Y"].reshape(2, 3, 2, 8)
    rows = x.reshape(2, 3, 2, 8)
    assert np.allclose(y, rows / np.sqrt((rows**2).sum(-1, keepdims=True) + epsilon), rtol=1e-14)


@pytest.mark.parametrize(("kind", "mode", "groups", "axis"), EVERY_NORM)
@pytest.mark.parametrize("epsilon", [0.0, 1e-30, 1e-6])
def test_a_zero_row_gives_zeros(kind: Any, mode: Any, groups: int, axis: Any, epsilon: float) -> None:
    spec = QKNormRotarySpec(num_heads=2, kind=kind, epsilon=epsilon, epsilon_mode=mode, groups=groups, axis=axis)
    x = np.random.default_rng(0).normal(size=(1, 3, 16))
    x[0, 1] = 0
    y = qk_norm_rotary(spec, {"x": x, "weight": np.full(16, 2.0)})["Y"]
    assert np.array_equal(y[0, 1], np.zeros(16))
    assert np.all(np.isfinite(y))
    assert np.all(y[0, [0, 2]] != 0)


@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
@pytest.mark.parametrize("size", [3, 8, 10])
def test_a_constant_row_of_a_layer_norm_gives_the_bias(epsilon: float, size: int) -> None:
    # The mean of equal values may be one unit off: without care, epsilon 0 would make rows of -1 of it.
    x, bias = np.full((1, 2, size), 0.1), np.arange(float(size))
    y = qk_norm_rotary(QKNormRotarySpec(num_heads=1, kind="layer", epsilon=epsilon), {"x": x, "bias": bias})["Y"]
    assert np.array_equal(y, np.broadcast_to(bias, y.shape))


@pytest.mark.parametrize(("kind", "mode", "groups", "axis"), EVERY_NORM)
@pytest.mark.parametrize("magnitude", [1e-200, 1e-20, 1e20, 1e200])
def test_no_square_overflows_or_vanishes(kind: Any, mode: Any, groups: int, axis: Any, magnitude: float) -> None:
    spec = QKNormRotarySpec(num_heads=2, kind=kind, epsilon=0.0, epsilon_mode=mode, groups=groups, axis=axis)
    x = np.random.default_rng(0).normal(size=(1, 3, 16))
    expected, scaled = (qk_norm_rotary(spec, {"x": factor * x})["Y"] for factor in (1.0, magnitude))
    assert np.allclose(scaled, expected, rtol=1e-13)


def test_gain_and_bias_act_in_this_order_and_before_a_later_rotary() -> None:
    spec = QKNormRotarySpec(num_heads=1, kind="l2", epsilon_mode="clamp", rotary=RotarySpec(order="after_norm"))
    inputs = {
        "x": np.array([[[3.0, 4.0]]]),
        "weight": np.array([10.0, 20.0]),
        "bias": np.array([1.0, 2.0]),
        "cos": np.array([[0.0]]),
        "sin": np.array([[1.0]]),
        "scale": np.array(3.0),
    }
    # norm (0.6, 0.8), gain and bias (7, 18), quarter turn (-18, 7), scale last
    assert np.allclose(qk_norm_rotary(spec, inputs)["Y"], [[[-54.0, 21.0]]], rtol=1e-15)


def test_rotary_before_the_norm_leaves_gain_and_bias_unturned() -> None:
    spec = QKNormRotarySpec(num_heads=1, kind="l2", epsilon_mode="clamp", rotary=RotarySpec(order="before_norm"))
    inputs = {
        "x": np.array([[[3.0, 4.0]]]),
        "weight": np.array([10.0, 20.0]),
        "bias": np.array([1.0, 2.0]),
        "cos": np.array([[0.0]]),
        "sin": np.array([[1.0]]),
    }
    # quarter turn (-4, 3), norm (-0.8, 0.6), gain and bias
    assert np.allclose(qk_norm_rotary(spec, inputs)["Y"], [[[-7.0, 14.0]]], rtol=1e-15)


def test_partial_rotary_passes_the_other_values_bit_for_bit() -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 16))
    angles = np.random.default_rng(1).normal(size=(3, 2))
    bare = qk_norm_rotary(QKNormRotarySpec(num_heads=2, kind="rms"), {"x": x})["Y"].reshape(2, 3, 2, 8)
    rotary = RotarySpec(order="after_norm", embedding_dim=4, offset=2)
    tables = {"cos": np.cos(angles), "sin": np.sin(angles)}
    turned = qk_norm_rotary(QKNormRotarySpec(num_heads=2, kind="rms", rotary=rotary), {"x": x, **tables})["Y"]
    turned = turned.reshape(2, 3, 2, 8)
    assert np.array_equal(turned[..., :2], bare[..., :2])
    assert np.array_equal(turned[..., 6:], bare[..., 6:])
    assert not np.allclose(turned[..., 2:6], bare[..., 2:6])


# --- logits ----------------------------------------------------------------------------------------------------------------


def softmax(*logits: float) -> Any:
    weights = np.exp(np.array(logits) - max(logits))
    return weights / weights.sum()


def test_soft_cap_acts_before_the_mask() -> None:
    scores, value = column(0.5, 0.2, 0.1), column(1.0, 2.0, 1e30)
    mask = np.array([True, True, False])
    y = attention(plain(softcap=2.0), query=column(1.0), key=scores, value=value, attention_bias=mask)
    capped = [2 * math.tanh(s / 2) for s in (0.5, 0.2)]
    assert np.allclose(y, softmax(*capped) @ [1.0, 2.0], rtol=1e-14)
    as_float = np.where(mask, 0.0, -np.inf)
    assert np.array_equal(attention(plain(softcap=2.0), query=column(1.0), key=scores, value=value, attention_bias=as_float), y)


def test_clamp_then_cap_then_bias() -> None:
    spec = plain(scale=2.0, logit_clamp=3.0, softcap=4.0)
    y = attention(spec, query=column(1.0), key=column(5.0, -0.5), value=column(1.0, 0.0), attention_bias=np.array([0.25, 0.0]))
    first, second = 4 * math.tanh(3.0 / 4) + 0.25, 4 * math.tanh(-1.0 / 4)
    assert np.allclose(y, softmax(first, second)[0], rtol=1e-14)


def test_a_sink_takes_weight_and_gives_nothing() -> None:
    y = attention(plain(), query=column(1.0), key=column(0.3, 0.1), value=column(2.0, 4.0), head_sink=np.array([0.7]))
    assert np.allclose(y, softmax(0.3, 0.1, 0.7)[:2] @ [2.0, 4.0], rtol=1e-14)


def test_a_sink_alone_gives_zeros() -> None:
    nothing = np.array([False, False])
    inputs = {"query": column(1.0), "key": column(0.3, 0.1), "value": column(2.0, 4.0), "head_sink": np.array([0.7])}
    assert np.array_equal(attention(plain(), attention_bias=nothing, **inputs), column(0.0))


def test_logits_beyond_the_range_of_exp() -> None:
    y = attention(plain(scale=1e5), query=column(1.0), key=column(3.0, 1.0, 3.0), value=column(2.0, 100.0, 4.0))
    assert np.allclose(y, 3.0, rtol=1e-14)


def test_scale_of_q_is_per_head_and_position() -> None:
    spec = plain(2, 2)
    key, value = np.array([[[1.0, 1.0], [2.0, 2.0]]]), np.array([[[0.0, 0.0], [1.0, 1.0]]])
    q_scale = np.array([[[[1.0], [2.0]], [[3.0], [4.0]]]])
    y = attention(spec, q_scale=q_scale, query=np.ones((1, 2, 2)), key=key, value=value)
    expected = [[softmax(t, 2 * t)[1] for t in (1.0, 3.0)], [softmax(t, 2 * t)[1] for t in (2.0, 4.0)]]
    assert np.allclose(y[0], expected, rtol=1e-14)


# --- heads -------------------------------------------------------------------------------------------------------------------


def test_query_heads_read_key_heads_in_blocks() -> None:
    value = np.array([[[1.0, 1000.0]]])
    y = attention(plain(4, 2), query=np.ones((1, 1, 4)), key=np.ones((1, 1, 2)), value=value)
    assert np.array_equal(y, [[[1.0, 1.0, 1000.0, 1000.0]]])


@pytest.mark.parametrize("head_size", [1, 2, 7, 20, 36, 72, 80, 96, 192, 512])
def test_head_sizes_of_every_kind(head_size: int) -> None:
    rng = np.random.default_rng(0)
    spec = QKNormSpec(
        attention=AttentionSpec(q_num_heads=2, kv_num_heads=1, scale=1 / math.sqrt(head_size)),
        norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6),
    )
    query, key = rng.normal(size=(1, 3, 2 * head_size)), rng.normal(size=(1, 3, head_size))
    value = rng.normal(size=(1, 3, 5))
    y = attention(spec, query=query, key=key, value=value)
    assert y.shape == (1, 3, 10)
    rms = [a / np.sqrt((a**2).mean(-1, keepdims=True) + float(np.float32(1e-6))) for a in (query.reshape(3, 2, -1), key[0])]
    logits = np.einsum("qhd,kd->hqk", *rms) * float(np.float32(1 / math.sqrt(head_size)))
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert np.allclose(y[0].reshape(3, 2, 5).transpose(1, 0, 2), weights @ value[0], rtol=1e-12)


# --- visibility --------------------------------------------------------------------------------------------------------------


def seen_by(spec: QKNormSpec, *, queries: int, keys: int, **inputs: Any) -> Any:
    """(S, N) of bool: which keys have weight. One head; every key has a value of its own power of two."""
    value = np.eye(keys).reshape(1, keys, keys)
    y = attention(spec, query=np.zeros((1, queries, 1)), key=np.zeros((1, keys, 1)), value=value, **inputs)
    return y[0] > 0


def test_causal_without_a_cache_is_upper_left() -> None:
    assert np.array_equal(seen_by(plain(is_causal=True), queries=2, keys=4), [[1, 0, 0, 0], [1, 1, 0, 0]])
    assert np.array_equal(seen_by(plain(is_causal=True), queries=4, keys=2), [[1, 0], [1, 1], [1, 1], [1, 1]])


def test_causal_behind_a_cache() -> None:
    inputs = {"query": np.zeros((1, 2, 1)), "key": np.zeros((1, 2, 1)), "value": np.eye(5)[3:].reshape(1, 2, 5)}
    past = {"past_key": np.zeros((1, 1, 3, 1)), "past_value": np.eye(5)[:3].reshape(1, 1, 3, 5)}
    y = attention(plain(is_causal=True), **inputs, **past)
    assert np.array_equal(y[0] > 0, [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])


def test_a_window_of_w_tokens_is_left_window_size_w_minus_one() -> None:
    spec = plain(is_causal=True, left_window_size=2)  # three tokens
    assert np.array_equal(seen_by(spec, queries=5, keys=5), np.tril(np.ones((5, 5))) * np.triu(np.ones((5, 5)), -2))
    only_itself = plain(is_causal=True, left_window_size=0)
    assert np.array_equal(seen_by(only_itself, queries=3, keys=3), np.eye(3))


def test_windows_on_both_sides_without_causality() -> None:
    spec = plain(left_window_size=1, right_window_size=2)
    expected = [[-1 <= key - query <= 2 for key in range(6)] for query in range(5)]
    assert np.array_equal(seen_by(spec, queries=5, keys=6), expected)


def test_query_offset_moves_causality_and_window() -> None:
    spec = plain(is_causal=True, left_window_size=1)
    seen = seen_by(spec, queries=2, keys=6, query_offset=np.array([3]))
    assert np.array_equal(seen, [[0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0]])


def test_a_window_that_has_passed_all_keys_sees_nothing() -> None:
    spec = plain(left_window_size=1)
    y = attention(spec, query=np.ones((1, 1, 1)), key=np.ones((1, 2, 1)), value=np.ones((1, 2, 1)), query_offset=np.array([10]))
    assert np.array_equal(y, column(0.0))


def test_masked_rows_leave_other_rows_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    inputs = {name: rng.normal(size=(2, 8, 16)) for name in ("query", "key")} | {"value": np.arange(256.0).reshape(2, 8, 16)}
    mask = np.ones((2, 4, 8, 8), dtype=np.bool_)
    full = attention(plain(4, 4), attention_bias=mask, **inputs)
    mask[0, 0, 0] = False
    y = attention(plain(4, 4), attention_bias=mask, **inputs)
    assert np.array_equal(y[0, 0, :4], np.zeros(4))
    y[0, 0, :4] = full[0, 0, :4]
    assert np.array_equal(y, full)


def test_the_smallest_finite_bias_is_a_number_and_not_a_mask() -> None:
    lowest = np.full(3, np.finfo(np.float32).min, dtype=np.float32)
    y = attention(plain(), query=column(1.0), key=column(0.1, 0.2, 0.3), value=column(1.0, 2.0, 6.0), attention_bias=lowest)
    assert np.allclose(y, 3.0)  # equal logits once -3.4e38 has swallowed them: the mean of V


def test_left_padding_gives_each_row_what_it_gets_alone() -> None:
    spec = VARIANTS["qwen3"].spec
    together = example_inputs(VARIANTS["qwen3"], batch=2, length=5, dtype=np.float64)
    mask = np.ones((2, 1, 1, 5), dtype=np.bool_)
    mask[0, :, :, :2] = False
    y = attention(spec, **together, attention_bias=mask)
    alone = {name: value[:1, 2:] if value.ndim == 3 else value for name, value in together.items()}
    assert np.allclose(y[0, 2:], attention(spec, **alone)[0], rtol=1e-13)
    assert np.array_equal(y[0, :2], np.zeros_like(y[0, :2]))


# --- caches ------------------------------------------------------------------------------------------------------------------

CACHEABLE = [variant for variant in VARIANTS.values() if not {"attention_bias", "q_scale"} & set(variant.input_names)]
CAUSAL = [variant for variant in CACHEABLE if variant.spec.attention.is_causal]


def rows(inputs: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """The inputs of positions start..stop-1: tokens and the tables' rows."""
    out = dict(inputs)
    for name in ("query", "key", "value"):
        out[name] = inputs[name][:, start:stop]
    for name in ("cos", "sin"):
        if name in inputs:
            out[name] = inputs[name][..., start:stop, :]
    return out


@pytest.mark.parametrize("variant", CAUSAL, ids=lambda variant: variant.name)
@pytest.mark.parametrize("fixed", [False, True])
def test_steps_with_a_cache_equal_one_run(variant: Variant, fixed: bool) -> None:
    inputs = example_inputs(variant, batch=2, length=9, value_size=3, dtype=np.float64)
    whole = qk_norm_attention(variant.spec, inputs)["Y"]
    heads, size = variant.spec.attention.kv_num_heads, variant.head_size
    entries = 11 if fixed else 0
    cache = {"past_key": np.full((2, heads, entries, size), np.nan), "past_value": np.full((2, heads, entries, 3), np.nan)}
    pieces, done = [], 0
    for stop in (4, 5, 5, 8, 9):  # a prompt, a token, an empty step, a chunk, a token
        if fixed:
            cache["cache_length"] = np.array([done, done])
        out = qk_norm_attention(variant.spec, rows(inputs, done, stop) | cache)
        cache = {"past_key": out["present_key"], "past_value": out["present_value"]}
        pieces.append(out["Y"])
        done = stop
    assert np.allclose(np.concatenate(pieces, axis=1), whole, rtol=1e-13, atol=1e-14)


def test_rows_of_a_fixed_cache_have_lengths_of_their_own() -> None:
    variant = VARIANTS["qwen3"]
    inputs = example_inputs(variant, batch=3, length=2, past_length=4, capacity=8, dtype=np.float64, seed=4)
    assert len(set(inputs["cache_length"])) > 1
    together = qk_norm_attention(variant.spec, inputs)
    assert together["present_key"].shape == inputs["past_key"].shape
    for row in range(3):
        valid = int(inputs["cache_length"][row])
        alone = {name: value[row : row + 1] for name, value in inputs.items() if value.shape[0] == 3 and name != "cache_length"}
        alone |= {name: inputs[name] for name in ("q_norm_weight", "k_norm_weight")}
        for name in ("past_key", "past_value"):
            alone[name] = alone[name][:, :, :valid]
        y = qk_norm_attention(variant.spec, alone)
        assert np.allclose(together["Y"][row], y["Y"][0], rtol=1e-13)
        assert np.array_equal(together["present_key"][row, :, : valid + 2], y["present_key"][0])
        assert np.all(np.isnan(together["present_key"][row, :, valid + 2 :]))


def test_cached_keys_are_those_after_norm_and_rotary() -> None:
    variant = VARIANTS["olmo2"]
    inputs = example_inputs(variant, batch=2, length=3, dtype=np.float64)
    preparation = {"x": inputs["key"], "weight": inputs["k_norm_weight"], "cos": inputs["cos"], "sin": inputs["sin"]}
    prepared = qk_norm_rotary(variant.spec.key_preparation, preparation)["Y"]
    present = qk_norm_attention(variant.spec, inputs)["present_key"]
    assert np.allclose(present.transpose(0, 2, 1, 3).reshape(2, 3, -1), prepared, rtol=1e-15)


# --- empty and wrong sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize(
    "sizes", [{"batch": 0}, {"length": 0}, {"length": 0, "past_length": 3}, {"past_length": 0}, {"past_length": 3, "capacity": 8}]
)
def test_empty_sizes_and_unused_entries_give_finite_results(variant: Variant, sizes: dict[str, int]) -> None:
    inputs = example_inputs(variant, dtype=np.float64, **sizes)
    result = qk_norm_attention(variant.spec, inputs)
    assert result["Y"].shape[:2] == inputs["query"].shape[:2]
    assert np.all(np.isfinite(result["Y"]))


def test_no_keys_at_all_gives_zeros() -> None:
    y = attention(plain(), query=np.ones((1, 2, 1)), key=np.ones((1, 0, 1)), value=np.ones((1, 0, 3)))
    assert np.array_equal(y, np.zeros((1, 2, 3)))


def test_narrow_inputs_are_read_exactly() -> None:
    variant = VARIANTS["qwen3"]
    half = example_inputs(variant, dtype=np.float16)
    wide = {name: value.astype(np.float64) for name, value in half.items()}
    assert np.array_equal(attention(variant.spec, **half), attention(variant.spec, **wide))


def test_heads_that_do_not_group_are_refused() -> None:
    with pytest.raises(SpecError, match="q_num_heads 5 is not a multiple of kv_num_heads 2"):
        plain(5, 2)
