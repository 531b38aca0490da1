"""Files with several function bodies in runtimes that know functions by name only, and what docs/runtimes.md says."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from qknorm_onnx.spec.targets import TARGET_NAMES
from tools.runtimes import table
from tools.runtimes.environments import ROOT, RUNNERS, RUNTIMES, Runtime, make
from tools.runtimes.measure import judged, tried
from tools.runtimes.model_files import write_model
from tools.runtimes.trial import MODELS, ModelFile, encoded

SEVERAL_BODIES = ("Gemma 3", "Swin v2")
BY_NAME = {runtime.name: runtime for runtime in RUNTIMES}


class Here(Runtime):
    """A runtime of this environment."""

    def command(self, folder, arguments):
        return [sys.executable, str(RUNNERS / self.runner), str(folder.resolve()), "-", *arguments], ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("files")
    for model in SEVERAL_BODIES:
        needs = write_model(place, model, "float32", targets=("custom-op",))
        assert "QKNormAttention, QKNormAttention_2" in needs["custom-op"]
    return place


def files():
    return [ModelFile(model=model, target="custom-op", dtype="float32") for model in SEVERAL_BODIES]


def assert_right(runtime, folder):
    cells = tried(runtime, folder, files())
    assert {name: cell for name, cell in cells.items() if cell.verdict != "ok"} == {}
    assert len(cells) == len(SEVERAL_BODIES)


def test_onnxruntime_1_24_without_the_library(folder):
    make(BY_NAME["onnxruntime 1.24"])
    assert_right(BY_NAME["onnxruntime 1.24"], folder)


def test_the_reference_evaluator(folder):
    assert_right(Here(name="ReferenceEvaluator", pins="onnx.txt", runner="reference_runner.py"), folder)


def test_onnxruntime_of_this_environment(folder):
    assert_right(Here(name="onnxruntime", pins="-", runner="onnxruntime_runner.py"), folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["onnxruntime 1.24 with the library", "onnxruntime 1.27", "onnxruntime-web 1.30"])
def test_other_runtimes_with_functions(folder, name):
    make(BY_NAME[name])
    assert_right(BY_NAME[name], folder)


def row(*values):
    return encoded(np.array(values))


def test_other_numbers_are_found():
    case = {"outputs": [{"exact": row(1.0, 2.0), "allowed": 1e-6}]}
    assert judged([[row(1.0, 2.0)]], [case]).verdict == "ok"
    for other in (row(1.0, 2.1), row(1.0, float("nan")), row(1.0, 2.0, 3.0)):
        assert judged([[other]], [case]).verdict == "wrong"


def test_the_table_has_no_wrong_cell_and_says_what_to_use_instead():
    assert table.unlike() == []
    shown = {file.model for target in TARGET_NAMES for file, _ in table.rows(target)}
    assert shown == set(MODELS)
    for target in TARGET_NAMES:
        for file, cells in table.rows(target):
            assert set(cells) == set(BY_NAME)
            for runtime, cell in cells.items():
                if cell.verdict != "ok":
                    advice = table.instead(file, runtime, cell)
                    assert "another runtime" not in advice and "[" not in table.why(file, runtime, cell), (file.path, runtime)
