"""Which spec fields a builder of graphs understands: what it does not know it must refuse, never ignore.

Names only, and by hand on purpose: a list made from the spec would know a new field before its builder does. That a
builder knows every value of a field is what its `match` statements say to mypy.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

from qknorm_onnx.spec.attributes import Spec, attribute_fields, to_attributes

KnownFields = Set[str]  # ONNX attribute names

BODY_FIELDS: Final[KnownFields] = frozenset(
    {
        "q_num_heads",
        "kv_num_heads",
        "num_heads",
        "scale",
        "softcap",
        "logit_clamp",
        "is_causal",
        "left_window_size",
        "right_window_size",
        "softmax_precision",
        "q_norm",
        "k_norm",
        "norm",
        "norm_axis",
        "norm_groups",
        "q_epsilon",
        "k_epsilon",
        "epsilon",
        "epsilon_mode",
        "norm_weight_order",
        "rotary_order",
        "rotary_interleaved",
        "rotary_embedding_dim",
        "rotary_offset",
        "rotary_sections",
    }
)


def unknown_fields(spec: Spec, known: KnownFields) -> tuple[str, ...]:
    """The fields of `spec`, as `name=value`, that `known` does not cover. An unknown field at its default says nothing."""
    values = to_attributes(spec)
    return tuple(
        f"{field.onnx_name}={values[field.onnx_name]!r}"
        for field in attribute_fields(type(spec))
        if field.onnx_name not in known and (field.required or values[field.onnx_name] != field.default)
    )
