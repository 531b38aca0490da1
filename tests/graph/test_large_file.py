"""Time and memory of `fuse` on a TorchScript file of 28 layers below 1 GiB without stored shapes; weights inside or beside."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from tests.foreign.foreign_models import Foreign, Only, randomise, tokens, torchscript
from tests.graph.test_large_model import FUSE

LAYERS = 28
MOST_SECONDS = 30.0
MOST_MEMORY_BY_WEIGHTS = 1.3


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """0.9 GB of random weights, at opset 17, which is raised first."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4000, hidden_size=1024, intermediate_size=1536, num_hidden_layers=LAYERS, num_attention_heads=16,
        num_key_value_heads=4, head_dim=64,
    )  # fmt: skip
    module = Only(Qwen3ForCausalLM(config).eval())
    randomise(module)
    path = tmp_path_factory.mktemp("large") / "model.onnx"
    onnx.save(torchscript(Foreign(module, tokens(2, 6), tokens(3, 9), LAYERS), 17), path)
    assert 0.8e9 < path.stat().st_size < 1 << 30
    return path


def weights_beside(path: Path) -> Path:
    """The same file with its weights in another one."""
    result = path.with_name("beside.onnx")
    onnx.save(onnx.load(path), result, save_as_external_data=True, location="beside.data")
    return result


@pytest.fixture(scope="module", params=[False, True], ids=["weights inside", "weights beside it"])
def measured(request: pytest.FixtureRequest, file: Path) -> dict[str, Any]:
    """What `fuse` and `save` took of time and memory."""
    source = weights_beside(file) if request.param else file
    command = [sys.executable, "-c", textwrap.dedent(FUSE), str(source), str(file.with_name("fused.onnx"))]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    return found | {"weights": file.stat().st_size}


@pytest.mark.slow
def test_time_of_a_file_without_shapes(measured: dict[str, Any]) -> None:
    assert measured["notes"] == [""] * LAYERS
    assert measured["seconds"] < MOST_SECONDS, measured


@pytest.mark.slow
def test_memory_of_a_file_without_shapes(measured: dict[str, Any]) -> None:
    assert measured["peak"] < MOST_MEMORY_BY_WEIGHTS * measured["weights"], measured
