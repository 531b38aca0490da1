"""A model of Qwen3-0.6B's shape, 2.4 GB of random float32 weights: time and memory of `fuse`, proofs and file included."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import onnx_ir as ir
import pytest
import torch

from tests.graph.zoo_export import export

LAYERS = 28
MOST_SECONDS = 20.0
MOST_MEMORY_BY_WEIGHTS = 1.3

FUSE = """
    import json, pathlib, resource, sys
    import qknorm_onnx

    program = qknorm_onnx.fuse(sys.argv[1])
    program.save(sys.argv[2])
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = used.ru_utime + used.ru_stime  # of the processor: it may be shared
    # Not ru_maxrss, which starts from the size of the process that started this one.
    status = pathlib.Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
    print(json.dumps({"seconds": seconds, "peak": peak, "notes": [item.note for item in program.report.fused]}))
"""


@pytest.mark.slow
def test_fuse_of_a_large_model(tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=LAYERS, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    module = Qwen3ForCausalLM(config).eval()
    ids = torch.randint(0, 1000, (2, 8))
    model = export(module, {"input_ids": ids}, {"input_ids": {0: "batch", 1: "seq"}}, opset=20)
    ir.save(model, tmp_path / "model.onnx", external_data="model.onnx.data")
    weights = (tmp_path / "model.onnx.data").stat().st_size
    assert weights > 2.3e9

    command = [sys.executable, "-c", textwrap.dedent(FUSE), str(tmp_path / "model.onnx"), str(tmp_path / "fused.onnx")]
    measured = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert measured["notes"] == [""] * LAYERS
    assert measured["peak"] < MOST_MEMORY_BY_WEIGHTS * weights, measured
    assert measured["seconds"] < MOST_SECONDS, measured
