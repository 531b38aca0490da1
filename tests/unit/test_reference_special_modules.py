"""Variants against official modules that do not have the usual shape: Swin v2, cross attention, one shared key/value head."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest

from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, QKNormRotarySpec, QKNormSpec
from qknorm_onnx.spec.reference import qk_norm_attention, qk_norm_rotary
from qknorm_onnx.spec.variants import VARIANTS

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

EXACT = 1e-12


@pytest.fixture(autouse=True)
def _nothing_is_rounded_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules raise narrow types to float32 by name; here that name means float64."""
    importlib.import_module("safetensors.torch")  # its table of types must not be made while float32 is another
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def official(family: str, config: str, module: str, *arguments: Any, **fields: Any) -> tuple[Any, Any]:
    """The module with random parameters in float64, and its config."""
    models = f"transformers.models.{family}"
    settings = getattr(importlib.import_module(f"{models}.configuration_{family}"), config)(**fields)
    settings._attn_implementation = "eager"
    built = getattr(importlib.import_module(f"{models}.modeling_{family}"), module)(settings, *arguments).to(torch.float64).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            values = torch.randn(parameter.shape, dtype=torch.float64)
            parameter.copy_(1 + 0.5 * values if "norm" in name else 0.4 * values)
    if isinstance(getattr(built, "scaling", None), float):
        built.scaling = float(np.float32(built.scaling))  # what an ONNX attribute holds
    return built, settings


def capture(module: Any, **sources: str) -> dict[str, Any]:
    """Fills the returned dictionary with the outputs of named submodules, or with their inputs where the name starts with `<`."""
    captured: dict[str, Any] = {}
    for name, source in sources.items():
        submodule = getattr(module, source.removeprefix("<"))
        if source.startswith("<"):
            submodule.register_forward_pre_hook(lambda _, args, name=name: captured.__setitem__(name, args[0].detach()))
        else:
            submodule.register_forward_hook(lambda _m, _a, out, name=name: captured.__setitem__(name, out.detach()))
    return captured


def random(*shape: int) -> Any:
    return torch.randn(*shape, dtype=torch.float64)


def result(spec: QKNormSpec, inputs: dict[str, Any]) -> Any:
    return qk_norm_attention(spec, {name: value.detach().numpy() for name, value in inputs.items()})["Y"]


def test_swin_v2() -> None:
    variant = VARIANTS["swin-v2"]
    heads = variant.spec.attention.q_num_heads
    width = heads * variant.head_size
    module, _ = official("swinv2", "Swinv2Config", "Swinv2SelfAttention", width, heads, 3, qkv_bias=True)
    with torch.no_grad():
        module.logit_scale.copy_(torch.linspace(1.0, 6.0, heads, dtype=torch.float64).reshape(heads, 1, 1))  # some above log 100
    inputs = capture(module, query="query", key="key", value="value")
    positions = capture(module, by_pair="continuous_position_bias_mlp")
    with torch.no_grad():
        (expected,) = module(random(2, 9, width))
    by_pair = positions["by_pair"].reshape(-1, heads)[module.relative_position_index.reshape(-1)]
    inputs["attention_bias"] = 16 * torch.sigmoid(by_pair.reshape(1, 9, 9, heads).permute(0, 3, 1, 2))
    inputs["q_scale"] = module.logit_scale.clamp(max=math.log(100)).exp()
    assert np.max(np.abs(result(variant.spec, inputs) - expected.numpy())) < EXACT * expected.abs().max()


@pytest.mark.parametrize("images", [1, 4, 11])
def test_mllama_cross_attention(images: int) -> None:
    variant = VARIANTS["mllama-cross"]
    attention = variant.spec.attention
    width = attention.q_num_heads * variant.head_size
    sizes = {"num_attention_heads": attention.q_num_heads, "num_key_value_heads": attention.kv_num_heads, "hidden_size": width}
    module, _ = official("mllama", "MllamaTextConfig", "MllamaTextCrossAttention", 0, rms_norm_eps=1e-5, **sizes)
    captured = capture(module, query="q_proj", key="k_proj", value="v_proj", Y="<o_proj")
    with torch.no_grad():
        module(random(2, 5, width), cross_attention_states=random(2, images, width))
    expected = captured.pop("Y")
    inputs = captured | {"q_norm_weight": module.q_norm.weight, "k_norm_weight": module.k_norm.weight}
    assert np.max(np.abs(result(variant.spec, inputs) - expected.numpy())) < EXACT * expected.abs().max()


def test_deepseek_v4_with_the_prepared_key_as_value() -> None:
    variant = VARIANTS["deepseek-v4"]
    heads, size = variant.spec.attention.q_num_heads, variant.head_size
    module, _ = official(
        "deepseek_v4",
        "DeepseekV4Config",
        "DeepseekV4Attention",
        0,
        hidden_size=24,
        num_attention_heads=heads,
        head_dim=size,
        num_hidden_layers=2,
        layer_types=["sliding_attention"] * 2,
        q_lora_rank=16,
        o_groups=2,
        o_lora_rank=8,
    )
    captured = capture(module, query="q_b_proj", key="kv_proj", Y="<o_a_proj")
    angles = 6 * torch.rand(2, 7, 2, dtype=torch.float64)
    distance = torch.arange(7)[:, None] - torch.arange(7)
    window = variant.spec.attention.left_window_size
    mask = torch.zeros(2, 1, 7, 7, dtype=torch.float64).masked_fill((distance < 0) | (distance > window), -math.inf)
    tables = {"main": (angles.cos(), angles.sin()), "compress": (angles.cos(), angles.sin())}
    with torch.no_grad():
        module(random(2, 7, 24), position_embeddings=tables, position_ids=None, attention_mask=mask)
    expected = captured.pop("Y").reshape(2, 7, heads * size)
    inputs = captured | {"cos": angles.cos(), "sin": angles.sin(), "k_norm_weight": module.kv_norm.weight}
    inputs["head_sink"] = module.sinks
    prepared = qk_norm_rotary(variant.spec.key_preparation, _side(inputs, "key", "k_norm_weight"))["Y"]
    inputs["value"] = torch.from_numpy(prepared)
    turned_back = QKNormRotarySpec(num_heads=heads, rotary=variant.spec.rotary)
    tables_back = {"cos": angles.cos().numpy(), "sin": -angles.sin().numpy()}
    ours = qk_norm_rotary(turned_back, {"x": result(variant.spec, inputs), **tables_back})["Y"]
    assert np.max(np.abs(ours - expected.numpy())) < EXACT * expected.abs().max()


def _side(inputs: dict[str, Any], name: str, weight: str) -> dict[str, Any]:
    sources = {"x": name, "weight": weight, "cos": "cos", "sin": "sin"}
    return {ours: inputs[source].detach().numpy() for ours, source in sources.items()}


def test_qwen3_next_with_its_gate_divided_out() -> None:
    variant = VARIANTS["qwen3-next"]
    attention, size = variant.spec.attention, variant.head_size
    module, _ = official(
        "qwen3_next",
        "Qwen3NextConfig",
        "Qwen3NextAttention",
        0,
        hidden_size=24,
        num_attention_heads=attention.q_num_heads,
        num_key_value_heads=attention.kv_num_heads,
        head_dim=size,
    )
    captured = capture(module, both="q_proj", key="k_proj", value="v_proj", Y="<o_proj")
    angles = 6 * torch.rand(2, 7, variant.spec.rotary.embedding_dim // 2, dtype=torch.float64)
    mask = torch.full((7, 7), -math.inf, dtype=torch.float64).triu(1).expand(2, 1, 7, 7)
    wide = torch.cat([angles, angles], -1)
    with torch.no_grad():
        module(random(2, 7, 24), position_embeddings=(wide.cos(), wide.sin()), attention_mask=mask)
    query, gate = captured.pop("both").reshape(2, 7, attention.q_num_heads, 2 * size).chunk(2, -1)
    expected = captured.pop("Y") / torch.sigmoid(gate.flatten(2))
    inputs = captured | {"query": query.flatten(2), "cos": angles.cos(), "sin": angles.sin()}
    inputs |= {"q_norm_weight": 1 + module.q_norm.weight, "k_norm_weight": 1 + module.k_norm.weight}
    assert np.max(np.abs(result(variant.spec, inputs) - expected.numpy())) < 10 * EXACT * expected.abs().max()


@pytest.mark.parametrize("window", [1, 3, 100])
def test_a_window_of_transformers_is_left_window_size_window_minus_one(window: int) -> None:
    from transformers import Qwen3Config
    from transformers.masking_utils import create_sliding_window_causal_mask

    config = Qwen3Config(use_sliding_window=True, sliding_window=window, num_hidden_layers=1)
    config._attn_implementation = "eager"
    mask = create_sliding_window_causal_mask(config, torch.zeros(1, 6, 4), None, None)
    attention = AttentionSpec(q_num_heads=1, kv_num_heads=1, scale=1.0, is_causal=True, left_window_size=window - 1)
    zeros = torch.zeros(1, 6, 1, dtype=torch.float64)
    ours = result(
        QKNormSpec(attention=attention), {"query": zeros, "key": zeros, "value": torch.eye(6, dtype=torch.float64)[None]}
    )
    assert np.array_equal(ours[0] > 0, mask[0, 0].numpy() == 0)
