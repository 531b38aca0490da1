"""Writes a decoder's folder: as a whole, or not at all."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import qknorm_onnx.custom_ops as custom_ops
from qknorm_onnx.errors import InputError
from qknorm_onnx.pipeline import Program
from qknorm_onnx.runtime.native_kernels import native_kernels_for
from qknorm_onnx.serving.decoder_ports import TOKEN_INPUTS, read_ports
from qknorm_onnx.serving.genai_config import CONFIG_NAME, MODEL_NAME, Serving, genai_config

# What a tokenizer and a chat are read from; the configuration goes along for tools that know the family by it.
TOKENIZER_NAMES: Final = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
CONFIGURATION_NAMES: Final = ("config.json", "generation_config.json")


def write_decoder_folder(
    program: Program,
    out: Path,
    *,
    source: Path,
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    provider: str,
    shared_cache: bool,
) -> tuple[str, ...]:
    """Write `program` and all that serving it takes into the new folder `out`; returns notes for people.

    Args:
        program: a decoder with its cache.
        out: a folder that is not there yet, or empty.
        source: the Hugging Face folder; its tokenizer and configuration files are copied.
        config: config.json of the text model.
        generation: generation_config.json.
        provider: "cpu" or "cuda": where onnxruntime-genai runs it.
        shared_cache: whether one buffer may be the past and the present.

    Raises:
        InputError: `out` holds something, or cannot be written; `program` is no decoder with its cache.
    """
    ports = read_ports(program.model)
    inputs = tuple(str(value.name) for value in program.model.graph.inputs if value.name in TOKEN_INPUTS)
    notes = []
    if not ports.is_uniform:
        notes.append(
            "layers have caches of different sizes, which onnxruntime-genai cannot allocate; qk.generate serves the folder"
        )
    with new_folder(out) as folder:
        program.save(folder / MODEL_NAME)
        copied = copy_files(source, folder, (*TOKENIZER_NAMES, *CONFIGURATION_NAMES))
        if "tokenizer.json" not in copied:
            notes.append(f"{source} has no tokenizer.json: put one into {out}, or generate from token ids only")
        library, note = copy_library(program, folder, provider)
        notes += [note] if note else []
        serving = Serving(library=library, provider=provider, shared_cache=shared_cache)
        written = genai_config(config, generation, ports, inputs, serving)
        write_json(folder / CONFIG_NAME, written)
    return tuple(notes)


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `out` when all went well and is gone when not.

    Raises:
        InputError: something is in the way, or `out` cannot be made.
    """
    require_free(out)
    staged = None
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
        staged.chmod(0o755)
        yield staged
        if out.is_dir():
            out.rmdir()  # it is empty; one that was filled meanwhile stays
        staged.rename(out.absolute())
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        if staged is not None and staged.exists():
            shutil.rmtree(staged)


def require_free(out: Path) -> None:
    """Raises InputError unless `out` is not there yet, or is an empty folder."""
    if out.is_dir():
        if any(out.iterdir()):
            raise InputError(f"{out} is a folder with something in it: name a new one, or empty it first")
    elif out.exists():
        raise InputError(f"{out} is a file: name a folder, or a file that ends in .onnx")


def copy_files(source: Path, folder: Path, names: tuple[str, ...]) -> frozenset[str]:
    """Copy those of `names` that `source` has; returns which."""
    there = [name for name in names if (source / name).is_file()]
    for name in there:
        shutil.copyfile(source / name, folder / name)
    return frozenset(there)


def copy_library(program: Program, folder: Path, provider: str) -> tuple[str | None, str]:
    """Copy the kernel library where it serves the program; its name, and a note where it does not."""
    kernels = native_kernels_for(program.model, provider="cuda" if provider == "cuda" else "cpu")
    if kernels.library is None:
        return None, f"the folder has no kernel library: {kernels.reason}"
    shutil.copyfile(kernels.library, folder / kernels.library.name)
    if provider == "cuda":
        pack = custom_ops.kernel_pack_path()
        shutil.copytree(pack, folder / pack.name)
    return kernels.library.name, ""


def write_json(path: Path, contents: Mapping[str, Any]) -> None:
    """Readable, in the order given."""
    path.write_text(json.dumps(contents, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
