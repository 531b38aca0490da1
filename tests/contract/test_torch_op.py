"""Contract 4: the torch operators in float64 == the reference, for random specs over every field; opcheck; gradients."""

from __future__ import annotations

import dataclasses
import itertools
from typing import get_args

import numpy as np
import pytest
import torch

from qknorm_onnx.spec import reference
from qknorm_onnx.spec.attributes import attribute_fields, to_attributes
from qknorm_onnx.spec.qk_norm_spec import (
    AttentionSpec,
    NormKind,
    NormSpec,
    QKNormRotarySpec,
    QKNormSpec,
    RotarySpec,
    SpecError,
)
from qknorm_onnx.spec.signature import ATTENTION_INPUT_NAMES
from qknorm_onnx.torch_export.operators.torch_op import (
    decode_attention_spec,
    decode_rotary_spec,
    encode_spec,
    qk_norm_attention,
    qk_norm_attention_with_present,
    qk_norm_rotary,
)
from tests.contract.spec_cases import epsilon_modes

BOUND = 1e-12
HEADS = [(1, 1), (4, 4), (6, 2), (5, 1), (4, 2)]
SEEDS = range(300)


class Draw:
    """Choices of one random case."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def one(self, *choices):
        return choices[self.rng.integers(len(choices))]

    def normal(self, *shape, scale=1.0):
        return self.rng.normal(size=shape) * scale


def random_spec(draw):
    q_heads, kv_heads = draw.one(*HEADS)
    kinds = draw.one(*itertools.product(get_args(NormKind), repeat=2))
    mode = draw.one(*epsilon_modes(*kinds))
    axis = draw.one("head", "head", "hidden")
    normed = kinds != ("none", "none")
    orders = ("none", "after_norm", "before_norm") if normed and axis == "head" else ("none", "after_norm")
    size, offset, sections = draw.one((0, 0, 1), (0, 0, 2), (4, 0, 1), (4, 4, 2), (8, 0, 2), (2, 6, 1))
    return QKNormSpec(
        attention=AttentionSpec(
            q_num_heads=q_heads,
            kv_num_heads=kv_heads,
            scale=draw.one(0.35, 1.0, 3.0),
            softcap=draw.one(0.0, 0.0, 2.0),
            logit_clamp=draw.one(0.0, 0.0, 1.5),
            is_causal=draw.one(True, False),
            left_window_size=draw.one(-1, 0, 2),
            right_window_size=draw.one(-1, 0, 1),
            softmax_precision=draw.one("float32", "float64", "float16", "bfloat16"),
        ),
        norm=NormSpec(
            q_kind=kinds[0],
            k_kind=kinds[1],
            axis=axis,
            groups=draw.one(1, 1, 2, 4),
            q_epsilon=draw.one(0.0, 1e-6, 0.3),
            k_epsilon=draw.one(1e-12, 1e-5, 0.2),
            epsilon_mode=mode,
            weight_order=draw.one("before_cast", "after_cast"),
        ),
        rotary=RotarySpec(
            order=draw.one(*orders), interleaved=draw.one(True, False), embedding_dim=size, offset=offset, sections=sections
        ),
    )


def random_inputs(draw, spec, *, head_size=8, empty=True):
    q_heads, kv_heads = spec.attention.q_num_heads, spec.attention.kv_num_heads
    batch, queries, value_size = draw.one(1, 2, 3), draw.one(0 if empty else 2, 1, 3, 5), draw.one(8, 3)
    keys = queries if spec.rotary.order != "none" else draw.one(queries, 0 if empty else 2, 1, 7)
    inputs = {
        "query": draw.normal(batch, queries, q_heads * head_size),
        "key": draw.normal(batch, keys, kv_heads * head_size),
        "value": draw.normal(batch, keys, kv_heads * value_size),
    }
    if queries and keys:
        inputs["query"][0, 0], inputs["key"][0, -1] = 0.0, 0.0  # all-zero rows
    for side, heads in (("q", q_heads), ("k", kv_heads)):
        if to_attributes(spec)[f"{side}_norm"] == "none":
            continue
        shape = draw.one((head_size,), (heads, head_size), (heads * head_size,))
        for part in ("weight", "bias"):
            if draw.one(True, False):
                inputs[f"{side}_norm_{part}"] = draw.normal(*shape)
    if spec.rotary.order != "none":
        size = spec.rotary.rotated_size(head_size)
        width = draw.one(size, size // 2)
        lead = draw.one((), (1,), (batch,), (batch, q_heads if q_heads == kv_heads else 1), (1, 1))
        inputs |= {name: draw.normal(*lead, queries, width) for name in ("cos", "sin")}
    total = keys
    cache = draw.one("none", "none", "growing", "fixed")
    if cache == "growing":
        past = draw.one(0, 2, 4)
        total = past + keys
    elif cache == "fixed":
        past = total = keys + draw.one(0, 2, 4)
        inputs["cache_length"] = draw.rng.integers(0, past - keys + 1, size=batch)
    if cache != "none":
        inputs["past_key"], inputs["past_value"] = (draw.normal(batch, kv_heads, past, d) for d in (head_size, value_size))
    if cache == "fixed":
        for row, used in enumerate(inputs["cache_length"]):
            inputs["past_key"][row, :, used:], inputs["past_value"][row, :, used:] = np.nan, np.inf
    if cache == "none" and draw.one(True, False):
        inputs["query_offset"] = draw.rng.integers(0, 4, size=batch)
    if draw.one(True, False):
        inputs["q_scale"] = draw.normal(
            *draw.one((), (q_heads, 1, 1), (head_size,), (q_heads, 1, head_size), (batch, 1, queries, 1))
        )
    if draw.one(True, False):
        inputs["head_sink"] = draw.normal(q_heads)
    lead = draw.one((), (1, 1), (q_heads,), (batch, 1), (batch, q_heads))
    bias = draw.one("none", "bool", "float", "infinite")
    if bias == "bool":
        inputs["attention_bias"] = draw.normal(*lead, queries, total) > -0.3
    elif bias != "none":
        values = draw.normal(*lead, queries, total)
        inputs["attention_bias"] = np.where(values > 0.8, -np.inf, values) if bias == "infinite" else values
    return inputs


def to_torch(inputs):
    return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in inputs.items()}


def relative_error(found, expected):
    assert found.shape == expected.shape
    if not expected.size:
        return 0.0
    assert np.array_equal(np.isfinite(found), np.isfinite(expected))
    found, expected = (np.nan_to_num(x, nan=0, posinf=0, neginf=0) for x in (found, expected))
    return np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-300)


@pytest.mark.parametrize("seed", SEEDS)
def test_attention_in_float64_equals_reference(seed):
    draw = Draw(seed)
    spec = random_spec(draw)
    inputs = random_inputs(draw, spec)
    expected = reference.qk_norm_attention(spec, inputs)
    outputs = qk_norm_attention_with_present(spec, **to_torch(inputs))
    for name, output in zip(("Y", "present_key", "present_value"), outputs, strict=True):
        assert relative_error(output.numpy(), expected[name]) <= BOUND, name
    assert torch.equal(qk_norm_attention(spec, **to_torch(inputs)), outputs[0])


def test_random_specs_reach_every_field():
    specs = [to_attributes(random_spec(Draw(seed))) for seed in SEEDS]
    for field in attribute_fields(QKNormSpec):
        assert len({spec[field.onnx_name] for spec in specs}) > 1, field.onnx_name
    names = set(itertools.chain.from_iterable(random_inputs(d := Draw(s), random_spec(d)) for s in SEEDS))
    assert len(names) == 16


@pytest.mark.parametrize("seed", range(60))
def test_rotary_in_float64_equals_reference(seed):
    draw = Draw(seed)
    spec = random_spec(draw)
    inputs = random_inputs(draw, spec)
    for side, preparation in (("q", spec.query_preparation), ("k", spec.key_preparation)):
        own = {"x": inputs["query" if side == "q" else "key"]}
        own |= {part: inputs[f"{side}_norm_{part}"] for part in ("weight", "bias") if f"{side}_norm_{part}" in inputs}
        own |= {name: inputs[name] for name in ("cos", "sin") if name in inputs}
        if side == "q" and "q_scale" in inputs:
            own["scale"] = inputs["q_scale"]
        expected = reference.qk_norm_rotary(preparation, own)["Y"]
        assert relative_error(qk_norm_rotary(preparation, **to_torch(own)).numpy(), expected) <= BOUND


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_types_are_near_the_reference_on_the_rounded_inputs(seed, dtype):
    draw = Draw(seed)
    spec = random_spec(draw)
    rounded = {n: t.to(dtype) if t.is_floating_point() else t for n, t in to_torch(random_inputs(draw, spec)).items()}
    expected = reference.qk_norm_attention(
        spec, {n: (t.double() if t.is_floating_point() else t).numpy() for n, t in rounded.items()}
    )
    outputs = qk_norm_attention_with_present(spec, **rounded)
    for name, output in zip(expected, outputs, strict=True):
        assert output.dtype == dtype
        assert relative_error(output.double().numpy(), expected[name]) <= 64 * torch.finfo(dtype).eps, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_large_values_do_not_overflow_the_statistics(dtype):
    spec = QKNormSpec(
        attention=AttentionSpec(q_num_heads=2, kv_num_heads=1, scale=0.25),
        norm=NormSpec(q_kind="rms", k_kind="rms"),
    )
    largest = torch.finfo(dtype).max / 2
    query = torch.tensor([1.0, -0.5, 0.25, 0.125] * 2, dtype=dtype).mul(largest).expand(1, 3, 8)
    value = torch.ones(1, 3, 4, dtype=dtype)
    y = qk_norm_attention(spec, query, query[..., :4], value)
    assert torch.equal(y, torch.ones(1, 3, 8, dtype=dtype))
    small = qk_norm_rotary(spec.query_preparation, (query.double() / largest).to(dtype))
    large = qk_norm_rotary(spec.query_preparation, query.contiguous())
    assert torch.allclose(small.double(), large.double(), rtol=4 * torch.finfo(dtype).eps)


OPCHECK_SEEDS = [1002, 1003, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1004, 1014))]


@pytest.mark.parametrize("seed", OPCHECK_SEEDS)
def test_opcheck(seed):
    draw = Draw(seed)
    spec = random_spec(draw)
    inputs = to_torch(random_inputs(draw, spec))
    if "cache_length" in inputs:  # NaN is not equal to itself: opcheck compares outputs and gradients
        inputs["past_key"], inputs["past_value"] = (torch.nan_to_num(inputs[n], 0, 0, 0) for n in ("past_key", "past_value"))
    tensors = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in inputs.items()}
    order = [tensors.get(name) for name in ATTENTION_INPUT_NAMES]
    torch.library.opcheck(torch.ops.qknorm.attention_with_present.default, tuple(order), {"spec": encode_spec(spec)})


def test_opcheck_of_the_operators_with_one_output():
    draw = Draw(5)
    spec = random_spec(draw)
    inputs = {n: t.requires_grad_() for n, t in to_torch(random_inputs(draw, spec)).items() if n in ("query", "key", "value")}
    spec = dataclasses.replace(spec, rotary=RotarySpec())
    torch.library.opcheck(torch.ops.qknorm.attention.default, tuple(inputs.values()), {"spec": encode_spec(spec)})
    text = encode_spec(spec.query_preparation)
    torch.library.opcheck(torch.ops.qknorm.rotary.default, (inputs["query"],), {"spec": text})


@pytest.mark.parametrize("seed", range(16))
def test_gradients(seed):
    draw = Draw(seed + 2000)
    spec = dataclasses.replace(spec := random_spec(draw), norm=dataclasses.replace(spec.norm, q_epsilon=0.1, k_epsilon=0.1))
    inputs = random_inputs(draw, spec, empty=False)
    inputs["query"][0, 0] += draw.normal(inputs["query"].shape[2])  # finite differences across the kink
    inputs["key"][0, -1] += draw.normal(inputs["key"].shape[2])  # of a zero row say nothing
    inputs = to_torch(inputs)
    names = [n for n in ("query", "key", "value", "q_norm_weight", "k_norm_bias", "q_scale", "head_sink") if n in inputs]
    chosen = [inputs[n].requires_grad_() for n in names]

    def compute(*values):
        return qk_norm_attention(spec, **{**inputs, **dict(zip(names, values, strict=True))})

    assert torch.autograd.gradcheck(compute, chosen, fast_mode=True)


def test_second_derivative():
    spec = QKNormSpec(
        attention=AttentionSpec(q_num_heads=2, kv_num_heads=1, scale=1.0, is_causal=True),
        norm=NormSpec(q_kind="l2", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6, epsilon_mode="clamp"),
    )
    tensors = [torch.randn(1, 3, n, dtype=torch.float64, requires_grad=True) for n in (8, 4, 4)]
    assert torch.autograd.gradgradcheck(lambda q, k, v: qk_norm_attention(spec, q, k, v), tensors, fast_mode=True)


@pytest.mark.parametrize("mode", ["inside_sqrt", "clamp", "outside_sqrt"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
def test_gradients_are_finite_at_zero_rows_and_unused_cache_entries(mode, epsilon):
    spec = QKNormSpec(
        attention=AttentionSpec(q_num_heads=2, kv_num_heads=1, scale=1.0, is_causal=True),
        norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=epsilon, k_epsilon=epsilon, epsilon_mode=mode),
        rotary=RotarySpec(order="before_norm"),
    )
    query = torch.zeros(1, 2, 8, requires_grad=True)
    key, value = (torch.zeros(1, 2, 4, requires_grad=True) for _ in range(2))
    cos, sin = (torch.ones(2, 2, requires_grad=True) for _ in range(2))
    past = torch.full((1, 1, 5, 4), torch.nan)
    y, present_key, _ = qk_norm_attention_with_present(
        spec, query, key, value, cos=cos, sin=sin, past_key=past, past_value=past, cache_length=torch.tensor([0])
    )
    (y.sum() + 1000 * present_key[:, :, :2].sum()).backward()
    assert torch.isfinite(y).all()
    assert all(torch.isfinite(tensor.grad).all() for tensor in (query, key, value, cos, sin))


def test_one_tensor_in_several_roles_gets_the_sum_of_the_gradients():
    spec = QKNormSpec(
        attention=AttentionSpec(q_num_heads=2, kv_num_heads=2, scale=1.0),
        norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6),
    )
    x = torch.randn(1, 3, 8, dtype=torch.float64, requires_grad=True)
    parts = [x.detach().clone().requires_grad_() for _ in range(3)]
    qk_norm_attention(spec, x, x, x).square().sum().backward()
    qk_norm_attention(spec, *parts).square().sum().backward()
    assert torch.allclose(x.grad, sum(part.grad for part in parts))


@pytest.mark.parametrize("seed", range(30))
def test_spec_string_is_a_bijection(seed):
    spec = random_spec(Draw(seed))
    assert decode_attention_spec(encode_spec(spec)) == spec
    assert decode_rotary_spec(encode_spec(spec.query_preparation)) == spec.query_preparation
    assert encode_spec(decode_attention_spec(encode_spec(spec))) == encode_spec(spec)


PLAIN = QKNormSpec(attention=AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=1.0), norm=NormSpec(q_kind="rms", k_kind="rms"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 3, 30)}, "query has shape"),
        ({"key": torch.zeros(2, 3, 12)}, "head size 6; 8 is expected"),
        ({"q_norm_weight": torch.zeros(7)}, "q_norm_weight has shape"),
        ({"cos": torch.zeros(3, 4)}, "rotary_order is 'none'"),
        ({"value": torch.zeros(2, 3, 16, dtype=torch.float16)}, "value has type torch.float16"),
        ({"q_norm_weight": torch.zeros(8, dtype=torch.float64)}, "q_norm_weight has type torch.float64"),
        ({"query": torch.zeros(2, 3, 32, dtype=torch.int64)}, "query has type torch.int64"),
        ({"query_offset": torch.zeros(2)}, "query_offset has type torch.float32"),
        ({"gate": torch.zeros(2)}, "unknown input"),
    ],
)
def test_bad_inputs_are_refused_by_name(change, message):
    inputs = {"query": torch.zeros(2, 3, 32), "key": torch.zeros(2, 3, 16), "value": torch.zeros(2, 3, 16), **change}
    with pytest.raises(SpecError, match=message):
        qk_norm_attention(PLAIN, **inputs)


def test_a_full_cache_is_refused():
    past = torch.zeros(2, 2, 4, 8)
    with pytest.raises(ValueError, match="do not fit into a cache of 4"):
        qk_norm_attention(
            PLAIN,
            torch.zeros(2, 3, 32),
            torch.zeros(2, 3, 16),
            torch.zeros(2, 3, 16),
            past_key=past,
            past_value=past,
            cache_length=torch.tensor([1, 2]),
        )


def test_after_cast_rounds_before_the_gain():
    spec = QKNormRotarySpec(num_heads=1, kind="rms", epsilon=1e-6, weight_order="after_cast")
    x, weight = torch.randn(1, 64, 16, dtype=torch.bfloat16), torch.rand(16) + 0.5
    normalised = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    after = (weight * normalised.to(torch.bfloat16).float()).to(torch.bfloat16)
    assert torch.equal(qk_norm_rotary(spec, x, weight=weight), after)
    before = qk_norm_rotary(dataclasses.replace(spec, weight_order="before_cast"), x, weight=weight)
    assert not torch.equal(before, after)
