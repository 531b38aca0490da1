"""A folder of onnxruntime-genai's builder with its attention fused: `qk.fuse_folder`."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir

from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.model_file import load_model
from qknorm_onnx.pipeline import Program, fuse
from qknorm_onnx.serving.decoder_folder import DecoderFolder, open_decoder_folder
from qknorm_onnx.serving.folder_writing import copy_library, new_folder, require_free, write_json
from qknorm_onnx.serving.genai_config import CONFIG_NAME
from qknorm_onnx.serving.json_files import read_object
from qknorm_onnx.spec.targets import DEFAULT_TARGET


def fuse_folder(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    target: str = DEFAULT_TARGET,
    provider: str = "cpu",
    verify: bool = True,
    require_fusion: bool = False,
    for_onnxruntime: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Program:
    """Fuse the decoder of a folder that onnxruntime-genai loads, and write the folder `out`, which it loads too.

    Caches stay in place where they did: the attention writes into a buffer that has room. Everything else of the folder is
    copied; `genai_config.json` names the kernel library, which lies beside it.

    Args:
        folder: holds `genai_config.json` and the model that it names, as onnxruntime-genai's builder writes them.
        out: a folder that is not there yet, or empty; nothing is left there where this fails.
        target: as `qk.fuse` takes it.
        provider: as `qk.fuse` takes it.
        verify: as `qk.fuse` takes it.
        require_fusion: as `qk.fuse` takes it.
        for_onnxruntime: as `qk.fuse` takes it.
        progress: called with the name of each stage as it begins.

    Raises:
        InputError: no such folder, `out` holds something, lies inside `folder` or cannot be written, the configuration names a
            library of its own already, the folder holds a link to a folder or what is no file, or the model cannot be read.
        FusionRequiredError: `require_fusion`, and something was missed.
    """
    place = Path(out)
    require_free(place)
    opened = open_decoder_folder(folder)
    _require_copyable(opened, place)
    config = read_object(opened.path / CONFIG_NAME)
    options = _session_options(opened, config)
    program = fuse(
        opened.model_path,
        target=target,
        provider=provider,
        verify=verify,
        require_fusion=require_fusion,
        for_onnxruntime=for_onnxruntime,
        progress=progress,
    )
    weights = {opened.model_path.resolve(), *_weight_files(opened.model_path)}
    with new_folder(place) as staged:
        program.save(staged / opened.model_path.name)
        _copy_others(opened.path, staged, weights)
        library, note = copy_library(program, staged, provider)
        if library is not None:
            options["custom_ops_library"] = library
        write_json(staged / CONFIG_NAME, config)
    notes = (*program.report.notes, *([note] if note else []))
    return dataclasses.replace(program, report=dataclasses.replace(program.report, notes=notes))


def _session_options(opened: DecoderFolder, config: dict[str, Any]) -> dict[str, Any]:
    """The decoder's session options in `config`, to be filled in. Raises InputError: they are none, or name a library."""
    file = opened.path / CONFIG_NAME
    options = config["model"]["decoder"].setdefault("session_options", {})
    if not isinstance(options, dict):
        raise InputError(f"{file} is damaged (session_options is no object); write the folder again")
    if named := options.get("custom_ops_library"):
        raise InputError(
            f"{file} names the library {named} already, and onnxruntime-genai loads one: fuse the folder that the builder wrote"
        )
    return options


def _require_copyable(opened: DecoderFolder, out: Path) -> None:
    """Raises InputError where a copy would not be the same folder, or would not end.

    Links to files are followed: caches of model hubs consist of them. A link to a folder may lead round in a circle.
    """
    if opened.model_path.parent != opened.path:
        raise InputError(
            f"{opened.path / CONFIG_NAME} names {opened.model_path.relative_to(opened.path)}: put the model beside {CONFIG_NAME}"
        )
    if out.resolve().is_relative_to(opened.path.resolve()):
        raise InputError(f"{out} lies inside {opened.path}, which is to be copied: name a folder elsewhere")
    for place, folders, files in os.walk(opened.path):
        for path in (Path(place, name) for name in folders):
            if path.is_symlink():
                raise InputError(f"{path} is a link to a folder: put the folder itself there, or remove it")
        for path in (Path(place, name) for name in files):
            if not path.is_file():
                raise InputError(f"{path} is no file that can be copied, or a link to nothing: remove it")


def _weight_files(model_path: Path) -> Iterator[Path]:
    """The files beside a model that hold its weights."""
    for value in load_model(model_path).graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            yield (model_path.parent / value.const_value.location).resolve()


def _copy_others(source: Path, folder: Path, without: set[Path]) -> None:
    """Copy what is neither the model nor its weights, and what is not written yet."""
    for path in sorted(source.iterdir()):
        copy = folder / path.name
        if path.resolve() in without or copy.exists() or path.name == CONFIG_NAME:
            continue
        if path.is_dir():
            shutil.copytree(path, copy)
        else:
            shutil.copyfile(path, copy)
