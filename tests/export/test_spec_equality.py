"""Two independent roads to one meaning: the spec read off the module equals the one recognised in the exported graph."""

from __future__ import annotations

import math

import pytest

import qknorm_onnx as qk
from qknorm_onnx.graph.spec_comparison import compare_specs
from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormSpec, RotarySpec
from qknorm_onnx.torch_export.spec_from_module import ReaderRegistry, read_module, read_specs

HUGGING_FACE = ["qwen3", "gemma3_text", "olmo2", "cohere_qk", "llama4_text"]
MORE = ["qwen3_sliding", "qwen3_mha", "qwen3_moe", "olmo3"]
HANDWRITTEN = [
    "h_cosine_tau_per_head",
    "h_cosine_tau_causal",
    "h_cosnorm_scalar_tau",
    "h_ngpt",
    "h_vit22b_ln_nobias",
    "h_vit22b_sdpa",
]


def zoo_reader(zoo):
    """Reads the zoo's handwritten attention: its norm modules, and how they are called."""

    def norm_of(module):
        kind = type(module.qn)
        if kind in (zoo.L2, zoo.NGPT):
            return {"q_kind": "l2", "k_kind": "l2", "q_epsilon": 1e-12, "k_epsilon": 1e-12, "epsilon_mode": "clamp"}
        if kind is zoo.LNb:
            return {"q_kind": "layer", "k_kind": "layer", "q_epsilon": module.qn.n.eps, "k_epsilon": module.kn.n.eps}
        raise AssertionError(f"no norm reader for {kind}")

    def read(module):
        rotary = RotarySpec()
        if module.rope != "none":
            order = "after_norm" if module.order == "before" else "before_norm"
            rotary = RotarySpec(order=order, interleaved=module.rope == "int")
        scale = 1.0 if module.post is not None else module.scale
        if isinstance(module.post, zoo.Tau) and module.post.tau.ndim == 0:
            scale = float(module.post.tau)
        return QKNormSpec(
            attention=AttentionSpec(q_num_heads=module.h, kv_num_heads=module.kv, scale=scale, is_causal=module.causal),
            norm=NormSpec(**norm_of(module)),
            rotary=rotary,
        )

    return read


def assert_same_specs(zoo, export):
    registry = ReaderRegistry()
    registry.register_reader(zoo.Attn, zoo_reader(zoo))
    read = read_specs(export.module, registry=registry)
    report = qk.fuse(export.model).report
    assert report.complete, report
    recognised = {attention.name: qk.canonical(attention.spec) for attention in report.fused}
    assert recognised == {path: qk.canonical(spec) for path, spec in read.items()}
    assert math.prod(len(specs) for specs in (read, recognised)) > 0
    comparison = compare_specs(read_module(export.module, registry=registry).specs, report)
    assert set(recognised) <= set(comparison.agreeing) and not comparison.differences


@pytest.mark.parametrize("name", [*HUGGING_FACE, *HANDWRITTEN])
def test_module_and_graph_agree(zoo, plain_export, name):
    assert_same_specs(zoo, plain_export(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_modules_and_graphs_agree(zoo, plain_export, name):
    assert_same_specs(zoo, plain_export(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*HUGGING_FACE, *HANDWRITTEN])
@pytest.mark.parametrize("opset", [18, 23])
def test_module_and_graph_agree_at_other_opsets(zoo, plain_export, name, opset):
    assert_same_specs(zoo, plain_export(name, opset))
