"""Text as bytes: the whole tokenizer of the example model `byte_qwen3`.

A token id is a byte of the UTF-8 text, 0..255. Byte 0 never occurs in text, so it marks the start of a document
(the model's `bos_token_id`) and with it the end of the one before (its `eos_token_id`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

DOCUMENT_MARK = 0
MARK = "<|document|>"  # how tokenizer.json spells it
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


def write_tokenizer(folder: Path) -> None:
    """Write this tokenizer as `tokenizer.json` and `tokenizer_config.json`, for transformers, onnxruntime-genai and others.

    Byte-level tokenizers write a byte as a letter: itself where it is printable, else one from U+0100 on. A text begins with the
    document mark, as the texts of the training did.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    letters = [chr(byte if byte in printable else next(others)) for byte in range(VOCABULARY_SIZE)]
    letters[DOCUMENT_MARK] = MARK
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    mark = {"SpecialToken": {"id": MARK, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    contents = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": DOCUMENT_MARK, "content": MARK, "special": True, **flags}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [mark, text],
            "pair": [mark, text, mark, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {MARK: {"id": MARK, "ids": [DOCUMENT_MARK], "tokens": [MARK]}},
        },
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {letter: byte for byte, letter in enumerate(letters)}, "merges": []},
    }
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), MARK)
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512}
    config = {**kind, "add_bos_token": True, "add_eos_token": False, **special}
    for name, written in (("tokenizer.json", contents), ("tokenizer_config.json", config)):
        (folder / name).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
