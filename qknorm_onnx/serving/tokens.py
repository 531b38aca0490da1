"""Text to tokens and back, by the tokenizer in a folder; whole chats by its template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from qknorm_onnx.errors import InputError, first_line
from qknorm_onnx.serving.json_files import read_object

TOKENIZER_NAME: Final = "tokenizer.json"
_CONFIG_NAME: Final = "tokenizer_config.json"
_TEMPLATE_NAME: Final = "chat_template.jinja"


class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; `special`: with the tokens that the model expects at its borders."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, without special tokens; an incomplete letter is U+FFFD."""
        ...


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of `folder`, by the package `tokenizers`.

    onnxruntime-genai 0.18 has one of its own, which leaves out the tokens that a model expects at the beginning of a text.

    Raises:
        InputError: the folder has none, it is damaged, or the package is not installed.
    """
    file = folder / TOKENIZER_NAME
    if not file.is_file():
        raise InputError(f"{folder} has no {TOKENIZER_NAME}: copy the model's into it, or give token ids instead of text")
    try:
        import tokenizers
    except ImportError as error:
        raise InputError("text needs its tokenizer: pip install tokenizers (or 'qknorm-onnx[genai]')") from error
    try:
        return _FastTokenizer(tokenizers.Tokenizer.from_file(str(file)))
    except Exception as error:  # the package raises Exception itself
        raise InputError(f"{file} cannot be read: {first_line(error)}") from error


class _FastTokenizer:
    """A tokenizer of that package."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def as_chat(folder: Path, prompt: str) -> str:
    """`prompt` as a user's message in the chat template of `folder`, up to where the model answers.

    Templates come with a model, so they run in Jinja's sandbox.

    Raises:
        InputError: there is no template, it cannot be rendered, or Jinja2 is not installed.
    """
    config = _tokenizer_config(folder)
    template = _template(folder, config)
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise InputError("chat templates need Jinja2: pip install jinja2 (or 'qknorm-onnx[genai]')") from error
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.globals["raise_exception"] = _refuse
    special = {name: _content(config[name]) for name in ("bos_token", "eos_token", "pad_token", "unk_token") if config.get(name)}
    messages = [{"role": "user", "content": prompt}]
    try:
        return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **special)
    except Exception as error:  # whatever the template does
        raise InputError(f"the chat template of {folder} cannot be rendered: {first_line(error)}") from error


def _template(folder: Path, config: dict[str, Any]) -> str:
    file = folder / _TEMPLATE_NAME
    if file.is_file():
        return file.read_text(encoding="utf-8")
    said = config.get("chat_template")
    if isinstance(said, list):  # several, by name
        said = next((entry["template"] for entry in said if entry.get("name") == "default"), None)
    if not isinstance(said, str):
        raise InputError(
            f"{folder} has no chat template (neither {_TEMPLATE_NAME} nor one in {_CONFIG_NAME}): generate without it"
        )
    return said


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    file = folder / _CONFIG_NAME
    if not file.is_file():
        return {}
    return read_object(file)


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _refuse(message: str) -> None:
    raise InputError(message)
