"""A Hugging Face causal language model as a graph with an explicit key / value cache, named as onnxruntime's tools name it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qknorm_onnx.errors import ExportError

LayerCache = Mapping[str, Tensor]


class CachedDecoder(nn.Module):
    """`model` with the cache as tensors: inputs `past_key_values.{i}.key | value`, outputs `present.{i}.key | value`.

    Keys and values are (B, Hkv, P, D); keys are cached after norm and rotary.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        parameters = inspect.signature(model.forward).parameters
        # `cache` since transformers 5.2x, `past_key_values` before
        self.cache_parameter = "cache" if "cache" in parameters else "past_key_values"

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past_key_values: Sequence[LayerCache]
    ) -> dict[str, Any]:
        """Logits (B, S, vocabulary) of the new tokens, and the cache that holds them too.

        Args:
            input_ids: new tokens (B, S).
            attention_mask: (B, P + S), 1 where there is a token, cached ones included.
            position_ids: (B, S).
            past_key_values: for each layer its `key` and `value`.
        """
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, past in enumerate(past_key_values):
            cache.update(past["key"], past["value"], layer)
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=True,
            **{self.cache_parameter: cache},
        )
        layers: list[Any] = cache.layers
        present = [{"key": layer.keys, "value": layer.values} for layer in layers]
        return {"logits": output.logits, "present": present}


def cached_example(model: Any, *, batch: int = 2, past: int = 5, new: int = 3) -> tuple[dict[str, Any], dict[str, Any]]:
    """Example inputs of `CachedDecoder(model)` and their dynamic shapes: `batch`, `sequence` and `past_sequence`.

    The caches' shapes are those that the model itself makes in a prefill, so they hold where head_dim is not
    hidden_size / num_attention_heads, and where layers differ.

    Raises:
        ExportError: a layer of the model caches anything but keys and values (state-space and linear-attention layers).
    """
    from transformers import DynamicCache

    # Not token 0: it is often the padding, whose embedding and so everything after it is zero.
    words = torch.Generator().manual_seed(0)
    size = int(model.config.get_text_config().vocab_size)
    tokens = torch.randint(size, (batch, past + new), generator=words)
    cache = DynamicCache()
    parameter = CachedDecoder(model).cache_parameter
    with torch.no_grad():
        model(input_ids=tokens[:, :past], use_cache=True, **{parameter: cache})
    expected = model.config.get_text_config().num_hidden_layers
    layers: list[Any] = [layer for layer in cache.layers if isinstance(getattr(layer, "keys", None), Tensor)]
    if len(layers) != expected or any(layer.keys.ndim != 4 or layer.keys.shape[2] != past for layer in layers):
        raise ExportError(
            f"{type(model).__name__} has layers that do not cache keys and values of all tokens; export it without a cache"
        )
    inputs = {
        "input_ids": tokens[:, past:].contiguous(),
        "attention_mask": torch.ones(batch, past + new, dtype=torch.int64),
        "position_ids": torch.arange(past, past + new).expand(batch, new).contiguous(),
        "past_key_values": [{"key": layer.keys.clone(), "value": layer.values.clone()} for layer in layers],
    }
    layer_axes = {part: {0: "batch", 2: "past_sequence"} for part in ("key", "value")}
    axes = {
        "input_ids": {0: "batch", 1: "sequence"},
        "attention_mask": {0: "batch", 1: "past_sequence + sequence"},
        "position_ids": {0: "batch", 1: "sequence"},
        "past_key_values": [layer_axes] * len(layers),
    }
    return inputs, axes
