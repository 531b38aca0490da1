"""Specs read off modules: what each family's attention computes, layer by layer."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from qknorm_onnx.spec import reference
from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormSpec, RotarySpec
from qknorm_onnx.torch_export.operators.modules import QKNormAttention
from qknorm_onnx.torch_export.spec_from_module import ReaderRegistry, read_specs

LAYER = "model.model.layers.{}.self_attn"


def rms(heads=4, kv_heads=2, *, head_size, epsilon=1e-6, window=-1, order="after_cast", axis="head", scale=None):
    return QKNormSpec(
        attention=AttentionSpec(
            q_num_heads=heads,
            kv_num_heads=kv_heads,
            scale=head_size**-0.5 if scale is None else scale,
            is_causal=True,
            left_window_size=window,
        ),
        norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=epsilon, k_epsilon=epsilon, weight_order=order, axis=axis),
        rotary=RotarySpec(order="after_norm"),
    )


COHERE = QKNormSpec(
    attention=AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=32**-0.5, is_causal=True),
    norm=NormSpec(q_kind="layer", k_kind="layer", q_epsilon=1e-5, k_epsilon=1e-5),
    rotary=RotarySpec(order="after_norm", interleaved=True),
)
LLAMA4 = QKNormSpec(
    attention=AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=32**-0.5),
    norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-5, k_epsilon=1e-5),
    rotary=RotarySpec(order="before_norm", interleaved=True),
)
GEMMA3 = rms(head_size=32, order="before_cast", scale=48**-0.5)


def windowed(spec, window):
    return dataclasses.replace(spec, attention=dataclasses.replace(spec.attention, left_window_size=window - 1))


EXPECTED = {
    "qwen3": {0: rms(head_size=32), 1: rms(head_size=32)},
    "qwen3_mha": {0: rms(kv_heads=4, head_size=32), 1: rms(kv_heads=4, head_size=32)},
    "qwen3_sliding": {0: rms(head_size=32), 1: rms(head_size=32, window=3)},
    "gemma3_text": {0: windowed(GEMMA3, 4), 1: GEMMA3},
    "olmo2": {i: rms(head_size=16, epsilon=1e-5, order="before_cast", axis="hidden") for i in (0, 1)},
    "cohere_qk": {0: COHERE, 1: COHERE},
    "llama4_text": {0: LLAMA4},  # layer 1 has no rotary and no norm
}


@pytest.mark.parametrize("name", EXPECTED)
def test_specs_of_hugging_face_models(zoo, name):
    module, *_ = zoo.ZOO[name]()
    assert read_specs(module) == {LAYER.format(layer): spec for layer, spec in EXPECTED[name].items()}


def test_chameleon():
    transformers = pytest.importorskip("transformers")
    config = transformers.ChameleonConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    attention = transformers.models.chameleon.modeling_chameleon.ChameleonAttention(config, layer_idx=0)
    (spec,) = read_specs(attention).values()
    assert (spec.norm.q_kind, spec.norm.q_epsilon, spec.norm.weight_order) == ("layer", np.float32(1e-5), "after_cast")
    assert spec.attention == AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=0.25, is_causal=True)


def test_attention_without_qk_norm_is_not_listed():
    transformers = pytest.importorskip("transformers")
    config = transformers.CohereConfig(hidden_size=64, num_attention_heads=4, use_qk_norm=False)
    assert read_specs(transformers.models.cohere.modeling_cohere.CohereAttention(config, layer_idx=0)) == {}
    assert read_specs(nn.Linear(3, 3)) == {}


def test_bidirectional_gemma3():
    transformers = pytest.importorskip("transformers")
    options = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8}
    config = transformers.Gemma3TextConfig(
        **options, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], use_bidirectional_attention=True
    )
    attention = transformers.models.gemma3.modeling_gemma3.Gemma3Attention
    sliding, full = (read_specs(attention(config, layer_idx=i))[""].attention for i in (0, 1))
    assert (sliding.is_causal, sliding.left_window_size, sliding.right_window_size) == (False, 4, 4)  # |distance| < 8 // 2 + 1
    assert (full.is_causal, full.left_window_size, full.right_window_size) == (False, -1, -1)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "olmo2", "cohere_qk", "llama4_text"])
def test_the_spec_computes_what_the_module_computes(zoo, name):
    """The reference, fed from the module's own projections, weights and rotary tables, against the module in float64."""
    module, kwargs, *_ = zoo.ZOO[name]()
    model = module.double().model.model
    specs = {int(path.split(".")[3]): spec for path, spec in read_specs(module).items()}
    for layer, spec in specs.items():
        attention = model.layers[layer].self_attn
        seen = watched_call(module, kwargs, attention)
        inputs = {"query": seen["q"], "key": seen["k"], "value": seen["v"], **_tables(seen["position_embeddings"])}
        for side in "qk":
            if hasattr(attention, f"{side}_norm"):
                weight = getattr(attention, f"{side}_norm").weight.detach()
                inputs[f"{side}_norm_weight"] = 1 + weight if name.startswith("gemma3") else weight
        if not spec.attention.is_causal:
            inputs["attention_bias"] = seen["attention_mask"]
        expected = reference.qk_norm_attention(spec, {n: value.numpy() for n, value in inputs.items()})["Y"]
        found = seen["y"].numpy()
        # The modules compute norms and tables in float32 even where the model is float64.
        assert np.abs(found - expected).max() <= 2e-6 * np.abs(expected).max()


def watched_call(module, kwargs, attention):
    """What went into and out of the attention call: q, k, v, y and the keyword arguments of the attention module."""
    seen = {}
    hooks = [
        getattr(attention, f"{side}_proj").register_forward_hook(lambda m, a, out, side=side: seen.update({side: out}))
        for side in "qkv"
    ]
    hooks.append(attention.o_proj.register_forward_pre_hook(lambda m, a: seen.update(y=a[0])))
    hooks.append(attention.register_forward_pre_hook(lambda m, a, kw: seen.update(kw), with_kwargs=True))
    with torch.no_grad():
        module(**kwargs)
    for hook in hooks:
        hook.remove()
    return seen


def _tables(embeddings):
    if torch.is_tensor(embeddings):  # complex: one factor for each pair
        return {"cos": embeddings.real, "sin": embeddings.imag}
    return {"cos": embeddings[0], "sin": embeddings[1]}


def test_our_own_module_inside_others():
    spec = rms(head_size=16)
    model = nn.Sequential(QKNormAttention(32, 4), nn.ModuleDict({"a": QKNormAttention.from_spec(spec, d_model=64, head_size=16)}))
    specs = read_specs(model)
    assert list(specs) == ["0", "1.a"]
    assert specs["1.a"] == spec
    assert specs["0"].norm.q_kind == "l2"


def test_readers_of_other_modules():
    class Own(nn.Module):
        heads = 2

    class Derived(Own):
        heads = 3

    registry = ReaderRegistry()
    registry.register_reader(Own, lambda m: rms(heads=m.heads, kv_heads=1, head_size=8))
    specs = read_specs(nn.ModuleList([Own(), Derived()]), registry=registry)
    assert [spec.attention.q_num_heads for spec in specs.values()] == [2, 3]
    assert read_specs(nn.ModuleList([Own()])) == {}  # registries do not share readers
