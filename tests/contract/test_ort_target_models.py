"""Target `ort` from PyTorch to numbers: what plain onnxruntime computes, and how many nodes an attention is."""

from __future__ import annotations

import collections
import functools
import json

import numpy as np
import onnxruntime
import pytest
import torch

import qknorm_onnx as qk
from qknorm_onnx.cli.main import run

MODELS = {
    "qwen3": "GroupQueryAttention",
    "h_vit22b_sdpa": "MultiHeadAttention",  # LayerNorm, no rotary, no mask
    "gemma3_text": "GroupQueryAttention",  # windows and full attention in turn
    "olmo2": "GroupQueryAttention",  # norm over the whole projection
    "h_cosine_tau_per_head": "MultiHeadAttention",  # L2 is made of plain operators
}
# What one attention of the second layer adds: the first one also has the tables and lengths that all share.
QWEN3 = {"Reshape": 4, "SimplifiedLayerNormalization": 2, "RotaryEmbedding": 2, "GroupQueryAttention": 1}
VIT = {"Reshape": 4, "LayerNormalization": 2, "MultiHeadAttention": 1}


@pytest.fixture(scope="module")
def exported(zoo):
    @functools.cache
    def make(name):
        module, kwargs, dynamic_shapes, _ = zoo.ZOO[name]()
        program = qk.export(module, kwargs=kwargs, dynamic_shapes=dynamic_shapes, target="ort", require_fusion=True)
        return module, kwargs, program

    return make


@pytest.mark.parametrize("name", MODELS)
def test_models_are_right_in_plain_onnxruntime(exported, name):
    module, kwargs, program = exported(name)
    assert {fused.target for fused in program.report.fused} == {"ort"}
    assert all(fused.note.startswith(MODELS[name]) for fused in program.report.fused)
    counts = collections.Counter(node.op_type for node in program.model.graph)
    assert counts[MODELS[name]] == len(program.report.fused) == 2
    assert counts["Softmax"] == 0 and not program.model.functions
    report = qk.validate(program, module, kwargs=kwargs, dtypes=("float32", "float16", "bfloat16"))
    assert report.passed, report.summary()
    assert {"batch 1", "batch 3"} <= {row.case for row in report.rows}


@pytest.mark.parametrize(("name", "expected"), [("qwen3", QWEN3), ("h_vit22b_sdpa", VIT)])
def test_an_attention_is_few_nodes(exported, name, expected):
    _, _, program = exported(name)
    prefix = f"{program.report.fused[1].name}/"
    of_second = collections.Counter(node.op_type for node in program.model.graph if (node.name or "").startswith(prefix))
    assert dict(of_second) == expected


@pytest.fixture(scope="module")
def tiny_qwen3(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "_norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    folder = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(folder)
    return model, folder


def test_a_growing_cache_of_several_rows_and_several_tokens_a_step(tiny_qwen3, tmp_path, capsys):
    """`qknorm-onnx export --target ort`, then prefill, one token, three tokens, one token, with padding on the left."""
    model, folder = tiny_qwen3
    path = tmp_path / "m.onnx"
    assert run(["export", str(folder), str(path), "--with-past", "--target", "ort", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [item["target"] for item in found["fused"]] == ["ort", "ort"]
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    ids = torch.randint(0, 64, (3, 10), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, 10, dtype=torch.int64)
    mask[1, :2] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits.numpy()
    caches = [value.name for value in session.get_inputs() if value.name.startswith("past")]
    past = dict.fromkeys(caches, np.zeros((3, 2, 0, 16), dtype=np.float32))
    start = 0
    for length in (5, 1, 3, 1):
        step = slice(start, start + length)
        given = {"input_ids": ids[:, step], "attention_mask": mask[:, : step.stop], "position_ids": positions[:, step]}
        outputs = session.run(None, {name: value.numpy() for name, value in given.items()} | past)
        past = dict(zip(caches, outputs[1:], strict=True))
        seen = mask[:, step].bool().numpy()
        assert np.abs(outputs[0] - expected[:, step])[seen].max() < 2e-5 * np.abs(expected).max()
        start += length
    assert next(iter(past.values())).shape == (3, 2, 10, 16)


def test_fuse_from_the_command_line(tiny_qwen3, tmp_path, capsys):
    _, folder = tiny_qwen3
    path, out = tmp_path / "m.onnx", tmp_path / "ort.onnx"
    assert run(["export", str(folder), str(path), "--json"]) == 0
    capsys.readouterr()
    assert run(["fuse", str(path), str(out), "--target", "ort", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [item["target"] for item in found["fused"]] == ["ort", "ort"]
    assert all(item["note"].startswith("GroupQueryAttention") for item in found["fused"])
    assert onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"]).get_inputs()
