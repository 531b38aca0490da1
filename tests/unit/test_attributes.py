"""Attributes of a node: complete, named as documented, and refused where they are not ours."""

from __future__ import annotations

from typing import Any

import pytest

from qknorm_onnx.spec.attributes import attribute_fields, from_attributes, to_attributes
from qknorm_onnx.spec.qk_norm_spec import QKNormRotarySpec, QKNormSpec, SpecError
from qknorm_onnx.spec.variants import VARIANTS

QWEN3 = to_attributes(VARIANTS["qwen3"].spec)


def test_every_attribute_of_the_operator_is_written() -> None:
    assert set(QWEN3) == {
        "q_num_heads", "kv_num_heads", "scale", "softcap", "logit_clamp", "is_causal", "left_window_size",
        "right_window_size", "softmax_precision", "q_norm", "k_norm", "norm_axis", "norm_groups", "q_epsilon", "k_epsilon",
        "epsilon_mode", "norm_weight_order", "rotary_order", "rotary_interleaved", "rotary_embedding_dim", "rotary_offset",
        "rotary_sections",
    }  # fmt: skip


def test_values_have_onnx_types() -> None:
    assert QWEN3["is_causal"] == 1
    assert type(QWEN3["is_causal"]) is int
    assert type(QWEN3["scale"]) is float
    assert QWEN3["norm_weight_order"] == "after_cast"


def test_names_are_unique_and_documented() -> None:
    for spec_type in (QKNormSpec, QKNormRotarySpec):
        fields = attribute_fields(spec_type)
        assert len({field.onnx_name for field in fields}) == len(fields)
        assert all(field.doc for field in fields)


def test_only_sizes_and_scale_are_required() -> None:
    assert [f.onnx_name for f in attribute_fields(QKNormSpec) if f.required] == ["q_num_heads", "kv_num_heads", "scale"]
    assert [f.onnx_name for f in attribute_fields(QKNormRotarySpec) if f.required] == ["num_heads"]
    spec = from_attributes(QKNormSpec, {"q_num_heads": 2, "kv_num_heads": 1, "scale": 0.5})
    assert to_attributes(spec)["epsilon_mode"] == "inside_sqrt"


def test_strings_may_come_as_bytes_and_floats_as_ints() -> None:
    as_read: dict[str, Any] = {name: v.encode() if isinstance(v, str) else v for name, v in QWEN3.items()} | {"softcap": 0}
    assert from_attributes(QKNormSpec, as_read) == VARIANTS["qwen3"].spec


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"qk_norm": "rms"}, "qk_norm"),
        ({"scale": "large"}, "scale"),
        ({"q_num_heads": 2.0}, "q_num_heads"),
        ({"is_causal": 2}, "is_causal"),
        ({"q_norm": "batch"}, "q_kind"),
        ({"q_norm": 1}, "q_norm"),
        ({"softcap": -1.0}, "softcap"),
    ],
)
def test_a_wrong_attribute_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError, match=named):
        from_attributes(QKNormSpec, QWEN3 | change)


@pytest.mark.parametrize("missing", ["q_num_heads", "kv_num_heads", "scale"])
def test_a_missing_attribute_is_named(missing: str) -> None:
    with pytest.raises(SpecError, match=missing):
        from_attributes(QKNormSpec, {name: value for name, value in QWEN3.items() if name != missing})
