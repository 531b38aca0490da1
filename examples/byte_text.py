"""Text as bytes: the whole tokenizer of the example model `byte_qwen3`.

A token id is a byte of the UTF-8 text, 0..255. Byte 0 never occurs in text, so it marks the start of a document
(the model's `bos_token_id`) and with it the end of the one before (its `eos_token_id`).
"""

from __future__ import annotations

from collections.abc import Iterable

DOCUMENT_MARK = 0
VOCABULARY_SIZE = 256


def encode(text: str) -> list[int]:
    """Return the token ids of `text`, one per UTF-8 byte; no document mark is added.

    Raises ValueError if the text contains U+0000, which the model reads as a document mark.
    """
    ids = list(text.encode("utf-8"))
    if DOCUMENT_MARK in ids:
        raise ValueError("the text contains U+0000, which is the model's document mark; remove it before encoding")
    return ids


def decode(ids: Iterable[int]) -> str:
    """Return the text of token ids; document marks are left out, a cut or broken UTF-8 sequence becomes U+FFFD.

    Raises ValueError if an id is not a byte.
    """
    return bytes(i for i in ids if i != DOCUMENT_MARK).decode("utf-8", errors="replace")
