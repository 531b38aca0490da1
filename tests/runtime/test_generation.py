"""Greedy generation: with a cache and without one the same tokens come out, and they are PyTorch's."""

from __future__ import annotations

import numpy as np
import pytest

import qknorm_onnx as qk
from qknorm_onnx.runtime.generation import generate

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

PROMPTS = np.array([[0, 84, 104, 105, 115], [0, 73, 102, 32, 116]], dtype=np.int64)
NEW = 12


@pytest.fixture(scope="module")
def folder(request):
    return request.config.rootpath / "examples" / "byte_qwen3"


@pytest.fixture(scope="module")
def expected(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.from_numpy(PROMPTS)
    with torch.no_grad():
        for _ in range(NEW):
            tokens = torch.cat([tokens, model(input_ids=tokens, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return tokens.numpy()


@pytest.mark.parametrize("with_past", [True, False], ids=["cache", "no cache"])
def test_generates_what_pytorch_generates(folder, expected, with_past):
    from qknorm_onnx.torch_export.load import load_source

    source = load_source(str(folder), with_past=with_past)
    program = qk.export(source.module, source.args, source.kwargs, dynamic_shapes=source.dynamic_shapes, require_fusion=True)
    session = qk.create_session(program)
    assert np.array_equal(generate(session, PROMPTS, max_new_tokens=NEW), expected)
    first = generate(session, PROMPTS[:1], max_new_tokens=NEW)
    assert np.array_equal(first, expected[:1])
    assert np.array_equal(generate(session, PROMPTS, max_new_tokens=0), PROMPTS)
