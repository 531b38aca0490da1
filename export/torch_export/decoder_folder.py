"""From a Hugging Face folder to a folder that serves its language model: `qk.export_folder`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from qknorm_onnx.errors import ExportError
from qknorm_onnx.graph.passes.read_cache_lengths import stays_in_place
from qknorm_onnx.pipeline import Program
from qknorm_onnx.serving.decoder_ports import LogitsKept
from qknorm_onnx.serving.folder_writing import require_free, write_decoder_folder
from qknorm_onnx.torch_export.exporter import export
from qknorm_onnx.torch_export.load import LoadedSource, load_source


def export_folder(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    logits: LogitsKept = "last",
    dtype: torch.dtype | None = None,
    provider: str = "cpu",
    progress: Callable[[str], None] | None = None,
    export_module: Callable[..., Program] = export,
    **options: Any,
) -> Program:
    """As `checked_export.export_folder`; `export_module` makes the program, from the arguments of `exporter.export`."""
    target_folder, source_folder = Path(out), Path(source)
    require_free(target_folder)
    if not source_folder.is_dir():
        raise ExportError(f"{source_folder}: a folder is made from a folder with a Hugging Face model, and this is none")
    say = progress or (lambda _stage: None)
    say("load the module")
    loaded = load_source(str(source_folder), with_past=True, dtype=dtype, logits=logits)
    program = export_module(
        loaded.module,
        loaded.args,
        loaded.kwargs,
        dynamic_shapes=loaded.dynamic_shapes,
        provider=provider,
        progress=progress,
        **options,
    )
    say("save")
    notes = (*loaded.notes, *program.report.notes, *_write(program, target_folder, loaded, source_folder, provider))
    return dataclasses.replace(program, report=dataclasses.replace(program.report, notes=notes))


def _write(program: Program, out: Path, loaded: LoadedSource, source: Path, provider: str) -> tuple[str, ...]:
    model: Any = loaded.module.model
    return write_decoder_folder(
        program,
        out,
        source=source,
        config=model.config.get_text_config().to_dict(),
        generation=model.generation_config.to_dict() if getattr(model, "generation_config", None) else {},
        provider=provider,
        shared_cache=stays_in_place(program.model.graph),
    )
