"""QKNormSpec and its parts: what is refused, with a message that names the field, and what is derived."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qknorm_onnx.spec.qk_norm_spec import (
    AttentionSpec,
    NormSpec,
    QKNormRotarySpec,
    QKNormSpec,
    RotarySpec,
    SpecError,
    round_to_float32,
)


def attention(**fields: Any) -> AttentionSpec:
    return AttentionSpec(**({"q_num_heads": 4, "kv_num_heads": 2, "scale": 0.5} | fields))


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: NormSpec(q_kind="batch"), "q_kind"),  # type: ignore[arg-type]
    (lambda: NormSpec(k_kind="batch"), "k_kind"),  # type: ignore[arg-type]
    (lambda: NormSpec(axis="token"), "axis"),  # type: ignore[arg-type]
    (lambda: NormSpec(epsilon_mode="nowhere"), "epsilon_mode"),  # type: ignore[arg-type]
    (lambda: NormSpec(weight_order="never"), "weight_order"),  # type: ignore[arg-type]
    (lambda: NormSpec(groups=0), "groups"),
    (lambda: NormSpec(q_epsilon=-1e-6), "epsilon"),
    (lambda: NormSpec(k_epsilon=-1e-6), "epsilon"),
    (lambda: NormSpec(q_epsilon=float("nan")), "q_epsilon"),
    (lambda: NormSpec(k_epsilon=float("inf")), "k_epsilon"),
    (lambda: NormSpec(q_kind="l2"), "epsilon_mode 'clamp' or 'outside_sqrt'"),
    (lambda: NormSpec(k_kind="l2"), "epsilon_mode 'clamp' or 'outside_sqrt'"),
    (lambda: RotarySpec(order="sideways"), "order"),  # type: ignore[arg-type]
    (lambda: RotarySpec(order="after_norm", embedding_dim=-2), "embedding_dim"),
    (lambda: RotarySpec(order="after_norm", embedding_dim=3), "embedding_dim"),
    (lambda: RotarySpec(order="after_norm", embedding_dim=6, sections=2), "embedding_dim"),
    (lambda: RotarySpec(order="after_norm", embedding_dim=4, offset=-1), "offset"),
    (lambda: RotarySpec(order="after_norm", offset=2), "offset"),
    (lambda: RotarySpec(order="after_norm", sections=0), "sections"),
    (lambda: attention(q_num_heads=0), "q_num_heads"),
    (lambda: attention(kv_num_heads=0), "kv_num_heads"),
    (lambda: attention(q_num_heads=4, kv_num_heads=3), "q_num_heads 4 is not a multiple of kv_num_heads 3"),
    (lambda: attention(q_num_heads=2, kv_num_heads=4), "kv_num_heads"),
    (lambda: attention(scale=float("nan")), "scale"),
    (lambda: attention(scale=float("inf")), "scale"),
    (lambda: attention(softcap=-1.0), "softcap"),
    (lambda: attention(logit_clamp=-1.0), "logit_clamp"),
    (lambda: attention(left_window_size=-2), "left_window_size"),
    (lambda: attention(right_window_size=-2), "right_window_size"),
    (lambda: attention(softmax_precision="int8"), "softmax_precision"),
    (lambda: QKNormSpec(attention=attention(), rotary=RotarySpec(order="before_norm")), "before_norm"),
    (
        lambda: QKNormSpec(
            attention=attention(), norm=NormSpec(q_kind="rms", axis="hidden"), rotary=RotarySpec(order="before_norm")
        ),
        "before_norm",
    ),
    (lambda: QKNormRotarySpec(num_heads=0), "num_heads"),
    (lambda: QKNormRotarySpec(num_heads=1, kind="l2"), "epsilon_mode"),
    (lambda: QKNormRotarySpec(num_heads=1, epsilon=-1.0), "epsilon"),
    (lambda: QKNormRotarySpec(num_heads=1, groups=0), "groups"),
]


@pytest.mark.parametrize(("make", "named"), REFUSED)
def test_a_contradiction_is_refused_by_name(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(SpecError) as refused:
        make()
    message = str(refused.value)
    assert named in message
    assert " " in message
    assert "\n" not in message


@pytest.mark.parametrize("value", [1e-6, 1e-12, 0.1, 168**-0.5, 1 / 3, 5e-46])
def test_floats_are_the_float32_that_an_attribute_holds(value: float) -> None:
    assert round_to_float32(value) == float(np.float32(value))
    assert NormSpec(q_epsilon=value).q_epsilon == float(np.float32(value))
    assert NormSpec(k_epsilon=value).k_epsilon == float(np.float32(value))
    assert attention(scale=value).scale == float(np.float32(value))
    assert QKNormRotarySpec(num_heads=1, epsilon=value).epsilon == float(np.float32(value))


def test_a_scale_too_large_for_float32_is_refused() -> None:
    with pytest.raises(SpecError, match="scale"):
        attention(scale=1e39)


def test_specs_are_values() -> None:
    first, second = (QKNormSpec(attention=attention(), norm=NormSpec(q_kind="rms", k_kind="rms")) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != dataclasses.replace(first, norm=NormSpec(q_kind="rms"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.attention.scale = 1.0  # type: ignore[misc]


def test_preparations_of_q_and_k_carry_their_own_norm() -> None:
    norm = NormSpec(q_kind="rms", k_kind="layer", q_epsilon=0.25, k_epsilon=0.5, groups=2, weight_order="after_cast")
    rotary = RotarySpec(order="after_norm", embedding_dim=4)
    spec = QKNormSpec(attention=attention(), norm=norm, rotary=rotary)
    common = {"groups": 2, "weight_order": "after_cast", "rotary": rotary}
    assert spec.query_preparation == QKNormRotarySpec(num_heads=4, kind="rms", epsilon=0.25, **common)
    assert spec.key_preparation == QKNormRotarySpec(num_heads=2, kind="layer", epsilon=0.5, **common)


def test_an_un_normed_side_is_rotated_all_the_same() -> None:
    norm = NormSpec(k_kind="l2", epsilon_mode="clamp")
    spec = QKNormSpec(attention=attention(), norm=norm, rotary=RotarySpec(order="before_norm"))
    assert spec.query_preparation.rotary.order == "after_norm"
    assert spec.query_preparation.kind == "none"
    assert spec.key_preparation.rotary.order == "before_norm"


@pytest.mark.parametrize(
    ("q_kind", "k_kind", "expected"), [("none", "none", False), ("rms", "none", True), ("none", "layer", True)]
)
def test_has_norm(q_kind: Any, k_kind: Any, expected: bool) -> None:
    assert QKNormSpec(attention=attention(), norm=NormSpec(q_kind=q_kind, k_kind=k_kind)).has_norm is expected


@pytest.mark.parametrize(
    ("rotary", "head_size", "named"),
    [
        (RotarySpec(order="after_norm"), 7, "7 rotated values"),
        (RotarySpec(order="after_norm", sections=2), 6, "2 section"),
        (RotarySpec(order="after_norm", embedding_dim=8, offset=4), 10, "exceeds the head size 10"),
    ],
)
def test_rotated_values_must_fit_the_head(rotary: RotarySpec, head_size: int, named: str) -> None:
    with pytest.raises(SpecError, match=named):
        rotary.rotated_size(head_size)


def test_rotated_size() -> None:
    assert RotarySpec(order="after_norm").rotated_size(12) == 12
    assert RotarySpec(order="after_norm", embedding_dim=4, offset=8).rotated_size(12) == 4
