"""Long texts: 200 tokens of 10 prompts, and half precision up to near-ties."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

import qknorm_onnx as qk
from tests.serving.reference import reference
from tests.serving.tiny_models import FAMILIES

PROMPTS = tuple(f"{start} {'and so on ' * count}" for count, start in enumerate(("One", "Two", "x = [", "Who?", "…")))
PROMPTS += tuple(prompt * 2 for prompt in PROMPTS)
NEW = 200
ENDS = (255,)  # a random model would end too soon


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("runtime", ["auto", "onnxruntime"])
def test_200_tokens_of_10_prompts_are_transformers(exported, without_ends, family, runtime):
    made = exported(family)
    assert len(PROMPTS) == 10 and len(set(map(len, PROMPTS))) > 5
    expected = reference(made.model, PROMPTS, NEW, ends=ENDS)
    result = qk.generate(without_ends(made.folder), PROMPTS, max_new_tokens=NEW, runtime=runtime)
    assert list(result.tokens) == expected
    assert max(map(len, result.tokens)) == NEW


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["genai", "onnxruntime"])
def test_half_precision_is_transformers_up_to_near_ties(exported, without_ends, runtime):
    """Where a token is another one, its logit is as near to the largest as PyTorch's own error in that type."""
    made = exported("qwen3", dtype=torch.float16)
    model = made.model.half().float()
    folder, differ = without_ends(made.folder), 0
    for prompt in PROMPTS:
        (tokens,) = qk.generate(folder, prompt, max_new_tokens=40, runtime=runtime).tokens
        ids = torch.tensor([[*prompt.encode(), *tokens]])
        start = len(prompt.encode()) - 1
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, start:-1].numpy()
            half = model.half()(input_ids=ids).logits[0, start:-1].float().numpy()
            model.float()
        error = 2 * np.abs(half - logits).max() + 4 * np.finfo(np.float16).eps * np.abs(logits).max()
        chosen = logits[np.arange(len(tokens)), list(tokens)]
        assert (logits.max(axis=-1) - chosen <= 2 * error).all(), "each token is the likeliest, or nearly"
        differ += int((logits.argmax(-1) != np.array(tokens)).sum())
    assert differ <= 0.05 * 40 * len(PROMPTS)


@pytest.fixture
def without_ends(tmp_path):
    """A copy of a folder whose only end token is one that these texts do not have."""

    def copied(folder):
        copy = shutil.copytree(folder, tmp_path / "without ends")
        config = json.loads((copy / "genai_config.json").read_text())
        config["model"]["eos_token_id"] = list(ENDS)
        (copy / "genai_config.json").write_text(json.dumps(config))
        return copy

    return copied
