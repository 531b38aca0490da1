"""Writes variants.npz: for every variant its attributes, small random inputs, and the reference's outputs in float64.

    python tests/golden/write_golden.py

A change of that file is a change of meaning: it needs a reason in the changelog.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any, Final

import numpy as np

from qknorm_onnx.spec.attributes import to_attributes
from qknorm_onnx.spec.reference import qk_norm_attention
from qknorm_onnx.spec.variants import VARIANTS, Variant, example_inputs

GOLDEN_PATH: Final = pathlib.Path(__file__).with_name("variants.npz")
SIZES: Final = {"batch": 2, "length": 3, "past_length": 2, "value_size": 3, "seed": 2024}


def golden_arrays(variant: Variant) -> dict[str, Any]:
    """The arrays of one variant, by `variant/attributes`, `variant/in/NAME` and `variant/out/NAME`."""
    inputs = example_inputs(variant, **SIZES)
    outputs = qk_norm_attention(variant.spec, inputs)
    arrays: dict[str, Any] = {f"{variant.name}/attributes": np.array(json.dumps(to_attributes(variant.spec), sort_keys=True))}
    arrays |= {f"{variant.name}/in/{name}": value for name, value in inputs.items()}
    return arrays | {f"{variant.name}/out/{name}": value for name, value in outputs.items()}


def main() -> None:
    """Write the file."""
    arrays = [golden_arrays(variant) for variant in VARIANTS.values()]
    np.savez_compressed(GOLDEN_PATH, **{name: value for of_one in arrays for name, value in of_one.items()})


if __name__ == "__main__":
    main()
