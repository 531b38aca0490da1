"""Output shapes with numbers, symbols and unknowns, and errors that name the input."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormRotarySpec, QKNormSpec, RotarySpec, SpecError
from qknorm_onnx.spec.reference import qk_norm_attention, qk_norm_rotary
from qknorm_onnx.spec.shape_inference import (
    check_attention_inputs,
    check_rotary_inputs,
    infer_attention_outputs,
    infer_rotary_outputs,
)
from qknorm_onnx.spec.variants import VARIANTS, Variant, example_inputs

SPEC = QKNormSpec(
    attention=AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=0.5),
    norm=NormSpec(q_kind="rms", k_kind="rms"),
    rotary=RotarySpec(order="after_norm"),
)
SHAPES: dict[str, Any] = {
    "query": [3, 5, 32],
    "key": [3, 5, 16],
    "value": [3, 5, 12],
    "q_norm_weight": [8],
    "k_norm_weight": [2, 8],
    "cos": [3, 5, 4],
    "sin": [3, 5, 4],
}
PAST: dict[str, Any] = {"past_key": [3, 2, 7, 8], "past_value": [3, 2, 7, 6]}


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in SHAPES.items() if key != name}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("sizes", [{}, {"past_length": 3}, {"past_length": 3, "capacity": 9}, {"batch": 0}, {"value_size": 3}])
def test_inferred_shapes_are_those_of_the_result(variant: Variant, sizes: dict[str, int]) -> None:
    inputs = example_inputs(variant, **sizes)
    result = qk_norm_attention(variant.spec, inputs)
    inferred = infer_attention_outputs(variant.spec, {name: value.shape for name, value in inputs.items()})
    if "capacity" in sizes:  # only the lengths say whether the buffers grow
        assert inferred["present_key"][2] is inferred["present_value"][2] is None
        inferred["present_key"][2] = inferred["present_value"][2] = 9
    assert {name: list(value.shape) for name, value in result.items()} == inferred


def test_symbols_pass_through() -> None:
    shapes = {"query": ["batch", "sequence", 32], "key": ["batch", "sequence", 16], "value": ["batch", "sequence", 12]}
    spec = QKNormSpec(attention=SPEC.attention)
    inferred = infer_attention_outputs(spec, shapes)
    assert inferred["Y"] == ["batch", "sequence", 24]
    assert inferred["present_key"] == ["batch", 2, "sequence", 8]


def test_no_shape_says_how_large_buffers_become() -> None:
    shapes = SHAPES | {"past_key": [3, 2, "past", 8], "past_value": [3, 2, "past", 6]}
    assert infer_attention_outputs(SPEC, shapes)["present_key"] == [3, 2, None, 8]
    fixed = shapes | {"cache_length": [3]}
    assert infer_attention_outputs(SPEC, fixed)["present_value"] == [3, 2, None, 6]
    empty = fixed | {"past_key": [3, 2, 0, 8], "past_value": [3, 2, 0, 6]}
    assert infer_attention_outputs(SPEC, empty)["present_value"] == [3, 2, 5, 6]


def test_unknown_widths_are_no_contradiction() -> None:
    inferred = infer_attention_outputs(SPEC, SHAPES | {"query": [None, None, None], "value": [3, 5, None]})
    assert inferred["Y"] == [None, None, None]
    assert infer_rotary_outputs(QKNormRotarySpec(num_heads=2), {"x": ["b", None, 16]}) == {"Y": ["b", None, 16]}


WRONG: list[tuple[dict[str, Any], str]] = [
    (without("query"), "query"),
    (without("value"), "value"),
    (SHAPES | {"query": [3, 4, 5, 8]}, "query"),
    (SHAPES | {"query": [3, 5, 33]}, "query"),
    (SHAPES | {"key": [3, 5, 17]}, "key"),
    (SHAPES | {"key": [3, 5, 20]}, "head size 10; 8 is expected"),
    (SHAPES | {"value": [3, 5, 13]}, "value"),
    (SHAPES | {"key": [2, 5, 16]}, "its batch size must be the query's, 3"),
    (SHAPES | {"value": [3, 4, 12]}, "value"),
    (SHAPES | {"key": [3, 6, 16], "value": [3, 6, 12]}, "shares the tables of the query and needs 5 positions"),
    (SHAPES | {"q_norm_weight": [16]}, "q_norm_weight"),
    (SHAPES | {"k_norm_weight": [4, 8]}, "k_norm_weight"),
    (SHAPES | {"k_norm_bias": [1, 8]}, "k_norm_bias"),
    (SHAPES | {"q_norm_bias": []}, "q_norm_bias"),
    (without("cos"), "cos and sin"),
    (without("sin"), "cos and sin"),
    (SHAPES | {"cos": [3, 5, 6]}, "cos"),
    (SHAPES | {"sin": [3, 5, 8]}, "widths must be equal"),
    (SHAPES | {"cos": [3, 1, 4]}, "must be the 5 positions of the new tokens"),
    (SHAPES | {"cos": [2, 5, 4], "sin": [2, 5, 4]}, "cos"),
    (SHAPES | {"cos": [3, 4, 5, 4], "sin": [3, 4, 5, 4]}, "cos"),
    (SHAPES | {"cos": [4], "sin": [4]}, "cos"),
    (SHAPES | {"q_scale": [4, 1, 5]}, "q_scale"),
    (SHAPES | {"q_scale": [1, 3, 4, 5, 8]}, "q_scale"),
    (SHAPES | {"attention_bias": [3, 2, 5, 5]}, "attention_bias"),
    (SHAPES | {"attention_bias": [3, 4, 5, 6]}, "attention_bias"),
    (SHAPES | PAST | {"attention_bias": [3, 4, 5, 5]}, "attention_bias"),
    (SHAPES | {"head_sink": [2]}, "head_sink"),
    (SHAPES | {"head_sink": [4, 1]}, "head_sink"),
    (SHAPES | {"past_key": PAST["past_key"]}, "past_key and past_value"),
    (SHAPES | PAST | {"past_key": [3, 2, 8, 8]}, "past_value"),
    (SHAPES | PAST | {"past_key": [3, 4, 7, 8]}, "past_key"),
    (SHAPES | PAST | {"past_value": [3, 2, 7, 8]}, "past_value"),
    (SHAPES | {"cache_length": [3]}, "cache_length"),
    (SHAPES | PAST | {"cache_length": [1]}, "cache_length"),
    (SHAPES | PAST | {"cache_length": []}, "cache_length"),
    (SHAPES | PAST | {"query_offset": [3]}, "query_offset"),
    (SHAPES | {"query_offset": [2]}, "query_offset"),
]


@pytest.mark.parametrize(("shapes", "named"), WRONG)
def test_a_contradiction_is_refused_by_name(shapes: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError, match=named):
        check_attention_inputs(SPEC, shapes)


def test_the_shapes_of_these_tests_are_right() -> None:
    check_attention_inputs(SPEC, SHAPES | PAST | {"cache_length": [3], "head_sink": [4], "q_scale": [4, 1, 1]})


def test_parameters_without_their_norm_are_refused() -> None:
    bare = dataclasses.replace(SPEC, norm=NormSpec(q_kind="rms"))
    with pytest.raises(SpecError, match="k_norm_weight is given, but there is no norm"):
        check_attention_inputs(bare, SHAPES)


def test_tables_without_a_rotary_are_refused() -> None:
    with pytest.raises(SpecError, match="cos is given, but rotary_order is 'none'"):
        check_attention_inputs(dataclasses.replace(SPEC, rotary=RotarySpec()), SHAPES)


@pytest.mark.parametrize(("axis", "groups", "width"), [("head", 3, 8), ("hidden", 3, 32)])
def test_groups_must_divide_the_row(axis: Any, groups: int, width: int) -> None:
    spec = dataclasses.replace(SPEC, norm=NormSpec(q_kind="rms", k_kind="rms", axis=axis, groups=groups))
    with pytest.raises(SpecError, match=f"norm_groups {groups} does not divide the {width} values"):
        check_attention_inputs(spec, SHAPES)


@pytest.mark.parametrize(
    ("shapes", "named"),
    [
        ({}, "x"),
        ({"x": [2, 16]}, "x"),
        ({"x": [2, 5, 15]}, "x"),
        ({"x": [2, 5, 16], "weight": [4]}, "weight"),
        ({"x": [2, 5, 16], "bias": [8, 2]}, "bias"),
        ({"x": [2, 5, 16], "scale": [3, 1, 8]}, "scale"),
        ({"x": [2, 5, 16], "cos": [5, 4], "sin": [5, 4]}, "cos"),
    ],
)
def test_the_rotary_operator_names_its_input_too(shapes: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError, match=rf"\b{named}\b"):
        check_rotary_inputs(QKNormRotarySpec(num_heads=2, kind="rms"), shapes)


def test_the_reference_refuses_what_the_shapes_refuse() -> None:
    inputs = example_inputs(VARIANTS["qwen3"])
    with pytest.raises(SpecError, match="k_norm_weight"):
        qk_norm_attention(VARIANTS["qwen3"].spec, inputs | {"k_norm_weight": inputs["k_norm_weight"][:-1]})
    with pytest.raises(SpecError, match="weight"):
        qk_norm_rotary(QKNormRotarySpec(num_heads=2), {"x": inputs["key"], "weight": inputs["k_norm_weight"]})
