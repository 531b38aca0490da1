"""Buffers with `cache_length` in the reference: which grow, what is refused, and a bias with fewer columns."""

from __future__ import annotations

import numpy as np
import pytest

from qknorm_onnx.spec.qk_norm_spec import SpecError
from qknorm_onnx.spec.reference import qk_norm_attention
from qknorm_onnx.spec.variants import VARIANTS, example_inputs


def test_buffers_without_room_grow() -> None:
    """Each row as it would be alone, in buffers with and without room; what nobody wrote is zero."""
    variant = VARIANTS["qwen3"]
    inputs = example_inputs(variant, batch=3, length=2, past_length=4, capacity=7, dtype=np.float64, seed=4)
    inputs["cache_length"] = np.array([4, 0, 3])
    inputs["past_key"], inputs["past_value"] = (np.nan_to_num(inputs[name]) for name in ("past_key", "past_value"))
    roomy = qk_norm_attention(variant.spec, inputs)
    for entries, total in ((4, 6), (5, 6), (6, 6), (7, 7)):
        short = inputs | {name: inputs[name][:, :, :entries] for name in ("past_key", "past_value")}
        found = qk_norm_attention(variant.spec, short)
        assert found["present_key"].shape[2] == found["present_value"].shape[2] == total
        assert np.allclose(found["Y"], roomy["Y"], rtol=1e-14)
        for row, end in enumerate((6, 2, 5)):
            assert np.array_equal(found["present_key"][row, :, :end], roomy["present_key"][row, :, :end])
            assert not found["present_value"][row, :, max(end, entries) :].any()


def test_more_valid_entries_than_there_are_are_refused_by_row() -> None:
    variant = VARIANTS["qwen3"]
    inputs = example_inputs(variant, batch=2, length=2, past_length=4, capacity=6)
    for bad in (7, -1):
        inputs["cache_length"] = np.array([6, bad])
        with pytest.raises(ValueError, match=rf"cache_length\[1\] is {bad}; it must be within 0 .. 6"):
            qk_norm_attention(variant.spec, inputs)


def test_keys_behind_the_last_column_of_a_bias_are_not_seen() -> None:
    variant = VARIANTS["qwen3"]
    rng = np.random.default_rng(5)
    inputs = example_inputs(variant, batch=2, length=2, past_length=4, capacity=9, dtype=np.float64, seed=4)
    inputs["cache_length"] = np.array([4, 2])
    inputs["past_key"], inputs["past_value"] = (np.nan_to_num(inputs[name]) for name in ("past_key", "past_value"))
    for values in (rng.normal(size=(2, 1, 2, 9)), rng.random((2, 1, 2, 9)) < 0.7):
        for columns in (6, 5, 2):
            hidden = np.where(np.arange(9) < columns, values, False if values.dtype == bool else -np.inf)
            whole = qk_norm_attention(variant.spec, inputs | {"attention_bias": hidden})
            short = qk_norm_attention(variant.spec, inputs | {"attention_bias": values[..., :columns]})
            assert np.allclose(short["Y"], whole["Y"], rtol=1e-14)
    one = qk_norm_attention(variant.spec, inputs | {"attention_bias": np.full((2, 1, 2, 1), 0.3)})
    assert np.allclose(one["Y"], qk_norm_attention(variant.spec, inputs)["Y"], rtol=1e-13)
    with pytest.raises(SpecError, match=r"attention_bias has shape .* there are at most 11 keys"):
        qk_norm_attention(variant.spec, inputs | {"attention_bias": np.zeros((1, 12))})
    with pytest.raises(SpecError, match=r"attention_bias has shape .* there are 9 keys"):
        qk_norm_attention(variant.spec, inputs | {"attention_bias": np.zeros((1, 10))})
