"""Time and memory of `fuse` on a TorchScript file of 28 layers below 1 GiB without stored shapes; weights inside or beside."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

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


@pytest.mark.slow
@pytest.mark.parametrize("beside", [False, True], ids=["weights inside", "weights beside it"])
def test_fuse_of_a_file_without_shapes(file: Path, tmp_path: Path, beside: bool) -> None:
    source = weights_beside(file) if beside else file
    size = file.stat().st_size
    command = [sys.executable, "-c", textwrap.dedent(FUSE), str(source), str(tmp_path / "fused.onnx")]
    measured = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert measured["notes"] == [""] * LAYERS
    assert measured["peak"] < MOST_MEMORY_BY_WEIGHTS * size, measured | {"weights": size}
    assert measured["seconds"] < MOST_SECONDS, measured
