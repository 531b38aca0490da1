"""SOURCE, the PyTorch side of `export` and `validate`: a Hugging Face folder or `package.module:factory`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qknorm_onnx.errors import InputError

if TYPE_CHECKING:
    import torch

    from qknorm_onnx.torch_export.load import LoadedSource

source_argument = click.argument("source")

with_past_option = click.option(
    "--with-past", is_flag=True, help="A language model with its key / value cache as inputs and outputs."
)


logits_option = click.option(
    "--logits",
    type=click.Choice(["last", "all"]),
    default=None,
    help="With a cache: logits of each row's last token, or of all new ones.  [default: last for a folder, all for a file]",
)


def load(source: str, *, with_past: bool, dtype: str | None = None, logits: str = "all") -> LoadedSource:
    """The module of `source` with example inputs. Modules of the current folder can be named, as with `python -m`."""
    require_torch()
    from qknorm_onnx.torch_export.load import load_source

    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    return load_source(source, with_past=with_past, dtype=dtype_named(dtype), logits="last" if logits == "last" else "all")


def require_torch() -> None:
    """Raises InputError that says how to install PyTorch, where it is missing."""
    try:
        import torch  # noqa: F401

        import qknorm_onnx.torch_export  # noqa: F401
    except ImportError as error:
        raise InputError(f"exporting needs torch ({error}); run: pip install 'qknorm-onnx[torch,hf]'") from error


def dtype_named(name: str | None) -> torch.dtype | None:
    """PyTorch's type of that name."""
    import torch

    return getattr(torch, name) if name else None
