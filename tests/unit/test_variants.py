"""VARIANTS and their random inputs."""

from __future__ import annotations

import dataclasses
import re
from typing import get_args

import numpy as np
import pytest

from qknorm_onnx.spec import qk_norm_spec
from qknorm_onnx.spec.attributes import attribute_fields, to_attributes
from qknorm_onnx.spec.qk_norm_spec import QKNormSpec, SpecError
from qknorm_onnx.spec.signature import ATTENTION_INPUT_NAMES
from qknorm_onnx.spec.variants import VARIANTS, Variant, example_inputs

ASKED_FOR = {
    "l2-tau-per-head", "cosnorm-scalar-tau", "rms-norm", "layer-norm-per-head", "group-norm-in-head", "vit-22b",
    "vit-22b-article", "gemma2", "gemma2-article", "gemma3", "chameleon", "chameleon-article", "ngpt", "command-r-plus",
    "internlm2", "internlm2-article", "scaled-attention", "logit-clamp", "softcap", "rms-softcap", "olmo2", "qwen3",
    "llama4",
}  # fmt: skip


def test_every_system_of_the_article_is_there() -> None:
    assert set(VARIANTS) >= ASKED_FOR


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_variant_is_complete(variant: Variant) -> None:
    assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", variant.name)
    assert variant.summary
    assert variant.source.startswith("https://")
    assert set(variant.input_names) <= set(ATTENTION_INPUT_NAMES)
    assert len(set(variant.input_names)) == len(variant.inputs)
    assert not variant.name.endswith("-article") or variant.claim == "article"
    assert ("cos" in variant.input_names) == (variant.spec.rotary.order != "none")


def test_where_article_and_code_differ_both_stand() -> None:
    for name in VARIANTS:
        if name.endswith("-article"):
            official = VARIANTS[name.removesuffix("-article")]
            assert official.claim == "official"
            assert official.spec != VARIANTS[name].spec


def test_variants_reach_every_value_of_every_choice() -> None:
    for name, literal in (
        ("q_norm", qk_norm_spec.NormKind),
        ("k_norm", qk_norm_spec.NormKind),
        ("norm_axis", qk_norm_spec.NormAxis),
        ("epsilon_mode", qk_norm_spec.EpsilonMode),
        ("norm_weight_order", qk_norm_spec.NormWeightOrder),
        ("rotary_order", qk_norm_spec.RotaryOrder),
    ):
        missing = set(get_args(literal)) - {to_attributes(variant.spec)[name] for variant in VARIANTS.values()}
        assert not missing, f"add a variant with {name} {missing} to a file of qknorm_onnx/spec/variants/"


def test_variants_use_every_attribute_and_every_optional_input() -> None:
    for field in attribute_fields(QKNormSpec):
        values = {to_attributes(variant.spec)[field.onnx_name] for variant in VARIANTS.values()}
        message = f"{field.onnx_name} is {values} everywhere: add a variant with another to a file of qknorm_onnx/spec/variants/"
        assert len(values) > 1 or field.onnx_name == "softmax_precision", message
    used = {name for variant in VARIANTS.values() for name in variant.input_names}
    not_a_form = {"query", "key", "value", "past_key", "past_value", "cache_length", "query_offset"}
    unused = set(ATTENTION_INPUT_NAMES) - not_a_form - used
    assert not unused, f"add a variant with the input {unused} to a file of qknorm_onnx/spec/variants/"
    assert used <= set(ATTENTION_INPUT_NAMES) - not_a_form


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_inputs_are_random_and_reproducible(variant: Variant) -> None:
    first, again, other = (example_inputs(variant, seed=seed) for seed in (1, 1, 2))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert first.keys() == {"query", "key", "value", *variant.input_names}
    for name, value in first.items():
        assert value.size == 1 or len(np.unique(value)) > 1, f"{name} is constant"
        assert not np.array_equal(value, other[name]), f"{name} does not depend on the seed"
        assert not np.array_equal(value, np.ones_like(value))


def test_q_and_k_have_gains_of_their_own() -> None:
    for variant in VARIANTS.values():
        inputs = example_inputs(variant)
        if {"q_norm_weight", "k_norm_weight"} <= inputs.keys():
            size = min(inputs["q_norm_weight"].size, inputs["k_norm_weight"].size)
            assert not np.allclose(inputs["q_norm_weight"].ravel()[:size], inputs["k_norm_weight"].ravel()[:size])


def test_types_of_the_inputs() -> None:
    inputs = example_inputs(VARIANTS["esmc"], dtype=np.float16, parameter_dtype=np.float32, past_length=2, capacity=9)
    assert {inputs[name].dtype for name in ("query", "key", "value", "past_key")} == {np.dtype(np.float16)}
    assert {inputs[name].dtype for name in ("q_norm_weight", "cos")} == {np.dtype(np.float32)}
    assert inputs["attention_bias"].dtype == np.bool_
    assert inputs["cache_length"].dtype == np.int64


def test_a_mask_has_a_query_that_sees_nothing() -> None:
    assert not example_inputs(VARIANTS["llama4"])["attention_bias"][0, 0, 0].any()
    assert np.isneginf(example_inputs(VARIANTS["doge"])["attention_bias"][0, 0, 0]).all()


def test_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SpecError, match="qwen3 rotates q and k with one table"):
        example_inputs(VARIANTS["qwen3"], length=3, key_length=4)
    with pytest.raises(SpecError, match="capacity 6"):
        example_inputs(VARIANTS["qwen3"], length=3, past_length=7, capacity=6)
    with pytest.raises(SpecError, match="capacity 6"):
        example_inputs(VARIANTS["qwen3"], capacity=6)


def test_cross_attention_has_a_key_length_of_its_own() -> None:
    inputs = example_inputs(VARIANTS["mllama-cross"], batch=1, length=3, key_length=8, value_size=5)
    assert inputs["key"].shape == (1, 8, 8)
    assert inputs["value"].shape == (1, 8, 5)


def test_variants_are_values() -> None:
    variant = VARIANTS["qwen3"]
    assert hash(variant) == hash(dataclasses.replace(variant))
    with pytest.raises(TypeError):
        VARIANTS["mine"] = variant  # type: ignore[index]
