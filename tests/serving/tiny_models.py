"""Hugging Face folders of tiny decoders with random weights, whose tokens are bytes."""

from __future__ import annotations

import json

import torch
import transformers

DOCUMENT = 0  # byte 0 is no text: it is the padding, and ends a text
SECOND_END = 7
WINDOW = 8
SIZES = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": DOCUMENT,
    "eos_token_id": DOCUMENT,
    "pad_token_id": DOCUMENT,
}
WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
# Family -> the names of its configuration and model in transformers, and what its configuration has besides.
FAMILIES = {
    "qwen3": ("Qwen3", "Qwen3", {"tie_word_embeddings": True}),
    "gemma3": ("Gemma3Text", "Gemma3", WINDOWS),
    "olmo2": ("Olmo2", "Olmo2", {}),
    "cohere2": ("Cohere2", "Cohere2", WINDOWS),
    "exaone4": ("Exaone4", "Exaone4", {"sliding_window": WINDOW, "sliding_window_pattern": 2}),
    "llama4": (
        "Llama4Text",
        "Llama4",
        {"intermediate_size_mlp": 96, "num_local_experts": 2, "num_experts_per_tok": 1, "attention_chunk_size": 512},
    ),
    "qwen3_moe": ("Qwen3Moe", "Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
}


def random_decoder(family, *, seed=0):
    config_name, model_name, more = FAMILIES[family]
    config = getattr(transformers, f"{config_name}Config")(**{**SIZES, **more})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{model_name}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 0.2, generator=generator)
    return model


def write_folder(family, folder, *, ends=DOCUMENT, shard="5GB", dtype=torch.float32):
    """Model, configuration and tokenizer in `folder`; returns the model."""
    model = random_decoder(family).to(dtype)
    model.generation_config.eos_token_id = ends
    model.save_pretrained(folder, max_shard_size=shard)
    write_byte_tokenizer(folder)
    return model


def write_byte_tokenizer(folder):
    """tokenizer.json, in which a token is a byte of UTF-8; byte 0 is a special token."""
    vocabulary = {letter: byte for byte, letter in byte_letters().items()}
    del vocabulary[byte_letters()[DOCUMENT]]
    vocabulary["<|document|>"] = DOCUMENT
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    contents = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": DOCUMENT, "content": "<|document|>", "special": True, **flags}],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(contents), encoding="utf-8")
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<|document|>")
    template = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}<assistant>"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def byte_letters():
    """Byte -> the letter that byte-level tokenizers write for it: itself where it is printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {byte: chr(byte if byte in printable else next(others)) for byte in range(256)}
