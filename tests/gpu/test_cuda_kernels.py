"""The Triton kernels through the PyTorch launcher, interpreted, against the reference in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from qknorm_onnx.custom_ops.kernels.cuda.tiles import Tile
from qknorm_onnx.spec.cuda_support import cuda_refusal
from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormRotarySpec, QKNormSpec, RotarySpec, SpecError
from qknorm_onnx.spec.reference import qk_norm_attention
from qknorm_onnx.torch_export.operators import triton_attention
from qknorm_onnx.torch_export.operators.triton_attention import Choices
from tests.contract import spec_cases
from tests.gpu.judge import check_attention, check_rotary, has_room, rounded, to_float64, to_torch

SMALL = Choices(
    prologue=Tile(rows=8, keys=0, warps=4, stages=1),
    prefill=Tile(rows=16, keys=16, warps=4, stages=1),
    decode=Tile(rows=16, keys=16, warps=4, stages=1),
)
DTYPES = ("float32", "float16", "bfloat16")
GROUPS = ("norm_cases", "rotary_cases", "attention_cases", "mask_cases", "cache_cases", "empty_cases", "variant_cases")
CASES = [case for group in GROUPS for case in getattr(spec_cases, group)()]
SERVED = [case for case in CASES if cuda_refusal(case.spec, dtype="float32") is None and has_room(case)]


def check(spec, inputs, dtype, *, num_outputs=1, choices=SMALL):
    outputs = triton_attention.attention(spec, to_torch(inputs), with_present=num_outputs > 1, choices=choices)
    check_attention(spec, inputs, list(outputs)[:num_outputs], dtype)


SOME = [(DTYPES[i % 3], case) for i, case in enumerate(SERVED[4::11])]


@pytest.mark.parametrize(("dtype", "case"), SOME, ids=lambda value: getattr(value, "id", value))
def test_kernels_compute_the_reference(dtype, case):
    check(case.spec, rounded(case.inputs, dtype), dtype, num_outputs=case.num_outputs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.id)
def test_kernels_compute_the_reference_for_every_case(dtype, case):
    test_kernels_compute_the_reference(dtype, case)


def spec_of(*, heads=(2, 1), norm="rms", order="after_norm", **attention):
    return QKNormSpec(
        attention=AttentionSpec(q_num_heads=heads[0], kv_num_heads=heads[1], scale=0.3, **attention),
        norm=NormSpec(q_kind=norm, k_kind=norm, q_epsilon=1e-6, k_epsilon=1e-5),
        rotary=RotarySpec(order=order),
    )


def inputs_of(spec, *, length, size, past=None, capacity=None, value_size=None, seed=0, batch=1):
    rng = np.random.default_rng(seed)
    heads, kv = spec.attention.q_num_heads, spec.attention.kv_num_heads
    values = value_size or size
    shapes = {"query": (batch, length, heads * size), "key": (batch, length, kv * size), "value": (batch, length, kv * values)}
    shapes |= {"q_norm_weight": (heads, size), "k_norm_weight": (size,)}
    if spec.rotary.order != "none":
        shapes |= dict.fromkeys(("cos", "sin"), (batch, length, size // 2))
    if past is not None:
        rows = capacity or past
        shapes |= {"past_key": (batch, kv, rows, size), "past_value": (batch, kv, rows, values)}
    inputs = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    if capacity is not None:
        inputs["cache_length"] = rng.integers(0, past + 1, size=batch)
        for row, used in enumerate(inputs["cache_length"]):
            inputs["past_key"][row, :, used:], inputs["past_value"][row, :, used:] = np.nan, np.inf
    return inputs


# Several tiles of queries and keys: every way in which windows and ends cut through tiles.
RANGES = [
    {"is_causal": True},
    {"is_causal": True, "left_window_size": 0},
    {"is_causal": True, "left_window_size": 15},
    {"is_causal": True, "left_window_size": 37},
    {"left_window_size": 5, "right_window_size": 20},
    {"right_window_size": 33},
    {"left_window_size": 200},
    {},
]


@pytest.mark.parametrize("visibility", RANGES, ids=str)
@pytest.mark.parametrize(("length", "past"), [(33, 0), (17, 50)])
def test_ranges_over_several_tiles(visibility, length, past):
    spec = spec_of(**visibility)
    inputs = rounded(inputs_of(spec, length=length, size=16, past=past), "float32")
    check(spec, inputs, "float32")


@pytest.mark.parametrize("size", [16, 33, 48, 64, 80, 128, 256])
def test_head_sizes(size):
    spec = spec_of(order="none" if size % 2 else "after_norm", is_causal=True)
    dtype = DTYPES[size % 3]
    check(spec, rounded(inputs_of(spec, length=3, size=size), dtype), dtype)
    token = inputs_of(spec, length=1, size=size, past=4, capacity=7, value_size=5)
    check(spec, rounded(token, dtype), dtype, num_outputs=3)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (5, 1), (6, 2), (16, 1)])
@pytest.mark.parametrize("splits", [1, 3])
def test_decode(heads, splits):
    spec = spec_of(heads=heads, is_causal=True, left_window_size=30 if splits == 3 else -1)
    inputs = rounded(inputs_of(spec, length=1, size=16, past=70, capacity=75, batch=2), "bfloat16")
    check(spec, inputs, "bfloat16", num_outputs=3, choices=dataclasses.replace(SMALL, splits=splits))


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("mask", ["float", "bool", "lowest"])
def test_decode_with_mask_and_sink(splits, mask):
    spec = dataclasses.replace(spec_of(heads=(4, 2)), rotary=RotarySpec(order="before_norm", interleaved=True))
    inputs = inputs_of(spec, length=1, size=16, past=40)
    rng = np.random.default_rng(5)
    bias = rng.normal(size=(1, 4, 1, 41))
    if mask == "lowest":
        bias[:] = np.finfo(np.float32).min
    inputs["attention_bias"] = rng.random(bias.shape) < 0.5 if mask == "bool" else bias
    if mask == "bool":
        inputs["attention_bias"][0, 0] = False
    if mask != "lowest":
        inputs["head_sink"] = rng.normal(size=4)
    check(spec, rounded(inputs, "float32"), "float32", choices=dataclasses.replace(SMALL, splits=splits))


def test_decode_of_a_layer_norm_with_a_padded_head():
    """The mean is not subtracted from the padding behind the head, which the dot product would see."""
    spec = spec_of(norm="layer", heads=(4, 2))
    inputs = rounded(inputs_of(spec, length=1, size=12, past=3), "float32")
    check(spec, inputs, "float32")


def test_decode_equals_the_general_path():
    spec = spec_of(heads=(6, 2), is_causal=True)
    inputs = to_torch(rounded(inputs_of(spec, length=1, size=16, past=20), "float32"))
    one = triton_attention.attention(spec, inputs, choices=SMALL)
    other = triton_attention.attention(spec, inputs, choices=dataclasses.replace(SMALL, allow_decode=False))
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_cache_in_place():
    spec = spec_of(is_causal=True)
    given = rounded(inputs_of(spec, length=2, size=16, past=6, capacity=9), "float32")
    inputs = to_torch(given)
    y, key, value = triton_attention.attention(spec, inputs, present=(inputs["past_key"], inputs["past_value"]), choices=SMALL)
    assert key is inputs["past_key"] and value is inputs["past_value"]
    check_attention(spec, given, [y, key, value], "float32")


def test_a_full_cache_gives_nan_and_is_left_alone():
    spec = spec_of(is_causal=True)
    inputs = to_torch(rounded(inputs_of(spec, length=1, size=16, past=4, batch=2), "float32"))
    inputs["cache_length"] = torch.tensor([3, 4])
    for allow_decode in (True, False):
        choices = dataclasses.replace(SMALL, allow_decode=allow_decode, splits=2)
        y, key, _ = triton_attention.attention(spec, inputs, choices=choices)
        assert torch.isfinite(y[0]).all()
        assert y[1].isnan().all()
        torch.testing.assert_close(key[1], inputs["past_key"][1], equal_nan=True)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-20, 1e15, 1e30])
@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
@pytest.mark.parametrize("axis", ["head", "hidden"])
def test_rows_whose_squares_leave_float32(magnitude, epsilon, axis):
    spec = QKNormRotarySpec(num_heads=2, kind="rms", epsilon=epsilon, axis=axis)
    x = magnitude * np.random.default_rng(1).normal(size=(1, 3, 32))
    x[0, 1] = 0.0
    inputs = rounded({"x": x}, "float32")
    y = triton_attention.rotary(spec, to_torch(inputs))
    assert torch.isfinite(y).all()
    check_rotary(spec, inputs, y, "float32")


def test_constant_rows_of_a_layer_norm_are_zero():
    spec = QKNormRotarySpec(num_heads=1, kind="layer", epsilon=0.0)
    y = triton_attention.rotary(spec, {"x": torch.full((1, 2, 48), 0.1)})
    assert torch.equal(y, torch.zeros_like(y))


def test_after_cast_rounds_before_the_gain():
    spec = QKNormRotarySpec(num_heads=1, kind="rms", epsilon=1e-6, weight_order="after_cast")
    rng = np.random.default_rng(2)
    # In float16, because the interpreter cuts off where a GPU rounds to bfloat16.
    inputs = rounded({"x": rng.normal(size=(1, 8, 16)), "weight": rng.normal(size=16)}, "float16", wide=("weight",))
    tensors = to_torch(inputs)
    normal = tensors["x"].float() * torch.rsqrt(tensors["x"].float().square().mean(-1, keepdim=True) + 1e-6)
    expected = (normal.half().float() * tensors["weight"]).half()
    assert torch.equal(triton_attention.rotary(spec, tensors), expected)
    assert not torch.equal(triton_attention.rotary(dataclasses.replace(spec, weight_order="before_cast"), tensors), expected)


def test_parameters_of_every_type_mixture():
    spec = dataclasses.replace(spec_of(heads=(2, 2)), norm=NormSpec(q_kind="layer", k_kind="layer"))
    inputs = inputs_of(spec, length=4, size=16)
    rng = np.random.default_rng(8)
    inputs |= {"q_norm_bias": rng.normal(size=16), "q_scale": rng.normal(size=(2, 1, 1)), "head_sink": rng.normal(size=2)}
    for wide in (("q_norm_weight", "cos", "sin", "head_sink"), ("q_norm_bias", "q_scale", "k_norm_weight")):
        check(spec, rounded(inputs, "float16", wide=wide), "float16")


@pytest.mark.parametrize("case", [case for case in CASES if cuda_refusal(case.spec, dtype="float32")], ids=lambda case: case.id)
def test_refusals_are_errors(case):
    with pytest.raises(SpecError, match=r"no CUDA kernel|computes? the softmax in float32"):
        triton_attention.attention(case.spec, to_torch(rounded(case.inputs, "float32")))


def test_float64_is_refused():
    spec = spec_of()
    assert cuda_refusal(spec, dtype="float64") == "the CUDA kernels compute in float32: float64 has none"
    with pytest.raises(SpecError, match="float64 has none"):
        triton_attention.attention(spec, {name: torch.from_numpy(v) for name, v in inputs_of(spec, length=2, size=16).items()})


def test_nothing_is_written_behind_the_rows_of_a_head():
    """Buffers with room behind every row: what lies there stays."""
    spec = spec_of(is_causal=True, heads=(2, 2))
    given = rounded(inputs_of(spec, length=1, size=20, past=3, capacity=5, value_size=12), "float32")
    inputs = to_torch(given)
    guarded = [torch.full((1, 2, 8, 20), 7.0), torch.full((1, 2, 8, 12), 7.0)]
    views = tuple(buffer[:, :, :5] for buffer in guarded)
    y, key, value = triton_attention.attention(spec, inputs, present=views, choices=SMALL)
    check_attention(spec, given, [y, key, value], "float32")
    assert all((buffer[:, :, 5:] == 7.0).all() for buffer in guarded)
    truth = qk_norm_attention(spec, given)["Y"]
    np.testing.assert_allclose(to_float64(y), truth, rtol=1e-4, atol=1e-5)
