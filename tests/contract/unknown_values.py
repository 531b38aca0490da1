"""Specs with a value that nobody knows, put past the constructors: what every consumer must refuse."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any, Final, TypeVar, get_args

from qknorm_onnx.spec import qk_norm_spec
from qknorm_onnx.spec.attributes import attribute_fields
from qknorm_onnx.spec.cpp_header import choices_of
from qknorm_onnx.spec.qk_norm_spec import NormSpec, QKNormRotarySpec, QKNormSpec, RotarySpec
from tests.contract.spec_cases import Case, case, norm_gains, tables

UNKNOWN: Final = "unheard_of"
Spec = TypeVar("Spec", QKNormSpec, QKNormRotarySpec)

# Each enumerated attribute of QKNormAttention, with the type that names its values.
CHOICES: Final = {
    "softmax_precision": "SoftmaxPrecision",
    "q_norm": "NormKind",
    "k_norm": "NormKind",
    "norm_axis": "NormAxis",
    "epsilon_mode": "EpsilonMode",
    "norm_weight_order": "NormWeightOrder",
    "rotary_order": "RotaryOrder",
}
assert set(CHOICES) == {f.onnx_name for f in attribute_fields(QKNormSpec) if choices_of(QKNormSpec, f)}, "name the new field here"


def known_case() -> Case:
    """A case in which every enumerated field has a meaning."""
    norm = NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-5)
    inputs = (*norm_gains(), *tables("(S, R/2)"))
    return case("odd", norm=norm, rotary=RotarySpec(order="after_norm"), inputs=inputs, is_causal=True, sizes={"length": 3})


def injected(spec: Spec, attribute: str, value: Any = UNKNOWN) -> Spec:
    """`spec` with another value of one attribute, whatever its constructors think of it."""
    (field,) = (found for found in attribute_fields(type(spec)) if found.onnx_name == attribute)
    return _with(spec, field.path, value)


def _with(part: Any, path: tuple[str, ...], value: Any) -> Any:
    changed = copy.copy(part)
    object.__setattr__(changed, path[0], _with(getattr(part, path[0]), path[1:], value) if path[1:] else value)
    return changed


def odd_case(attribute: str) -> Case:
    """`known_case` with an unknown value of `attribute`."""
    known = known_case()
    return dataclasses.replace(known, spec=injected(known.spec, attribute))


def types_with_one_value_more(text: str, name: str) -> str:
    """The source of `qk_norm_spec.py` in which the enumerated type `name` has the value `UNKNOWN`, too."""
    values = get_args(getattr(qk_norm_spec, name))
    old = name + " = Literal[" + ", ".join(f'"{value}"' for value in values) + "]"
    assert text.count(old) == 1, f"{old} is not in the spec"
    return text.replace(old, f'{old[:-1]}, "{UNKNOWN}"]')


def integers_outside(attribute: str) -> Iterator[int]:
    """Numbers that are no enumerator of the attribute's C++ enumeration."""
    count = len(get_args(getattr(qk_norm_spec, CHOICES[attribute])))
    yield from (count, -1, 1 << 33, -(1 << 63))
