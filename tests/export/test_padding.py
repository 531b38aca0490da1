"""B19: a batch with padding on the left or right computes for each row what the row alone computes, and is finite everywhere."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

import qknorm_onnx as qk

TEXTS = [b"This", b"The file"]


def padded(*, left):
    """Token ids, attention mask and positions of the texts, as a tokenizer would make them."""
    width = max(map(len, TEXTS))
    ids, mask = np.zeros((2, width), dtype=np.int64), np.zeros((2, width), dtype=np.int64)
    for row, text in enumerate(TEXTS):
        place = slice(width - len(text), None) if left else slice(0, len(text))
        ids[row, place], mask[row, place] = list(text), 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": np.clip(mask.cumsum(-1) - 1, 0, None)}


@pytest.fixture(scope="module")
def model(repo_root):
    transformers = pytest.importorskip("transformers")

    @functools.cache
    def load(attention):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(repo_root / "examples" / "byte_qwen3", dtype=torch.float32)
        loaded.set_attn_implementation(attention)
        return loaded.eval()

    return load


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padded_rows_compute_what_they_compute_alone(model, attention):
    module = model(attention)
    example = {name: torch.from_numpy(value) for name, value in padded(left=True).items()}
    shapes = {name: {0: "batch", 1: "sequence"} for name in example}
    program = qk.export(module, kwargs=example, dynamic_shapes=shapes, require_fusion=True)
    session = qk.create_session(program)
    for left in (True, False):
        feeds = padded(left=left)
        (logits,) = session.run(None, feeds)
        assert np.isfinite(logits).all()
        for row, text in enumerate(TEXTS):
            with torch.no_grad():
                alone = module(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0].numpy()
            found = logits[row, feeds["attention_mask"][row] == 1]
            assert np.abs(found - alone).max() < 1e-4 * np.abs(alone).max()
    report = qk.validate(program, module, kwargs=example)
    assert report.passed, report.summary()
