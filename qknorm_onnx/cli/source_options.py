"""SOURCE, the PyTorch side of `export` and `validate`: a Hugging Face folder or `package.module:factory`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qknorm_onnx.errors import InputError

if TYPE_CHECKING:
    from qknorm_onnx.torch_export.load import LoadedSource

source_argument = click.argument("source")

with_past_option = click.option(
    "--with-past", is_flag=True, help="A language model with its key / value cache as inputs and outputs."
)


def load(source: str, *, with_past: bool, dtype: str | None = None) -> LoadedSource:
    """The module of `source` with example inputs. Modules of the current folder can be named, as with `python -m`."""
    try:
        import torch

        from qknorm_onnx.torch_export.load import load_source
    except ImportError as error:
        raise InputError(f"exporting needs torch ({error}); run: pip install 'qknorm-onnx[torch,hf]'") from error
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    return load_source(source, with_past=with_past, dtype=getattr(torch, dtype) if dtype else None)
