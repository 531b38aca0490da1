"""One step of decoding with a cache, for the decoders whose tag `cache` is "dynamic": plain caches of keys and values."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from tests.zoo.other_decoders import ZOO as OTHER_DECODERS
from tests.zoo.rms_decoders import ZOO as RMS_DECODERS


class DecodeWrap(nn.Module):
    """(logits, present key, present value, ...) = f(input_ids, position_ids, attention_mask, past key, past value, ...)."""

    def __init__(self, model, layers):
        super().__init__()
        self.model = model
        self.n = layers

    def forward(self, input_ids, position_ids, attention_mask, *past):
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer in range(self.n):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        named = {cache_parameter(self.model): cache, "use_cache": True}
        output = self.model(input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, **named)
        first = output.logits if hasattr(output, "logits") else output.last_hidden_state
        return (first, *(tensor for layer in cache.layers[: self.n] for tensor in (layer.keys, layer.values)))


def cache_parameter(model: nn.Module) -> str:
    """`cache` since transformers 5.2x, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def build_with_cache(name, attention="eager"):
    """(module, inputs, tags) of the last token of the example after a real prefill of the others.

    Inputs are input_ids (B, 1), position_ids (B, 1), attention_mask (B, P + 1), and past key and value of each layer,
    (B, heads, P, D). The logits equal the last row of those without a cache.
    """
    from transformers import DynamicCache

    wrapped, kwargs, _, tags = (RMS_DECODERS | OTHER_DECODERS)[name](attention)
    assert tags["cache"] == "dynamic", f"{name}: cache={tags['cache']}"
    model, ids = wrapped.model, kwargs["input_ids"]
    past, cache = ids.shape[1] - 1, DynamicCache()
    with torch.no_grad():
        model(input_ids=ids[:, :past], use_cache=True, **{cache_parameter(model): cache})
    caches = [tensor for layer in cache.layers for tensor in (layer.keys.clone(), layer.values.clone())]
    batch = ids.shape[0]
    example = (ids[:, past:], torch.full((batch, 1), past), torch.ones(batch, past + 1, dtype=torch.long), *caches)
    return DecodeWrap(model, len(cache.layers)), example, tags
