"""Greedy text generation with an exported language model, with or without a key / value cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from qknorm_onnx.errors import InputError

if TYPE_CHECKING:
    import onnxruntime

PAST: Final = "past_key_values."
PRESENT: Final = "present."
NUMPY_TYPES: Final = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64}

TokenIds = npt.NDArray[np.int64]
Feeds = dict[str, npt.NDArray[Any]]


def generate(
    session: onnxruntime.InferenceSession,
    input_ids: TokenIds,
    *,
    max_new_tokens: int,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> TokenIds:
    """The most likely continuation, token by token.

    Args:
        session: a model from `input_ids` (B, S), and where it has them `attention_mask` (B, P + S), `position_ids` (B, S) and
            `past_key_values.{layer}.key | value` (B, Hkv, P, D), to `logits` (B, S, vocabulary) as its first output, and
            `present.{layer}.key | value`.
        input_ids: the prompts (B, S), all of one length.
        max_new_tokens: how many tokens to add.
        sizes: heads and head sizes of caches that the model only names, by that name: `{"kv_cache_dim": 128}`.

    Returns:
        Prompts and continuations, (B, S + max_new_tokens).

    Raises:
        InputError: the model has inputs that are none of the above, or a cache of a size that neither it nor `sizes` tells.
    """
    _require_known_inputs(session)
    tokens = np.asarray(input_ids, dtype=np.int64)
    past = dict(_empty_cache(session, tokens.shape[0], sizes))
    cached = 0
    for _ in range(max_new_tokens):
        outputs = _run(session, tokens[:, cached:], total=tokens.shape[1], past=past)
        if past:
            past = {PAST + name.removeprefix(PRESENT): value for name, value in outputs.items() if name.startswith(PRESENT)}
            cached = tokens.shape[1]
        logits = next(iter(outputs.values()))
        tokens = np.concatenate([tokens, logits[:, -1:].astype(np.float32).argmax(-1)], axis=1)
    return tokens


def _run(session: onnxruntime.InferenceSession, new_ids: TokenIds, *, total: int, past: Feeds) -> Feeds:
    batch, new = new_ids.shape
    available: Feeds = {
        "input_ids": new_ids,
        "attention_mask": np.ones((batch, total), dtype=np.int64),
        "position_ids": np.tile(np.arange(total - new, total, dtype=np.int64), (batch, 1)),
        **past,
    }
    feeds = {value.name: available[value.name] for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def _empty_cache(
    session: onnxruntime.InferenceSession, batch: int, sizes: Mapping[str, int]
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    for value in session.get_inputs():
        if value.name.startswith(PAST):
            _, num_heads, _, head_size = value.shape
            num_heads, head_size = (_known_size(value.name, size, sizes) for size in (num_heads, head_size))
            yield value.name, np.zeros((batch, num_heads, 0, head_size), dtype=NUMPY_TYPES[value.type])


def _known_size(name: str, size: int | str | None, sizes: Mapping[str, int]) -> int:
    known = size if isinstance(size, int) else sizes.get(str(size))
    if known is None:
        raise InputError(
            f"the model does not say how large {size!r} of its input {name!r} is; "
            f"say it, for example generate(..., sizes={{{str(size)!r}: 128}})"
        )
    return known


def _require_known_inputs(session: onnxruntime.InferenceSession) -> None:
    known = ("input_ids", "attention_mask", "position_ids")
    for value in session.get_inputs():
        if value.name not in known and not value.name.startswith(PAST):
            raise InputError(f"generation cannot feed the model's input {value.name!r}; it knows {', '.join(known)} and {PAST}*")
