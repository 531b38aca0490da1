"""Decoders whose folders onnxruntime-genai loads and continues untouched, most of them unknown to its own builder."""

from __future__ import annotations

import json

import pytest

import qknorm_onnx as qk
from tests.serving.reference import ENDS, reference
from tests.serving.tiny_models import FAMILIES

og = pytest.importorskip("onnxruntime_genai")

PROMPTS = ("Hello there, friend", "a", "The quick brown fox jumps over", "Grüße aus Köln")
NEW = 40
FAST = {"qwen3"}
families = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in FAMILIES]
)


@families
def test_genai_generates_from_the_folder_untouched(exported, family, tmp_path, monkeypatch):
    """As its documentation shows it, from another working directory, with nothing of ours imported on the way."""
    made = exported(family)
    monkeypatch.chdir(tmp_path)
    model = og.Model(str(made.folder))
    tokenizer = og.Tokenizer(model)
    for prompt in PROMPTS:
        params = og.GeneratorParams(model)
        ids = tokenizer.encode(prompt)
        params.set_search_options(max_length=len(ids) + NEW)
        generator = og.Generator(model, params)
        generator.append_tokens(ids)
        new = []
        while not generator.is_done():
            generator.generate_next_token()
            new.append(int(generator.get_next_tokens()[0]))
        assert tuple(new) == reference(made.model, [prompt], NEW)[0]


@families
@pytest.mark.parametrize("runtime", ["auto", "onnxruntime"])
def test_prompts_of_unequal_lengths_are_transformers(exported, family, runtime):
    made = exported(family)
    result = qk.generate(made.folder, PROMPTS, max_new_tokens=NEW, runtime=runtime)
    assert list(result.tokens) == reference(made.model, PROMPTS, NEW)
    has_windows = family in ("gemma3", "cohere2", "exaone4", "llama4")
    assert result.runtime == ("onnxruntime" if has_windows or runtime == "onnxruntime" else "genai")
    assert result.finished == tuple("end" if tokens[-1] in ENDS else "length" for tokens in result.tokens)


@families
def test_the_kernel_library_runs_where_there_is_qk_norm(exported, family):
    made = exported(family)
    config = json.loads((made.folder / "genai_config.json").read_text())
    named = config["model"]["decoder"]["session_options"].get("custom_ops_library")
    assert named == (None if family == "cohere2" else qk.library_path().name)
    if named is not None:
        assert (made.folder / named).read_bytes() == qk.library_path().read_bytes()


def test_a_folder_with_all_logits_says_the_same(exported):
    made = exported("qwen3", logits="all")
    session = qk.create_session(made.folder / "model.onnx")
    assert {value.name: value.shape for value in session.get_outputs()}["logits"] == ["batch", "sequence", 256]
    for runtime in ("genai", "onnxruntime"):
        result = qk.generate(made.folder, PROMPTS, max_new_tokens=NEW, runtime=runtime)
        assert list(result.tokens) == reference(made.model, PROMPTS, NEW)
