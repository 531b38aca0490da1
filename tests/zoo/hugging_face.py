"""Models of transformers as entries: tiny configurations, one tensor as output."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from tests.zoo.entries import VOCAB, Entries, entry, randomised, token_ids

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TXT_NOHD = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
}
TXT_NOHD = TXT_NOHD | HEADS | SPECIAL_TOKENS
TXT = TXT_NOHD | {"head_dim": 32}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

DECODER_TAGS = {
    "axis": "head_dim",
    "order": "before_rope",
    "rope": "half",
    "scale": "1/sqrt(d)",
    "mask": "causal",
    "gqa": True,
    "extras": [],
}
OTHER_TAGS = DECODER_TAGS | {"rope": "none", "mask": "bidirectional", "gqa": False, "cache": False}
PARTS = ("text_config", "vision_config", "audio_config", "encoder", "decoder", "qformer_config")
OUTPUTS = ("logits", "last_hidden_state", "pooler_output", "hidden_states")


class Wrap(nn.Module):
    """A model of transformers with one tensor as output."""

    def __init__(self, model, out=None, fixed=None):
        super().__init__()
        self.model = model
        self.out = out
        self.fixed = dict(fixed or {})

    def forward(self, **inputs):
        output = self.model(**inputs, **self.fixed)
        if torch.is_tensor(output):
            return output
        if self.out is not None:
            return getattr(output, self.out)
        for name in OUTPUTS:
            value = getattr(output, name, None)
            if torch.is_tensor(value):
                return value
        return next(value for value in (output.values() if hasattr(output, "values") else output) if torch.is_tensor(value))


def model_class(family: str, name: str) -> Any:
    """A class of transformers.models.FAMILY, a model or its configuration."""
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    if hasattr(modeling, name):
        return getattr(modeling, name)
    return getattr(importlib.import_module(f"transformers.models.{family}.configuration_{family}"), name)


def with_attention(config: Any, attention: str) -> Any:
    """The configuration, its parts too, for one implementation of attention."""
    config._attn_implementation = attention
    for part in (getattr(config, name, None) for name in PARTS):
        if hasattr(part, "_attn_implementation"):
            part._attn_implementation = attention
    return config


def instance(model: Any, config: Any, attention: str) -> nn.Module:
    """The model with random weights."""
    made = model._from_config(config, attn_implementation=attention) if hasattr(model, "_from_config") else model(config)
    return randomised(made)


def decoder(
    entries: Entries,
    name: str,
    family: str,
    config: str,
    model: str,
    tags: dict[str, Any],
    *,
    base=None,
    cache="dynamic",
    **settings,
):
    """Registers a text decoder: `base` with `settings` is its configuration."""
    known = {"lib": "transformers", "family": family, "cache": cache} | DECODER_TAGS | tags

    @entry(entries, name, known)
    def make(attention):
        made = with_attention(model_class(family, config)(**(base or TXT) | settings), attention)
        made.use_cache = False
        module = instance(model_class(family, model), made, attention)
        return Wrap(module, fixed={"use_cache": False}), {"input_ids": token_ids()}, {"input_ids": {0: "batch", 1: "seq"}}


def ent(entries, name, tags, make):
    """Registers what is no text decoder."""
    entry(entries, name, {"lib": "transformers"} | OTHER_TAGS | tags)(make)
