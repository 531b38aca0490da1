"""Which spec fields a builder of graphs understands: what it does not know it must refuse, never ignore."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from qknorm_onnx.spec.attributes import Spec, attribute_fields, to_attributes

KnownFields = Mapping[str, frozenset[str] | None]  # ONNX attribute name -> its values that are understood, None for all

BODY_FIELDS: Final[KnownFields] = {
    "q_num_heads": None,
    "kv_num_heads": None,
    "num_heads": None,
    "scale": None,
    "softcap": None,
    "logit_clamp": None,
    "is_causal": None,
    "left_window_size": None,
    "right_window_size": None,
    "softmax_precision": frozenset({"float32", "float64", "float16", "bfloat16"}),
    "q_norm": frozenset({"none", "rms", "layer", "l2"}),
    "k_norm": frozenset({"none", "rms", "layer", "l2"}),
    "norm": frozenset({"none", "rms", "layer", "l2"}),
    "norm_axis": frozenset({"head", "hidden"}),
    "norm_groups": None,
    "q_epsilon": None,
    "k_epsilon": None,
    "epsilon": None,
    "epsilon_mode": frozenset({"inside_sqrt", "clamp", "outside_sqrt"}),
    "norm_weight_order": frozenset({"before_cast", "after_cast"}),
    "rotary_order": frozenset({"none", "after_norm", "before_norm"}),
    "rotary_interleaved": None,
    "rotary_embedding_dim": None,
    "rotary_offset": None,
    "rotary_sections": None,
}


def unknown_fields(spec: Spec, known: KnownFields) -> tuple[str, ...]:
    """The fields of `spec`, as `name=value`, that `known` does not cover. An unknown field at its default says nothing."""
    values = to_attributes(spec)
    found = []
    for field in attribute_fields(type(spec)):
        value = values[field.onnx_name]
        allowed = known.get(field.onnx_name)
        says_nothing = not field.required and value == field.default
        if (field.onnx_name not in known and not says_nothing) or (allowed is not None and value not in allowed):
            found.append(f"{field.onnx_name}={value!r}")
    return tuple(found)
