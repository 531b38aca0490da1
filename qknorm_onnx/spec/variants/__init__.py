"""VARIANTS: named forms of attention as spec values, each with its source; tests, documentation and golden data follow it.

To add one: an entry in one of the files beside this one, then `python tests/golden/write_golden.py` and
`python -m tools.generate_docs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from qknorm_onnx.spec.variants.article import ARTICLE_VARIANTS
from qknorm_onnx.spec.variants.language import LANGUAGE_VARIANTS
from qknorm_onnx.spec.variants.rotary_first import ROTARY_FIRST_VARIANTS
from qknorm_onnx.spec.variants.variant import OptionalInput, Variant, example_inputs
from qknorm_onnx.spec.variants.vision import VISION_VARIANTS

__all__ = ["VARIANTS", "OptionalInput", "Variant", "example_inputs"]

VARIANTS: Final[Mapping[str, Variant]] = MappingProxyType(
    {variant.name: variant for variant in (*ARTICLE_VARIANTS, *LANGUAGE_VARIANTS, *ROTARY_FIRST_VARIANTS, *VISION_VARIANTS)}
)
