"""Reads a decoder's folder, ours or one of onnxruntime-genai's builder."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qknorm_onnx.errors import InputError, first_line
from qknorm_onnx.serving.genai_config import CONFIG_NAME, token_ids
from qknorm_onnx.serving.json_files import read_object


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderFolder:
    """What `genai_config.json` says of the model beside it.

    `context_length`: the longest text, prompt and continuation, in tokens; `search`: how tokens are chosen where the caller does
    not say; `shared_cache`: one buffer may be the past and the present.
    """

    path: Path
    model_path: Path
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    context_length: int
    search: Mapping[str, Any]
    has_windows: bool

    @property
    def shared_cache(self) -> bool:
        """Whether the cache may stay in one buffer."""
        return bool(self.search.get("past_present_share_buffer", False))


def open_decoder_folder(path: str | os.PathLike[str]) -> DecoderFolder:
    """The folder at `path`. Raises InputError: no such folder, no or a damaged genai_config.json, or no model."""
    folder = Path(path)
    if not folder.is_dir():
        what = "a file: give the folder that it lies in" if folder.is_file() else "no such folder"
        raise InputError(f"{folder} is {what}")
    file = folder / CONFIG_NAME
    if not file.is_file():
        hint = "qknorm-onnx export HF_FOLDER OUT writes one"
        if (folder / "config.json").is_file():
            hint = f"it looks like a Hugging Face folder: qknorm-onnx export '{folder}' OUT makes one that can be served"
        raise InputError(f"{folder} has no {CONFIG_NAME}; {hint}")
    contents = read_object(file)
    has_windows = _has_windows(folder)
    try:
        model = contents["model"]
        opened = DecoderFolder(
            path=folder,
            model_path=folder / _inside(model["decoder"]["filename"]),
            eos_token_ids=tuple(token_ids(model.get("eos_token_id"))),
            pad_token_id=int(model.get("pad_token_id") or 0),
            context_length=int(model["context_length"]),
            search=dict(contents.get("search", {})),
            has_windows=has_windows,
        )
        found = opened.model_path.is_file()
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError) as error:
        raise InputError(f"{file} is damaged ({first_line(error)}); write the folder again") from error
    if not found:
        raise InputError(f"{file} names {opened.model_path.name}, which is not there")
    return opened


def _inside(filename: str) -> Path:
    """`filename` as a path below the folder. Raises ValueError: it leads out, and is none of this folder's files."""
    path = Path(filename)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"the model's filename {filename!r} leads out of the folder")
    return path


def _has_windows(folder: Path) -> bool:
    """Whether config.json, which the exporter put beside the model, names layers that do not see the whole text."""
    file = folder / "config.json"
    if not file.is_file():
        return False
    config = read_object(file)
    config = config.get("text_config", config)
    if not isinstance(config, dict):
        raise InputError(f"{file} is damaged (text_config is no object); write it again")
    layers = config.get("layer_types")
    if isinstance(layers, list) and layers:
        return any(layer != "full_attention" for layer in layers)
    return any(config.get(name) is not None for name in ("sliding_window", "attention_chunk_size"))
