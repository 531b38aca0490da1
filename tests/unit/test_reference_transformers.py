"""VARIANTS against the attention classes of transformers, imported and run in float64.

Each class is built with the head counts and sizes of the variant and random parameters. What its projections put out is
what our node gets; what its output projection gets is what our node must put out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import pytest

from qknorm_onnx.spec.reference import qk_norm_attention
from qknorm_onnx.spec.variants import VARIANTS, Variant

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

BATCH, LENGTH, HIDDEN = 2, 7, 24


@dataclasses.dataclass(frozen=True)
class Family:
    """How to build the official module of a variant. `parameters` reads our node's inputs off it."""

    variant: str
    package: str
    config: str
    module: str
    config_fields: Mapping[str, Any]
    parameters: Callable[[Any], Mapping[str, Any]]
    tables: Literal["halves", "pairs", "complex", "reversed"] = "halves"
    value: str = "v_proj"  # the submodule that puts out the values
    output: str = "o_proj"  # the submodule that gets Y
    output_factor: float = 1.0  # what a gate with zero weights makes of Y


def gains(q_name: str = "q_norm", k_name: str = "k_norm", *, offset: float = 0.0) -> Callable[[Any], Mapping[str, Any]]:
    def read(module: Any) -> Mapping[str, Any]:
        found = {}
        for side, name in (("q", q_name), ("k", k_name)):
            norm = getattr(module, name)
            found[f"{side}_norm_weight"] = norm.weight + offset
            if getattr(norm, "bias", None) is not None:
                found[f"{side}_norm_bias"] = norm.bias
        return found

    return read


def stacked_gains(module: Any) -> Mapping[str, Any]:
    return {
        f"{side}_norm_weight": torch.stack([norm.weight for norm in getattr(module, f"{side}_layernorm").norms])
        for side in ("q", "k")
    }


def timesfm_parameters(module: Any) -> Mapping[str, Any]:
    per_value = torch.nn.functional.softplus(module.scaling) * 1.442695041 / math.sqrt(module.head_dim)
    return {**gains()(module), "q_scale": per_value}


def dory_parameters(module: Any) -> Mapping[str, Any]:
    unit = torch.full((module.head_dim,), module.head_dim**-0.5, dtype=torch.float64)
    scale = (module.sqk * module.sqk_scale).reshape(-1, 1, module.head_dim) ** 2
    return {"q_norm_weight": unit, "k_norm_weight": unit, "q_scale": scale}


ROPE = {"rope_type": "default", "rope_theta": 1e4}
FAMILIES = (
    Family("qwen3", "qwen3", "Qwen3Config", "Qwen3Attention", {"rms_norm_eps": 1e-6}, gains()),
    Family(
        "gemma3",
        "gemma3",
        "Gemma3TextConfig",
        "Gemma3Attention",
        {"query_pre_attn_scalar": 168, "layer_types": ["full_attention"] * 2},
        gains(offset=1.0),
    ),
    Family("olmo2", "olmo2", "Olmo2Config", "Olmo2Attention", {"rms_norm_eps": 1e-5}, gains()),
    Family(
        "olmo3-sliding",
        "olmo3",
        "Olmo3Config",
        "Olmo3Attention",
        {"rms_norm_eps": 1e-5, "sliding_window": 4, "layer_types": ["sliding_attention"] * 2},
        gains(),
    ),
    Family("command-r-plus", "cohere", "CohereConfig", "CohereAttention", {"use_qk_norm": True}, gains(), tables="pairs"),
    Family("chameleon", "chameleon", "ChameleonConfig", "ChameleonAttention", {"model_parallel_size": 1}, gains()),
    Family(
        "stablelm",
        "stablelm",
        "StableLmConfig",
        "StableLmAttention",
        {"qk_layernorm": True, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}},
        stacked_gains,
    ),
    Family(
        "phi",
        "phi",
        "PhiConfig",
        "PhiAttention",
        {"qk_layernorm": True, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
        gains("q_layernorm", "k_layernorm"),
        output="dense",
    ),
    Family(
        "hunyuan",
        "hunyuan_v1_dense",
        "HunYuanDenseV1Config",
        "HunYuanDenseV1Attention",
        {"rms_norm_eps": 1e-5},
        gains("query_layernorm", "key_layernorm"),
    ),
    Family("timesfm-2.5", "timesfm2_5", "TimesFm2_5Config", "TimesFm2_5Attention", {}, timesfm_parameters),
    Family("gemma2", "gemma2", "Gemma2Config", "Gemma2Attention", {"query_pre_attn_scalar": 144}, lambda _: {}),
    Family("minimax-m2", "minimax_m2", "MiniMaxM2Config", "MiniMaxM2Attention", {"rms_norm_eps": 1e-6}, gains()),
    Family(
        "muse",
        "muse_glimmer",
        "MuseGlimmerTextConfig",
        "MuseGlimmerTextAttention",
        {"rms_norm_eps": 1e-5, "qk_scale_factor": 2.0},
        lambda _: {},
        output_factor=0.5,
    ),
    Family(
        "dory",
        "dory",
        "DoryConfig",
        "DoryAttention",
        {"num_hidden_layers": 3, "n_input_layers": 1, "n_output_layers": 1, "layer_types": ["full_attention"] * 3},
        dory_parameters,
        output="attn_sub_norm",
        output_factor=0.5,
    ),
    Family(
        "flint",
        "flint",
        "FlintConfig",
        "FlintAttention",
        {"rms_norm_eps": 1e-6, "sliding_window": 4, "layer_types": ["sliding_attention"] * 2},
        lambda module: {**gains()(module), "head_sink": module.sinks},
    ),
    Family(
        "internvl-vision",
        "internvl",
        "InternVLVisionConfig",
        "InternVLVisionAttention",
        {"use_qk_norm": True},
        gains(),
        output="projection_layer",
    ),
    Family("esmc", "esmc", "EsmcConfig", "EsmcAttention", {}, gains()),
    Family(
        "gemma3-sliding",
        "gemma3",
        "Gemma3TextConfig",
        "Gemma3Attention",
        {"query_pre_attn_scalar": 256, "sliding_window": 3, "layer_types": ["sliding_attention"] * 2},
        gains(offset=1.0),
    ),
    Family(
        "gemma3n",
        "gemma3n",
        "Gemma3nTextConfig",
        "Gemma3nTextAttention",
        {"num_kv_shared_layers": 0, "layer_types": ["full_attention"] * 2, "activation_sparsity_pattern": [0.0] * 2},
        gains(),
        value="v_norm",
    ),
    Family(
        "llama4",
        "llama4",
        "Llama4TextConfig",
        "Llama4TextAttention",
        {"rms_norm_eps": 1e-5, "no_rope_layers": [1, 1]},
        lambda _: {},
        tables="complex",
    ),
    Family("nanochat", "nanochat", "NanoChatConfig", "NanoChatAttention", {}, lambda _: {}, tables="reversed"),
    Family("beam", "beam", "BeamConfig", "BeamAttention", {}, gains(), output_factor=0.5),
    Family("internlm2", "llama", "LlamaConfig", "LlamaAttention", {}, lambda _: {}),
)


@contextlib.contextmanager
def all_in_float64() -> Iterator[None]:
    """The modules raise narrow types to float32 by name; here that name means float64, so nothing is rounded."""
    with pytest.MonkeyPatch.context() as patch:
        importlib.import_module("safetensors.torch")  # its table of types must not be made while float32 is another
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def build(family: Family, variant: Variant) -> Any:
    attention = variant.spec.attention
    models = f"transformers.models.{family.package}"
    config_class = getattr(importlib.import_module(f"{models}.configuration_{family.package}"), family.config)
    module_class = getattr(importlib.import_module(f"{models}.modeling_{family.package}"), family.module)
    full_width = attention.q_num_heads * variant.head_size
    fields = {
        "hidden_size": HIDDEN if accepts_head_size(config_class) else full_width,
        "num_attention_heads": attention.q_num_heads,
        "num_key_value_heads": attention.kv_num_heads,
        "head_dim": variant.head_size,
        "num_hidden_layers": 2,
    }
    config = config_class(**(fields | dict(family.config_fields)))
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    module = module_class(config, layer_idx=0) if takes_layer_index(module_class) else module_class(config)
    module = module.to(torch.float64).eval()
    for name in ("scaling", "scale"):
        if isinstance(getattr(module, name, None), float):
            setattr(module, name, float(np.float32(getattr(module, name))))  # what an ONNX attribute holds
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            is_gain = "norm" in name and "weight" in name
            values = torch.randn(parameter.shape, dtype=torch.float64)
            parameter.copy_(1 + 0.5 * values if is_gain else (0.0 if "gate" in name else 0.4) * values)
    return module


def accepts_head_size(config_class: Any) -> bool:
    return "head_dim" in getattr(config_class, "__annotations__", {})


def takes_layer_index(module_class: Any) -> bool:
    return "layer_idx" in module_class.__init__.__code__.co_varnames


def add_tables(family: Family, variant: Variant, arguments: dict[str, Any], ours: dict[str, Any]) -> None:
    """The same random angles in the module's form and as our inputs: one factor per pair."""
    pairs = variant.spec.rotary.rotated_size(variant.head_size) // 2
    angles = torch.rand(BATCH, LENGTH, pairs, dtype=torch.float64) * 6
    ours["cos"], ours["sin"] = angles.cos(), angles.sin()
    if family.tables == "complex":
        arguments["position_embeddings"] = torch.polar(torch.ones_like(angles), angles)
        return
    if family.tables == "reversed":
        ours["sin"] = -ours["sin"]
    wide = angles.repeat_interleave(2, -1) if family.tables == "pairs" else torch.cat([angles, angles], -1)
    arguments["position_embeddings"] = (wide.cos(), wide.sin())


def visible(variant: Variant) -> Any:
    """Float mask (B, 1, S, T) that the module needs to see what our attributes say."""
    attention = variant.spec.attention
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    if attention.is_causal:
        seen &= distance >= 0
    if attention.left_window_size >= 0:
        seen &= distance <= attention.left_window_size
    return torch.zeros(BATCH, 1, LENGTH, LENGTH, dtype=torch.float64).masked_fill(~seen, -math.inf)


def run_official(module: Any, family: Family, **arguments: Any) -> tuple[dict[str, Any], Any]:
    """Outputs of the three projections by our names, and the input of the output projection."""
    captured: dict[str, Any] = {}
    hooks = [
        getattr(module, source).register_forward_hook(
            lambda _module, _args, out, name=name: captured.__setitem__(name, out.flatten(2))
        )
        for name, source in (("query", "q_proj"), ("key", "k_proj"), ("value", family.value))
    ]
    hooks.append(getattr(module, family.output).register_forward_pre_hook(lambda _, args: captured.__setitem__("Y", args[0])))
    with torch.no_grad(), all_in_float64():
        module(hidden_states=torch.randn(BATCH, LENGTH, module.q_proj.in_features, dtype=torch.float64), **arguments)
    for hook in hooks:
        hook.remove()
    return captured, captured.pop("Y")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.variant)
def test_variant_is_what_the_official_module_computes(family: Family) -> None:
    variant = VARIANTS[family.variant]
    module = build(family, variant)
    arguments: dict[str, Any] = {"attention_mask": visible(variant)}
    ours: dict[str, Any] = {}
    if variant.spec.rotary.order != "none":
        add_tables(family, variant, arguments, ours)
    if "q_scale" in variant.input_names and "position" in variant.summary:
        ours["q_scale"] = arguments["attention_scaling"] = 1 + torch.rand(BATCH, 1, LENGTH, 1, dtype=torch.float64)
        arguments["position_embeddings"] = None
    projected, expected = run_official(module, family, **arguments)
    ours |= projected | dict(family.parameters(module))
    result = qk_norm_attention(variant.spec, {name: value.detach().numpy() for name, value in ours.items()})["Y"]
    difference = np.max(np.abs(family.output_factor * result - expected.numpy()))
    assert difference < 1e-12 * np.max(np.abs(expected.numpy()))
