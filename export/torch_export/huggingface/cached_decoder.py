"""A Hugging Face causal language model as a graph with an explicit key / value cache, named as onnxruntime's tools name it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qknorm_onnx.errors import ExportError
from qknorm_onnx.serving.decoder_ports import LogitsKept

LayerCache = Mapping[str, Tensor]


class CachedDecoder(nn.Module):
    """`model` with the cache as tensors: inputs `past_key_values.{i}.key | value`, outputs `present.{i}.key | value`.

    Keys and values are (B, Hkv, P, D); keys are cached after norm and rotary. `logits` is "all", or "last": of each row's last
    new token that its mask lets through, wherever the padding is, so that a prompt costs one row of the head.
    """

    def __init__(self, model: nn.Module, *, logits: LogitsKept = "all") -> None:
        super().__init__()
        self.model = model
        self.logits: LogitsKept = logits
        self.training = model.training
        parameters = inspect.signature(model.forward).parameters
        # `cache` since transformers 5.2x, `past_key_values` before
        self.cache_parameter = "cache" if "cache" in parameters else "past_key_values"

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past_key_values: Sequence[LayerCache]
    ) -> dict[str, Any]:
        """Logits of the new tokens, (B, S, vocabulary) or of the last one (B, 1, vocabulary), and the cache that holds them too.

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
        with self._head_reads(attention_mask[:, -input_ids.shape[1] :]):
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

    @contextlib.contextmanager
    def _head_reads(self, new_mask: Tensor) -> Iterator[None]:
        """While it lasts, the head sees the hidden states (B, S, H) of the wanted tokens only; `new_mask` is (B, S)."""
        if self.logits == "all":
            yield
            return

        def pick(_head: nn.Module, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            places = torch.arange(new_mask.shape[1], device=new_mask.device)
            last = (places * (new_mask != 0)).amax(dim=1)  # 0 for a row without tokens
            picked = states[0].gather(1, last[:, None, None].expand(-1, 1, states[0].shape[2]))
            return (picked, *states[1:])

        handle = self.model.get_output_embeddings().register_forward_pre_hook(pick)  # type: ignore[operator]
        try:
            yield
        finally:
            handle.remove()


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
