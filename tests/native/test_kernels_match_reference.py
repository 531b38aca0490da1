"""Contract 3: the kernels, instantiated in float64, equal the reference; the narrower types stay within their rounding."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from kernel_call import NUMPY_TYPES, NativeLibrary
from random_cases import random_case, random_rotary_case, rounded

from qknorm_onnx.spec.reference import qk_norm_attention, qk_norm_rotary

# Largest error over the largest value. float64 is the contract; a narrow type rounds its inputs' products (float32: a sum
# of some hundred terms) and its output, and with `after_cast` also q and k on the way.
LIMITS = {"float64": 1e-12, "float32": 2e-5, "float16": 8 * 2.0**-11, "bfloat16": 8 * 2.0**-8}
SEEDS = range(8)
CASES_PER_SEED = 25


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """max|a - e| / max|e|; a NaN on one side is an infinite error."""
    assert actual.shape == expected.shape
    wide = actual.astype(np.float64)
    if not np.array_equal(np.isnan(wide), np.isnan(expected)):
        return float("inf")
    scale = max(float(np.nanmax(np.abs(expected), initial=0.0)), 1e-30)
    return float(np.nanmax(np.abs(wide - expected), initial=0.0)) / scale


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", NUMPY_TYPES)
def test_attention(kernels: NativeLibrary, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    compared = 0
    for index in range(CASES_PER_SEED):
        case = random_case(rng)
        inputs = rounded(case.inputs, NUMPY_TYPES[dtype], rng, mixed=dtype != "float64")
        expected = qk_norm_attention(case.spec, inputs)
        actual = kernels.attention(case.spec, inputs, threads=2 if index % 5 == 0 else 0)
        for name, value in actual.items():
            assert relative_error(value, expected[name]) <= LIMITS[dtype], f"{name} of case {index}: {case.spec}"
            compared += value.size
    assert compared > 1000


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", NUMPY_TYPES)
def test_rotary(kernels: NativeLibrary, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for index in range(CASES_PER_SEED):
        case = random_rotary_case(rng)
        if case.spec.kind == "layer" and dtype != "float64":
            continue  # groups of two or three values lose all digits in x - mean, in any narrow implementation
        inputs = rounded(case.inputs, NUMPY_TYPES[dtype], rng, mixed=dtype != "float64")
        error = relative_error(kernels.rotary(case.spec, inputs)["Y"], qk_norm_rotary(case.spec, inputs)["Y"])
        assert error <= LIMITS[dtype], f"case {index}: {case.spec}"


def test_long_prompts_cross_tiles_and_blocks(kernels: NativeLibrary) -> None:
    """More queries than one block, more keys than one tile, windows that end inside both."""
    rng = np.random.default_rng(5)
    compared = 0
    while compared < 6:
        case = random_case(rng, largest=700)
        if case.inputs["query"].shape[1] < 250:
            continue
        compared += 1
        expected = qk_norm_attention(case.spec, case.inputs)["Y"]
        assert relative_error(kernels.attention(case.spec, case.inputs, threads=2)["Y"], expected) <= 1e-12, case.spec


def test_outputs_are_rounded_to_nearest(kernels: NativeLibrary) -> None:
    """float16 and bfloat16 outputs are the nearest to a wide result, also for subnormal, huge and halfway values."""
    from qknorm_onnx.spec.qk_norm_spec import QKNormRotarySpec

    spec = QKNormRotarySpec(num_heads=1)
    values = np.concatenate([np.geomspace(1e-9, 9e4, 4001), np.arange(2048, 4096) * (1 + 2.0**-11)]).astype(np.float32)
    for dtype in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)):
        x = np.ones((1, 1, values.size), dtype)
        with np.errstate(over="ignore"):
            expected = values.astype(dtype)
        actual = kernels.rotary(spec, {"x": x, "scale": values})["Y"][0, 0]
        assert np.array_equal(actual.view(np.uint16), expected.view(np.uint16))
