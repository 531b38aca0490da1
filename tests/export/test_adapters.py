"""Adapters of the `peft` package: merged into the weights, merged in place, and computed beside them at each call."""

from __future__ import annotations

import peft
import pytest
import torch

import qknorm_onnx as qk

AXES = {"input_ids": {0: "batch", 1: "seq"}}
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]


def with_adapter(**options: bool) -> torch.nn.Module:
    """Qwen3's form with random gains, and an adapter that changes what it computes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    module = peft.get_peft_model(Qwen3ForCausalLM(config), peft.LoraConfig(r=4, target_modules=PROJECTIONS, **options)).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif "lora_B" in name:  # zero at first, so that an adapter changes nothing
                parameter.normal_(std=0.2)
    return module


def merged(module: torch.nn.Module) -> torch.nn.Module:
    return module.merge_and_unload()


def merged_in_place(module: torch.nn.Module) -> torch.nn.Module:
    module.merge_adapter()
    return module


def as_it_is(module: torch.nn.Module) -> torch.nn.Module:
    return module


@pytest.mark.parametrize(
    ("change", "options"),
    [
        pytest.param(merged, {}, id="merged"),
        pytest.param(as_it_is, {"use_dora": True}, id="weights by their directions"),
        pytest.param(merged_in_place, {}, id="merged in place", marks=pytest.mark.slow),
        pytest.param(as_it_is, {}, id="computed at each call", marks=pytest.mark.slow),
        pytest.param(merged, {"use_rslora": True}, id="merged, scaled by the root of its rank", marks=pytest.mark.slow),
    ],
)
def test_adapters(change, options):
    module = change(with_adapter(**options))
    ids = torch.randint(0, 97, (2, 5))
    program = qk.export(module, kwargs={"input_ids": ids}, dynamic_shapes=AXES, require_fusion=True)
    assert len(program.report.fused) == 2
    assert qk.validate(program, module, kwargs={"input_ids": ids}).passed
    bare = with_adapter(**options).unload()
    assert not qk.validate(program, bare, kwargs={"input_ids": ids}, locate=0).passed, "the adapter is in the file"
