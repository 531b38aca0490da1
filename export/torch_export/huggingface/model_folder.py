"""A Hugging Face model folder as a module whose weights are all there."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from qknorm_onnx.errors import ExportError, first_line
from qknorm_onnx.torch_export.module.weight_check import check_weights


def load_model_folder(folder: Path, *, dtype: torch.dtype | None = None) -> tuple[Any, tuple[str, ...]]:
    """The model of `folder` (config.json and safetensors) in evaluation mode, and notes.

    Args:
        folder: what `save_pretrained` wrote.
        dtype: type of the weights; None is that of the checkpoint.

    Raises:
        ExportError: no model there, transformers missing, weights missing, left over, of another shape, or NaN. Nothing is ever
            filled with random values.
    """
    architecture = _architecture(folder)
    try:
        import transformers
    except ImportError as error:
        raise ExportError("Hugging Face models need transformers: pip install 'qknorm-onnx[hf]'") from error
    model_class = getattr(transformers, architecture, None)
    if model_class is None:
        raise ExportError(f"{folder}: transformers {transformers.__version__} has no {architecture}; install a version that has")
    try:
        with _quiet():
            model, info = model_class.from_pretrained(
                str(folder),
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are in the info, with their names
                dtype=dtype or "auto",
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise ExportError(f"{folder} cannot be loaded: {first_line(error)}") from error
    except Exception as error:
        if type(error).__name__ == "SafetensorError":
            raise ExportError(f"{folder}: the safetensors file is damaged ({first_line(error)}); copy it again") from error
        raise
    notes = _check_keys(folder, info)
    check_weights(model)
    return model.eval(), notes


def _architecture(folder: Path) -> str:
    config = folder / "config.json"
    if not config.is_file():
        raise ExportError(f"{folder} has no config.json: give a folder that save_pretrained wrote")
    try:
        names = json.loads(config.read_text(encoding="utf-8")).get("architectures")
    except (ValueError, AttributeError) as error:
        raise ExportError(f"{config} is not a JSON object ({first_line(error)})") from error
    if not names:
        raise ExportError(f'{config} names no architecture: add "architectures": ["Qwen3ForCausalLM"] or the like')
    return str(names[0])


def _check_keys(folder: Path, info: Any) -> tuple[str, ...]:
    found: dict[str, Any] = info if isinstance(info, dict) else vars(info)
    missing = sorted(map(str, found.get("missing_keys") or ()))
    if missing:
        raise ExportError(f"{folder}: the checkpoint lacks {_listed(missing)}; transformers would make them up. Add the weights")
    mismatched = sorted(str(entry[0]) for entry in found.get("mismatched_keys") or ())
    if mismatched:
        raise ExportError(f"{folder}: {_listed(mismatched)} of the checkpoint do not have the shape that config.json says")
    unexpected = sorted(map(str, found.get("unexpected_keys") or ()))
    norms = [name for name in unexpected if "norm" in name]
    if norms:
        raise ExportError(
            f"{folder}: the model has no place for {_listed(norms)} of the checkpoint: config.json switches them off"
        )
    return (f"{folder}: {_listed(unexpected)} of the checkpoint are not used by the model",) if unexpected else ()


def _listed(names: list[str], *, limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' loading report and progress bars: what matters of it is checked."""
    from transformers.utils import logging as transformers_logging

    logger = logging.getLogger("transformers")
    level, bars = logger.level, transformers_logging.is_progress_bar_enabled()
    logger.setLevel(logging.CRITICAL)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
