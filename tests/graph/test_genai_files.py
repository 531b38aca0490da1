"""Files that onnxruntime-genai's builder writes, float32 and 4 bits for the CPU, float16 for CUDA: the same numbers, fused."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import onnx_ir as ir
import pytest
import tokenizers
import torch
import transformers

import qknorm_onnx as qk
from qknorm_onnx.errors import InputError
from qknorm_onnx.runtime.generation import generate
from tests.graph.zoo_export import fused, run

HEADS, KV_HEADS, HEAD_SIZE, LAYERS = 4, 2, 16, 2
VOCABULARY = 80  # no other size: the builder takes a layer with as many outputs for the head of the model
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES = {
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "hunyuan": (transformers.HunYuanDenseV1Config, transformers.HunYuanDenseV1ForCausalLM),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(family, precision, provider) -> the PyTorch model and the builder's file, each made once."""
    models, files = {}, {}

    def build(family, precision, provider):
        if family not in models:
            models[family] = random_model(family, tmp_path_factory.mktemp(family))
        key = (family, precision, provider)
        model, folder = models[family]
        if key not in files:
            target = tmp_path_factory.mktemp("_".join(key))
            options = ["-i", folder, "-o", target, "-p", precision, "-e", provider, "-c", target]
            if precision == "int4":  # activations stay float32, so that numbers can be compared
                options += ["--extra_options", "accuracy_level=1"]
            command = [sys.executable, "-m", "onnxruntime_genai.models.builder", *map(str, options)]
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-2000:]
            files[key] = target / "model.onnx"
        return model, files[key]

    return build


def random_model(family, folder):
    torch.manual_seed(0)
    config, kind = FAMILIES[family]
    model = kind(config(**SIZES)).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0")
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return model, folder


def only_fused(path, notes):
    source = ir.load(path)
    model, report = fused(source)
    assert not report.declined and not report.refused and not report.plain
    assert [item.note for item in report.fused] == [notes] * LAYERS
    assert not any(node.op_type == "GroupQueryAttention" for node in model.graph)
    return in_memory(source), in_memory(model), report


def in_memory(model):
    """With its weights inside: the file's own lie beside it."""
    ir.external_data.load_to_model(model)
    return model


def feeds(ids, mask, caches, positions):
    named = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    for layer in range(LAYERS):
        named |= {f"past_key_values.{layer}.key": caches[2 * layer], f"past_key_values.{layer}.value": caches[2 * layer + 1]}
    return named


class Sequence:
    """One model, fed step by step; `capacity` 0 lets the cache grow."""

    def __init__(self, model, *, batch, capacity, dtype=np.float32):
        self.model = model
        self.outputs = [value.name for value in model.graph.outputs]
        self.inputs = [value.name for value in model.graph.inputs]
        self.caches = [np.zeros((batch, KV_HEADS, capacity, HEAD_SIZE), dtype)] * (2 * LAYERS)

    def step(self, ids, mask):
        past = mask.sum(1, keepdims=True) - ids.shape[1]
        named = feeds(ids, mask, self.caches, np.maximum(past, 0) + np.arange(ids.shape[1]))
        outputs = dict(zip(self.outputs, run(self.model, {name: named[name] for name in self.inputs}), strict=True))
        self.caches = [outputs[f"present.{layer}.{kind}"] for layer in range(LAYERS) for kind in ("key", "value")]
        return outputs["logits"]


NOTES = {
    "qwen3": "proven in float32: no float64 kernel for GroupQueryAttention",
    "hunyuan": "proven in float32: no float64 kernel for GroupQueryAttention, RotaryEmbedding",
}


@pytest.mark.parametrize(
    ("family", "precision"), [("qwen3", "fp32"), ("qwen3", "int4"), pytest.param("hunyuan", "fp32", marks=pytest.mark.slow)]
)
def test_prefill_and_decode_give_the_numbers_of_the_file(built, family, precision):
    _, path = built(family, precision, "cpu")
    source, model, _ = only_fused(path, NOTES[family])
    random = np.random.default_rng(0)
    for batch, capacity in ((1, 0), (1, 24), (2, 0), (3, 24)):
        old, new = (Sequence(item, batch=batch, capacity=capacity) for item in (source, model))
        length = 0
        for count in (6, 1, 1, *([4, 1] if batch == 1 else [])):
            length += count
            ids, mask = random.integers(0, VOCABULARY, (batch, count)), np.ones((batch, length), np.int64)
            same(new.step(ids, mask), old.step(ids, mask))
            for given, wanted in zip(new.caches, old.caches, strict=True):
                assert given.shape == wanted.shape
                same(given[:, :, :length], wanted[:, :, :length])


def same(given, wanted):
    assert given.shape == wanted.shape
    assert np.abs(given - wanted).max() <= 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("capacity", [0, 20])
def test_rows_of_different_lengths(built, capacity):
    """Prompts that are padded on the right, as the operator wants them; what it leaves open is not compared."""
    _, path = built("qwen3", "fp32", "cpu")
    source, model, _ = only_fused(path, NOTES["qwen3"])
    old, new = (Sequence(item, batch=2, capacity=capacity) for item in (source, model))
    ids = np.random.default_rng(1).integers(0, VOCABULARY, (2, 6))
    given, wanted = (sequence.step(ids, np.asarray([[1] * 6, [1] * 3 + [0] * 3])) for sequence in (new, old))
    same(given[0], wanted[0])
    same(given[1, :3], wanted[1, :3])
    for step in range(3):
        token = ids[:, step : step + 1]
        mask = np.asarray([[1] * (7 + step), [1] * (4 + step) + [0] * 3])
        same(new.step(token, mask), old.step(token, mask))


def test_logits_are_those_of_pytorch(built):
    module, path = built("qwen3", "fp32", "cpu")
    _, model, _ = only_fused(path, NOTES["qwen3"])
    ids = np.random.default_rng(2).integers(0, VOCABULARY, (2, 9))
    logits = Sequence(model, batch=2, capacity=0).step(ids, np.ones_like(ids))
    with torch.no_grad():
        same(logits, module(torch.from_numpy(ids)).logits.numpy())


def test_norms_inside_of_the_operator_for_cuda(built):
    """What no CPU provider runs as it is: the fused file does, within the error budget of half precision."""
    module, path = built("qwen3", "fp16", "cuda")
    note = NOTES["qwen3"] + ", whose norms the CPU provider lacks: they are taken as documented"
    _, model, report = only_fused(path, note)
    assert all(item.spec.norm.q_kind == item.spec.norm.k_kind == "rms" for item in report.fused)
    ids = np.random.default_rng(3).integers(0, VOCABULARY, (2, 9))
    logits = Sequence(model, batch=2, capacity=0, dtype=np.float16).step(ids, np.ones_like(ids))
    with torch.no_grad():
        exact = module(torch.from_numpy(ids)).logits.double().numpy()
        half = module.half()(torch.from_numpy(ids)).logits.double().numpy()
        module.float()
    largest = np.abs(exact).max()
    errors = [np.abs(item.astype(np.float64) - exact).max() / largest for item in (logits, half)]
    assert errors[0] <= 2 * errors[1] + 4 * np.finfo(np.float16).eps


def test_generate_continues_with_a_fused_file(built):
    """C28: the head size of its caches is a name, which only the caller can fill in; tokens are those of PyTorch."""
    module, path = built("qwen3", "fp32", "cpu")
    prompts = np.random.default_rng(3).integers(3, VOCABULARY, (2, 6))
    tokens = torch.tensor(prompts)
    with torch.no_grad():
        for _ in range(5):
            tokens = torch.cat([tokens, module(input_ids=tokens).logits[:, -1:].argmax(-1)], 1)
    for model in (path, qk.fuse(path)):
        session = qk.create_session(model)
        with pytest.raises(InputError, match="kv_cache_dim"):
            generate(session, prompts, max_new_tokens=1)
        found = generate(session, prompts, max_new_tokens=5, sizes={"kv_cache_dim": HEAD_SIZE})
        assert np.array_equal(found, tokens.numpy())
