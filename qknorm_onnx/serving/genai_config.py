"""`genai_config.json`, which tells onnxruntime-genai (0.18) what a decoder's file takes, and how its text ends.

The fields are those of onnxruntime-genai's `src/config.h`. The family is `decoder`, its name for any model from tokens and a
cache to logits: the list of other names lacks most families with QK-Norm, and says nothing more about their graphs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from qknorm_onnx.errors import InputError
from qknorm_onnx.serving.decoder_ports import KEY, LOGITS, PRESENT_KEY, PRESENT_VALUE, TOKEN_INPUTS, VALUE, DecoderPorts

CONFIG_NAME: Final = "genai_config.json"
MODEL_NAME: Final = "model.onnx"
FAMILY: Final = "decoder"

# A cache in one buffer is allocated for this many tokens at once, unless the caller says another length.
LONGEST_BY_DEFAULT: Final = 4096

_CONTEXT_FIELDS: Final = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
_DEFAULT_TOP_K: Final = 50  # transformers' own, where a generation_config.json samples and says none


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving:
    """How a session is made for the file: the kernel library beside it, and the provider's options."""

    library: str | None
    provider: str
    shared_cache: bool


def genai_config(
    config: Mapping[str, Any], generation: Mapping[str, Any], ports: DecoderPorts, inputs: tuple[str, ...], serving: Serving
) -> dict[str, Any]:
    """The contents of `genai_config.json`.

    Args:
        config: config.json of the text model.
        generation: generation_config.json; what it does not say is taken from `config`.
        ports: what the graph takes and gives.
        inputs: which of `input_ids`, `attention_mask` and `position_ids` the graph has.
        serving: the library and the provider.

    Raises:
        InputError: config.json does not say how long a text the model reads.
    """
    context = next((int(config[name]) for name in _CONTEXT_FIELDS if config.get(name)), None)
    if context is None:
        raise InputError(f"config.json does not say how many tokens the model reads: add {_CONTEXT_FIELDS[0]!r}")
    cache = ports.caches[0]
    eos = token_ids(_said("eos_token_id", generation, config))
    bos, pad = (token_ids(_said(name, generation, config)) for name in ("bos_token_id", "pad_token_id"))
    session: dict[str, Any] = {"log_id": "onnxruntime-genai", "provider_options": _providers(serving.provider)}
    if serving.library is not None:
        session["custom_ops_library"] = serving.library
    return {
        "model": {
            "type": FAMILY,
            "bos_token_id": (bos or eos or [0])[0],
            "eos_token_id": eos,
            "pad_token_id": (pad or eos or [0])[0],
            "context_length": context,
            "vocab_size": ports.vocabulary,
            "decoder": {
                "session_options": session,
                "filename": MODEL_NAME,
                "head_size": cache.head_size,
                "hidden_size": int(config.get("hidden_size") or 0),
                "num_attention_heads": int(config.get("num_attention_heads") or cache.num_heads),
                "num_hidden_layers": len(ports.caches),
                "num_key_value_heads": cache.num_heads,
                "inputs": _input_names(inputs),
                "outputs": {
                    "logits": LOGITS,
                    "present_key_names": PRESENT_KEY.format("%d"),
                    "present_value_names": PRESENT_VALUE.format("%d"),
                },
            },
        },
        "search": _search(generation, min(context, LONGEST_BY_DEFAULT), shared_cache=serving.shared_cache),
    }


def token_ids(said: Any) -> list[int]:
    """One id, several or none, as a list."""
    if said is None:
        return []
    return [int(token) for token in said] if isinstance(said, (list, tuple)) else [int(said)]


def _said(name: str, generation: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    said = generation.get(name)
    return config.get(name) if said is None else said


def _providers(provider: str) -> list[dict[str, Any]]:
    return [{"cuda": {}}] if provider == "cuda" else []


def _input_names(inputs: tuple[str, ...]) -> dict[str, str]:
    names: dict[str, str] = {name: name for name in TOKEN_INPUTS if name in inputs}
    return {**names, "past_key_names": KEY.format("%d"), "past_value_names": VALUE.format("%d")}


def _search(generation: Mapping[str, Any], longest: int, *, shared_cache: bool) -> dict[str, Any]:
    def said(name: str, default: Any) -> Any:
        value = generation.get(name)
        return default if value is None else value

    return {
        "diversity_penalty": 0.0,
        "do_sample": bool(said("do_sample", False)),
        "early_stopping": True,
        "length_penalty": 1.0,
        "max_length": longest,
        "min_length": 0,
        "no_repeat_ngram_size": 0,
        "num_beams": 1,
        "num_return_sequences": 1,
        "past_present_share_buffer": shared_cache,
        "repetition_penalty": float(said("repetition_penalty", 1.0)),
        "temperature": float(said("temperature", 1.0)),
        "top_k": int(said("top_k", _DEFAULT_TOP_K)),
        "top_p": float(said("top_p", 1.0)),
    }
