"""The programs of `examples/`, imported as they import each other: by name, from their own folder."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest

MODULES = ("diffusion", "drawn_shapes", "small_dit")


@pytest.fixture(scope="module")
def diffusion(repo_root):
    """The modules of the diffusion example, by name; PyTorch's number of threads is put back."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("PIL")
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repo_root / "examples"))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        sys.modules.pop(name, None)
    torch.set_num_threads(threads)
