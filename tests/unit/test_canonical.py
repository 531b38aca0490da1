"""The normal form: one value per meaning, and unequal meanings stay unequal."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from qknorm_onnx.spec.canonical import canonical
from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormSpec, RotarySpec
from qknorm_onnx.spec.reference import qk_norm_attention
from qknorm_onnx.spec.variants import VARIANTS, Variant, example_inputs


def spec(**parts: Any) -> QKNormSpec:
    return QKNormSpec(**({"attention": AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=0.5)} | parts))


def attention(**fields: Any) -> QKNormSpec:
    return spec(attention=AttentionSpec(**({"q_num_heads": 4, "kv_num_heads": 2, "scale": 0.5} | fields)))


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_the_normal_form_computes_the_same_and_is_its_own(variant: Variant) -> None:
    normal = canonical(variant.spec)
    assert canonical(normal) == normal
    inputs = example_inputs(variant, batch=2, length=6, dtype=np.float64)
    given, again = (qk_norm_attention(each, inputs)["Y"] for each in (variant.spec, normal))
    assert np.max(np.abs(given - again), initial=0) <= 1e-5 * np.max(np.abs(given), initial=0)


def test_different_variants_stay_different() -> None:
    names_of: dict[QKNormSpec, list[str]] = {}
    for variant in VARIANTS.values():
        names_of.setdefault(canonical(variant.spec, dtype="float16"), []).append(variant.name)
    for names in names_of.values():  # variants with one spec take other inputs: another shape of tau, no gain
        assert len({VARIANTS[name].inputs for name in names}) == len(names), names


EQUAL = [
    (attention(is_causal=True), attention(right_window_size=0)),
    (attention(is_causal=True), attention(is_causal=True, right_window_size=5)),
    (attention(softmax_precision="float64"), attention()),
    (spec(norm=NormSpec(axis="hidden", q_epsilon=1.0, groups=2, epsilon_mode="clamp")), spec()),
    (spec(rotary=RotarySpec(interleaved=True, embedding_dim=4, offset=2)), spec()),
    (spec(norm=NormSpec(q_kind="rms", k_epsilon=1.0)), spec(norm=NormSpec(q_kind="rms"))),
    (spec(norm=NormSpec(q_kind="rms", weight_order="after_cast")), spec(norm=NormSpec(q_kind="rms"))),
    (attention(scale=1 / math.sqrt(128)), attention(scale=float(np.float32(128**-0.25)) ** 2)),
    (attention(scale=math.sqrt(96)), attention(scale=math.sqrt(96) * (1 + 3e-7))),
    (spec(norm=NormSpec(q_kind="rms", q_epsilon=1e-6)), spec(norm=NormSpec(q_kind="rms", q_epsilon=1.0000001e-6))),
]


@pytest.mark.parametrize(("first", "second"), EQUAL)
def test_two_spellings_of_one_meaning(first: QKNormSpec, second: QKNormSpec) -> None:
    assert canonical(first) == canonical(second)


def test_one_head_has_no_hidden_axis_of_its_own() -> None:
    one_head = AttentionSpec(q_num_heads=1, kv_num_heads=1, scale=0.5)
    hidden, head = (
        spec(attention=one_head, norm=NormSpec(q_kind="rms", k_kind="rms", axis=axis))
        for axis in ("hidden", "head")  # type: ignore[arg-type]
    )
    assert canonical(hidden) == canonical(head)


UNEQUAL = [
    (attention(is_causal=True), attention()),
    (attention(left_window_size=3), attention()),
    (attention(left_window_size=3), attention(left_window_size=4)),
    (attention(softcap=50.0), attention(softcap=49.9)),
    (attention(logit_clamp=1.0), attention()),
    (attention(scale=128**-0.5), attention(scale=127**-0.5)),
    (attention(scale=0.5), attention(scale=-0.5)),
    (spec(norm=NormSpec(q_kind="rms")), spec(norm=NormSpec(k_kind="rms"))),
    (spec(norm=NormSpec(q_kind="rms")), spec(norm=NormSpec(q_kind="layer"))),
    (spec(norm=NormSpec(q_kind="rms", q_epsilon=1e-6)), spec(norm=NormSpec(q_kind="rms", q_epsilon=1e-5))),
    (spec(norm=NormSpec(q_kind="rms", axis="hidden")), spec(norm=NormSpec(q_kind="rms"))),
    (spec(norm=NormSpec(q_kind="rms", groups=2)), spec(norm=NormSpec(q_kind="rms"))),
    (spec(norm=NormSpec(q_kind="rms", epsilon_mode="clamp")), spec(norm=NormSpec(q_kind="rms"))),
    (spec(rotary=RotarySpec(order="after_norm")), spec()),
    (spec(rotary=RotarySpec(order="after_norm", interleaved=True)), spec(rotary=RotarySpec(order="after_norm"))),
    (spec(rotary=RotarySpec(order="after_norm", sections=2)), spec(rotary=RotarySpec(order="after_norm"))),
]


@pytest.mark.parametrize(("first", "second"), UNEQUAL)
def test_two_meanings_stay_two(first: QKNormSpec, second: QKNormSpec) -> None:
    assert canonical(first) != canonical(second)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_types_show_where_they_round(dtype: Any) -> None:
    late = spec(norm=NormSpec(q_kind="rms", weight_order="after_cast"))
    assert canonical(late, dtype=dtype) != canonical(spec(norm=NormSpec(q_kind="rms")), dtype=dtype)
    assert canonical(attention(softmax_precision="float16"), dtype=dtype) != canonical(attention(), dtype=dtype)


@pytest.mark.parametrize("head_size", [*range(1, 300), 320, 384, 512])
def test_scales_that_came_through_float32_square_roots_meet(head_size: int) -> None:
    direct = attention(scale=head_size**-0.5)
    root = np.float32(np.sqrt(np.float32(head_size**-0.5)))
    split = attention(scale=float(root * root))
    divided = attention(scale=float(np.float32(1) / np.sqrt(np.float32(head_size))))
    assert canonical(direct) == canonical(split) == canonical(divided)
