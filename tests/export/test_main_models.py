"""The main job: each model, each target, each type. One node per attention, nothing of norm or rotary left, and it is right."""

from __future__ import annotations

import collections
import dataclasses
import functools

import onnx
import pytest
import torch

import qknorm_onnx as qk
from qknorm_onnx.graph.canonical.qk_norm_node import canonical_operator

# Norms of the blocks around attention, which stay: kind of statistics node -> how many.
MODELS = {
    "qwen3": 5,  # two in each of two layers, one at the end
    "gemma3_text": 9,  # four in each layer: before and after attention and MLP
    "olmo2": 5,
    "cohere_qk": 3,  # one in each layer: attention and MLP run side by side
    "llama4_text": 5,
    "h_cosine_tau_per_head": 2,
    "h_cosnorm_scalar_tau": 2,
    "h_vit22b_ln_nobias": 2,
    "h_vit22b_sdpa": 2,
    "h_ngpt": 2,
}
UNNORMED = {"llama4_text": 1}  # its layers without rotary embedding have no norm either
TARGETS = ("custom-op", "onnx", "primitive")
LAYERS = 2
# Statistics of a norm: each norm that is left has exactly one of these (LayerNorm by hand has two: centre and size).
STATISTICS = ("LayerNormalization", "RMSNormalization", "ReduceL2", "ReduceMean")


@dataclasses.dataclass(frozen=True)
class Exported:
    module: object
    kwargs: dict
    program: qk.Program


@pytest.fixture(scope="module")
def exported(plain_export):
    @functools.cache
    def make(name, target):
        graph = plain_export(name, 23 if target == "onnx" else 20)
        return Exported(graph.module, graph.kwargs, qk.fuse(graph.model, target=target, require_fusion=True))

    return make


def operators(model):
    return collections.Counter(canonical_operator(node) or node.op_type for node in model.graph)


@pytest.mark.parametrize("name", MODELS)
def test_one_node_per_attention_and_no_norm_or_rotary_left(exported, name):
    program = exported(name, "custom-op").program
    attentions = LAYERS - UNNORMED.get(name, 0)
    found = operators(program.model)
    assert found["QKNormAttention"] == attentions
    assert len(program.report.fused) == attentions
    assert len(program.report.plain) == UNNORMED.get(name, 0)
    assert found["Softmax"] == UNNORMED.get(name, 0) + (1 if name == "llama4_text" and found["Sigmoid"] == 0 else 0)
    statistics = sum(found[op] for op in STATISTICS)
    centred = MODELS[name] if name == "cohere_qk" else 0  # Cohere's block norms are LayerNorms by hand
    assert statistics == MODELS[name] + (centred if found["LayerNormalization"] == 0 else 0)
    assert found["Neg"] == 0, "a rotary embedding is left"


@pytest.mark.parametrize("name", MODELS)
def test_targets_use_their_own_operators_only(exported, name):
    attentions = LAYERS - UNNORMED.get(name, 0)
    standard = exported(name, "onnx").program
    assert {fused.target for fused in standard.report.fused} == {"onnx"}, [fused.note for fused in standard.report.fused]
    assert operators(standard.model)["Attention"] >= attentions
    for target in ("onnx", "primitive"):
        model = exported(name, target).program.to_proto()
        assert {node.domain for node in model.graph.node} <= {""}
        assert not model.functions
        assert all(entry.domain in ("", "ai.onnx") for entry in model.opset_import)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("target", TARGETS)
def test_file_is_valid_onnx(exported, name, target, tmp_path):
    path = tmp_path / "model.onnx"
    exported(name, target).program.save(path)
    onnx.checker.check_model(path, full_check=True)
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("name", MODELS)
def test_runs_without_the_native_library(exported, run_model, assert_as_torch, name):
    """Plain onnxruntime, which knows nothing of ai.qknorm, at batch 3 and another length."""
    found = exported(name, "custom-op")
    generator = torch.Generator().manual_seed(1)
    inputs = {}
    for key, example in found.kwargs.items():
        shape = (3, 7, *example.shape[2:])
        floating = example.is_floating_point()
        inputs[key] = torch.randn(shape, generator=generator) if floating else torch.randint(5, 100, shape, generator=generator)
    (y,) = run_model(found.program.model, inputs)
    with torch.no_grad():
        assert_as_torch(y, found.module(**inputs))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("target", TARGETS)
def test_parity_in_every_type_at_other_sizes(exported, name, target):
    found = exported(name, target)
    report = qk.validate(found.program, found.module, kwargs=found.kwargs, dtypes=("float32", "float16", "bfloat16"))
    assert report.passed, report.summary()
    cases = {row.case for row in report.rows}
    assert {"batch 1", "batch 3"} <= cases, cases
    assert all("emulated" in row.how for row in report.of("bfloat16"))
    assert any(row.verdict == "passed" for row in report.of("bfloat16"))
