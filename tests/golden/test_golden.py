"""The meaning of every variant as it was when it was written down: inputs and outputs are read from the committed file."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from qknorm_onnx.spec.attributes import from_attributes
from qknorm_onnx.spec.qk_norm_spec import QKNormSpec
from qknorm_onnx.spec.reference import qk_norm_attention
from qknorm_onnx.spec.variants import VARIANTS


@pytest.fixture(scope="module")
def golden() -> Iterator[Any]:
    with np.load(pathlib.Path(__file__).with_name("variants.npz")) as arrays:
        yield arrays


def test_every_variant_is_written_down(golden: Any) -> None:
    written = {name.split("/")[0] for name in golden.files}
    assert written == set(VARIANTS), f"{written ^ set(VARIANTS)}: run python tests/golden/write_golden.py"


@pytest.mark.parametrize("name", VARIANTS)
def test_the_meaning_has_not_changed(golden: Any, name: str) -> None:
    assert f"{name}/attributes" in golden.files, f"{name} is not written down yet: run python tests/golden/write_golden.py"
    spec = from_attributes(QKNormSpec, json.loads(str(golden[f"{name}/attributes"])))
    meant = "its meaning has changed: if that is meant, run python tests/golden/write_golden.py and say why in CHANGELOG.md"
    assert spec == VARIANTS[name].spec, meant
    inputs = {key.rsplit("/", 1)[1]: golden[key] for key in golden.files if key.startswith(f"{name}/in/")}
    assert set(VARIANTS[name].input_names) <= set(inputs)
    outputs = qk_norm_attention(spec, inputs)
    for key, value in outputs.items():
        expected = golden[f"{name}/out/{key}"]
        assert np.max(np.abs(value - expected)) <= 1e-13 * np.max(np.abs(expected)), f"{key}: {meant}"
