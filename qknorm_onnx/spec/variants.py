"""VARIANTS: named forms of attention as spec values, each with its source; tests, documentation and golden data follow it.

To add one: an entry in one of the `*_variants.py` files beside this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from qknorm_onnx.spec.article_variants import ARTICLE_VARIANTS
from qknorm_onnx.spec.language_variants import LANGUAGE_VARIANTS
from qknorm_onnx.spec.rotary_first_variants import ROTARY_FIRST_VARIANTS
from qknorm_onnx.spec.variant_inputs import OptionalInput, Variant, example_inputs
from qknorm_onnx.spec.vision_variants import VISION_VARIANTS

__all__ = ["VARIANTS", "OptionalInput", "Variant", "example_inputs"]

VARIANTS: Final[Mapping[str, Variant]] = MappingProxyType(
    {variant.name: variant for variant in (*ARTICLE_VARIANTS, *LANGUAGE_VARIANTS, *ROTARY_FIRST_VARIANTS, *VISION_VARIANTS)}
)
