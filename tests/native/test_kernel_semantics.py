"""One behaviour per test, from public bug reports and the semantics that the operator promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_call import NUMPY_TYPES, NativeLibrary

from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormRotarySpec, QKNormSpec, RotarySpec
from qknorm_onnx.spec.reference import qk_norm_attention, qk_norm_rotary

Tensor = Any


def make_spec(*, heads: int = 2, kv_heads: int = 2, scale: float = 0.5, norm: str = "rms", **attention: Any) -> QKNormSpec:
    return QKNormSpec(
        attention=AttentionSpec(q_num_heads=heads, kv_num_heads=kv_heads, scale=scale, **attention),
        norm=NormSpec(q_kind=norm, k_kind=norm, epsilon_mode="clamp" if norm == "l2" else "inside_sqrt"),
    )


def make_inputs(
    rng: np.random.Generator,
    *,
    batch: int = 1,
    length: int = 5,
    keys: int | None = None,
    heads: int = 2,
    kv_heads: int = 2,
    size: int = 8,
) -> dict[str, Tensor]:
    keys = length if keys is None else keys
    return {
        "query": rng.normal(size=(batch, length, heads * size)),
        "key": rng.normal(size=(batch, keys, kv_heads * size)),
        "value": rng.normal(size=(batch, keys, kv_heads * size)),
    }


def assert_equals_reference(kernels: NativeLibrary, spec: QKNormSpec, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    expected = qk_norm_attention(spec, inputs)
    actual = kernels.attention(spec, inputs)
    for name, value in actual.items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-12 * max(1.0, np.abs(expected[name]).max(initial=0)))
    return actual


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize("norm", ["l2", "rms", "layer"])
@pytest.mark.parametrize("length", [1, 5])
def test_zero_row_is_finite_and_attends_uniformly(kernels: NativeLibrary, dtype: str, norm: str, length: int) -> None:
    """B01: the query row is zero, so all logits are equal."""
    rng = np.random.default_rng(0)
    spec = make_spec(norm=norm)
    inputs = {name: value.astype(NUMPY_TYPES[dtype]) for name, value in make_inputs(rng, length=length, keys=6).items()}
    inputs["query"][0, length - 1] = 0
    inputs["key"][0, 2] = 0
    y = kernels.attention(spec, inputs)["Y"].astype(np.float64)
    assert np.isfinite(y).all()
    mean = inputs["value"].astype(np.float64).mean(1)
    np.testing.assert_allclose(y[:, -1], mean, atol=2e-2 if "16" in dtype else 1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_small_epsilon_survives_in_half_precision(kernels: NativeLibrary, dtype: str, kind: str) -> None:
    """B03: eps 1e-8 is zero in float16; a constant row has variance zero."""
    spec = QKNormRotarySpec(num_heads=1, kind=kind, epsilon=1e-8)  # type: ignore[arg-type]
    x = np.full((1, 3, 16), 0.1, NUMPY_TYPES[dtype])
    x[0, 1] = 0
    bias = np.arange(16).astype(NUMPY_TYPES[dtype])
    y = kernels.rotary(spec, {"x": x, "bias": bias})["Y"].astype(np.float64)
    np.testing.assert_allclose(y, qk_norm_rotary(spec, {"x": x, "bias": bias})["Y"], rtol=1e-2)
    if kind == "layer":
        np.testing.assert_array_equal(y, np.broadcast_to(bias.astype(np.float64), y.shape))


@pytest.mark.parametrize("size", [3, 16, 40, 128])
def test_layer_norm_of_uneven_rows(kernels: NativeLibrary, size: int) -> None:
    """Means far from zero, an outlier at each place and rows in blocks: the variance keeps its digits."""
    rng = np.random.default_rng(2)
    rows = [np.full(size, 7.25), rng.normal(1e3, 1, size), rng.normal(-1e4, 1, size)]
    rows += [rng.normal(0, 1, size) + 1e3 * np.eye(1, size, place)[0] for place in range(size)]
    rows += [np.where(np.arange(size) < cut, 50.0, 0) + rng.normal(0, 1e-3, size) for cut in range(1, size)]
    x = np.stack(rows).astype(np.float32)[None]
    spec = QKNormRotarySpec(num_heads=1, kind="layer", epsilon=1e-6)
    y = kernels.rotary(spec, {"x": x})["Y"].astype(np.float64)
    expected = qk_norm_rotary(spec, {"x": x})["Y"]
    exact = x.astype(np.float64)
    # The mean is a float32 value itself: what it is off by is seen beside the deviation.
    unit = np.finfo(np.float32).eps * (4 + np.abs(exact.mean(-1)) / np.sqrt(exact.var(-1) + 1e-6))
    error = np.abs(y - expected).max(-1) / np.maximum(np.abs(expected).max(-1), 1)
    assert (error <= unit).all(), (error / unit).max()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gain_in_float32_with_half_activations(kernels: NativeLibrary, dtype: str) -> None:
    """B09."""
    rng = np.random.default_rng(1)
    spec = make_spec()
    inputs = {name: value.astype(NUMPY_TYPES[dtype]) for name, value in make_inputs(rng, size=64).items()}
    inputs["q_norm_weight"] = rng.normal(1, 0.3, 64).astype(np.float32)
    inputs["k_norm_weight"] = rng.normal(1, 0.3, 64).astype(NUMPY_TYPES[dtype])
    expected = qk_norm_attention(spec, inputs)["Y"]
    np.testing.assert_allclose(kernels.attention(spec, inputs)["Y"].astype(np.float64), expected, atol=2e-2)


@pytest.mark.parametrize("length", [1, 8, 40])
@pytest.mark.parametrize("mask", ["bool", "inf", "finfo_min"])
def test_row_that_sees_nothing(kernels: NativeLibrary, length: int, mask: str) -> None:
    """B13: zeros for a bool or -inf mask, the mean of V for the most negative float; other rows stay the same bits."""
    rng = np.random.default_rng(2)
    spec = make_spec(heads=4)
    inputs = {name: value.astype(np.float32) for name, value in make_inputs(rng, batch=2, length=length, keys=9, heads=4).items()}
    hidden = {"bool": False, "inf": -np.inf, "finfo_min": np.finfo(np.float32).min}[mask]
    seen = np.full((2, 4, length, 9), mask == "bool" or 0, np.bool_ if mask == "bool" else np.float32)
    blind = seen.copy()
    blind[0, 0, 0, :] = hidden
    free = kernels.attention(spec, inputs | {"attention_bias": seen})["Y"].reshape(2, length, 4, 8)
    masked = kernels.attention(spec, inputs | {"attention_bias": blind})["Y"].reshape(2, length, 4, 8)
    mean = inputs["value"].reshape(2, 9, 2, 8)[0, :, 0].mean(0)
    np.testing.assert_allclose(masked[0, 0, 0], mean if mask == "finfo_min" else 0 * mean, atol=1e-6)
    free[0, 0, 0] = masked[0, 0, 0]
    np.testing.assert_array_equal(masked, free)


@pytest.mark.parametrize("length", [1, 3])
def test_softcap_comes_before_the_mask(kernels: NativeLibrary, length: int) -> None:
    """B16: with the cap after the mask a little of the poisoned value leaks through."""
    rng = np.random.default_rng(3)
    spec = make_spec(softcap=50.0)
    inputs = {name: value.astype(np.float32) for name, value in make_inputs(rng, length=length, keys=3).items()}
    inputs["value"][:, 2] = 1e30
    inputs["attention_bias"] = np.array([[True, True, False]])
    assert np.abs(kernels.attention(spec, inputs)["Y"]).max() < 100


@pytest.mark.parametrize("length", [1, 7])
def test_query_heads_share_keys_by_repeating_not_tiling(kernels: NativeLibrary, length: int) -> None:
    """B23."""
    rng = np.random.default_rng(4)
    inputs = make_inputs(rng, length=length, heads=4, kv_heads=2)
    inputs["value"] = np.concatenate([np.full((1, length, 8), 1.0), np.full((1, length, 8), 1000.0)], axis=2)
    y = kernels.attention(make_spec(heads=4), inputs)["Y"].reshape(length, 4, 8)
    np.testing.assert_allclose(y, np.broadcast_to(np.array([1.0, 1.0, 1000.0, 1000.0])[:, None], y.shape))


@pytest.mark.parametrize("length", [1, 2, 13])
@pytest.mark.parametrize(("heads", "kv_heads"), [(5, 1), (6, 2), (7, 7), (48, 2), (40, 8)])
def test_awkward_group_sizes(kernels: NativeLibrary, heads: int, kv_heads: int, length: int) -> None:
    """B25."""
    rng = np.random.default_rng(5)
    inputs = make_inputs(rng, length=length, heads=heads, kv_heads=kv_heads, size=16)
    assert_equals_reference(kernels, make_spec(heads=heads, kv_heads=kv_heads, is_causal=True), inputs)


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("size", [1, 2, 20, 36, 72, 80, 96, 192, 512])
def test_head_sizes(kernels: NativeLibrary, size: int, length: int) -> None:
    """B28."""
    rng = np.random.default_rng(6)
    assert_equals_reference(kernels, make_spec(is_causal=True), make_inputs(rng, batch=2, length=length, keys=9, size=size))


def test_norm_over_the_whole_projection(kernels: NativeLibrary) -> None:
    """B30, with its numbers."""
    x = np.array([[[3.0, 4.0, 0.3, 0.4]]])
    per_head = kernels.rotary(QKNormRotarySpec(num_heads=2, kind="rms"), {"x": x})["Y"][0, 0]
    whole = kernels.rotary(QKNormRotarySpec(num_heads=2, kind="rms", axis="hidden"), {"x": x})["Y"][0, 0]
    np.testing.assert_allclose(per_head, [0.85, 1.13, 0.85, 1.13], atol=5e-3)
    np.testing.assert_allclose(whole, [1.19, 1.59, 0.12, 0.16], atol=5e-3)


@pytest.mark.parametrize("rotated", [2, 4, 8])
def test_partial_rotary_leaves_the_tail_alone(kernels: NativeLibrary, rotated: int) -> None:
    """B35: the values that are not rotated equal the normalised input exactly."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(2, 3, 16))
    angle = rng.normal(size=(3, rotated // 2))
    plain = kernels.rotary(QKNormRotarySpec(num_heads=2, kind="rms"), {"x": x})["Y"].reshape(2, 3, 2, 8)
    spec = QKNormRotarySpec(num_heads=2, kind="rms", rotary=RotarySpec(order="after_norm", embedding_dim=rotated))
    turned = kernels.rotary(spec, {"x": x, "cos": np.cos(angle), "sin": np.sin(angle)})["Y"].reshape(2, 3, 2, 8)
    np.testing.assert_array_equal(turned[..., rotated:], plain[..., rotated:])
    assert not np.allclose(turned[..., :rotated], plain[..., :rotated])


@pytest.mark.parametrize(("batch", "length", "past"), [(1, 4, 0), (1, 1, 0), (1, 0, 3), (0, 4, 2), (2, 0, 0)])
def test_empty_sizes(kernels: NativeLibrary, batch: int, length: int, past: int) -> None:
    """B43."""
    rng = np.random.default_rng(8)
    inputs = make_inputs(rng, batch=batch, length=length)
    for name in ("past_key", "past_value"):
        inputs[name] = rng.normal(size=(batch, 2, past, 8))
    actual = assert_equals_reference(kernels, make_spec(is_causal=True), inputs)
    assert actual["Y"].shape == (batch, length, 16)
    assert actual["present_key"].shape == (batch, 2, past + length, 8)


def test_no_keys_at_all(kernels: NativeLibrary) -> None:
    rng = np.random.default_rng(9)
    for length in (1, 20):
        y = kernels.attention(make_spec(), make_inputs(rng, length=length, keys=0))["Y"]
        np.testing.assert_array_equal(y, np.zeros((1, length, 16)))


def test_nan_is_not_hidden(kernels: NativeLibrary) -> None:
    """A NaN in a query spoils its own row and no other, whatever bits it is made of."""
    rng = np.random.default_rng(10)
    for length in (1, 30):
        inputs = {name: value.astype(np.float32) for name, value in make_inputs(rng, length=length, keys=40).items()}
        inputs["query"][0, 0, 3] = np.uint32(0xFFFFFFFF).view(np.float32)
        y = kernels.attention(make_spec(norm="none"), inputs)["Y"].reshape(length, 2, 8)
        assert np.isnan(y[0, 0]).all()
        assert np.isfinite(y[0, 1]).all()
        assert np.isfinite(y[1:]).all()


@pytest.mark.parametrize("length", [1, 3, 30])
@pytest.mark.parametrize("dtype", NUMPY_TYPES)
def test_cache_in_place(kernels: NativeLibrary, dtype: str, length: int) -> None:
    """present and past are one buffer: the new entries are written, nothing else is touched, and what lies behind is not read."""
    rng = np.random.default_rng(11)
    spec = make_spec(heads=4, is_causal=True)
    capacity, valid = 50, np.array([17, 3])
    inputs = {name: value.astype(NUMPY_TYPES[dtype]) for name, value in make_inputs(rng, batch=2, length=length, heads=4).items()}
    inputs["cache_length"] = valid
    cache = {name: rng.normal(size=(2, 2, capacity, 8)).astype(NUMPY_TYPES[dtype]) for name in ("past_key", "past_value")}
    expected = qk_norm_attention(spec, inputs | cache)
    for row, count in enumerate(valid):
        for buffer in cache.values():
            buffer[row, :, count:] = np.nan
    before = {name: buffer.copy() for name, buffer in cache.items()}
    outputs = {"present_key": cache["past_key"], "present_value": cache["past_value"]}
    actual = kernels.attention(spec, inputs | cache, outputs=outputs, threads=2)
    tolerance = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2, "bfloat16": 6e-2}[dtype]
    np.testing.assert_allclose(actual["Y"].astype(np.float64), expected["Y"], atol=tolerance)
    for past, present in (("past_key", "present_key"), ("past_value", "present_value")):
        for row, count in enumerate(valid):
            new = slice(count, count + length)
            np.testing.assert_allclose(
                cache[past][row, :, new].astype(np.float64), expected[present][row, :, new], atol=tolerance
            )
            untouched = np.r_[0:count, count + length : capacity]
            assert cache[past][row, :, untouched].tobytes() == before[past][row, :, untouched].tobytes()


def test_step_by_step_equals_all_at_once(kernels: NativeLibrary) -> None:
    """A prompt, then one token at a time, with a growing cache."""
    rng = np.random.default_rng(12)
    spec = make_spec(heads=4, is_causal=True, left_window_size=6)
    whole = make_inputs(rng, batch=2, length=20, heads=4)
    expected = kernels.attention(spec, whole)["Y"]
    state = kernels.attention(spec, {name: value[:, :11] for name, value in whole.items()})
    rows = [state["Y"]]
    for position in range(11, 20):
        step = {name: value[:, position : position + 1] for name, value in whole.items()}
        state = kernels.attention(spec, step | {"past_key": state["present_key"], "past_value": state["present_value"]})
        rows.append(state["Y"])
    np.testing.assert_allclose(np.concatenate(rows, axis=1), expected, atol=1e-12)


def test_more_logits_than_a_32_bit_index(library: NativeLibrary) -> None:
    """B64: S * T > 2^31; only a stripe of rows is compared, computed from the last queries alone."""
    rng = np.random.default_rng(13)
    length, tail = 46341, 3
    inputs = {name: value.astype(np.float32) for name, value in make_inputs(rng, length=length, heads=1, kv_heads=1).items()}
    spec = make_spec(heads=1, kv_heads=1, is_causal=True)
    y = library.attention(spec, inputs, threads=2)["Y"][:, -tail:]
    last = inputs | {"query": inputs["query"][:, -tail:], "query_offset": np.array([length - tail])}
    np.testing.assert_allclose(y, qk_norm_attention(spec, last)["Y"], atol=2e-6)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("keys", [1, 11, 12, 13, 66, 127, 128, 129, 131, 132, 133, 150, 265])
def test_lanes_without_a_key_weigh_nothing(kernels: NativeLibrary, dtype: str, keys: int) -> None:
    """Where every logit is far below zero, a key of zeros that fills up a block would take all the weight."""
    rng = np.random.default_rng(keys)
    spec = make_spec(heads=4, kv_heads=2, scale=40.0, norm="rms")
    inputs = make_inputs(rng, length=37, keys=keys, heads=4, kv_heads=2, size=16)
    inputs["query"] = 1 + 0.02 * inputs["query"]
    inputs["key"] = -1 + 0.02 * inputs["key"]
    inputs = {name: value.astype(NUMPY_TYPES[dtype]) for name, value in inputs.items()}
    expected = qk_norm_attention(spec, inputs)["Y"]
    assert np.abs(expected).min(initial=np.inf) > 0
    limit = 1e-11 if dtype == "float64" else 640 * 2.0**-20  # a logit's rounding is an error of its weight
    np.testing.assert_allclose(kernels.attention(spec, inputs)["Y"], expected, rtol=0, atol=limit * np.abs(expected).max())
