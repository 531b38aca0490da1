"""Fixtures that every test may use."""

from __future__ import annotations

import importlib
import os
import pathlib
from types import ModuleType

import hypothesis
import pytest

REPO_ROOT = pathlib.Path(__file__).resolve().parents[1]

IN_CI = os.environ.get("CI", "").lower() in ("1", "true")

# The tests of the CUDA kernels run them in Triton's interpreter, which must be chosen before anything imports Triton.
os.environ.setdefault("TRITON_INTERPRET", "1")

# In CI a run is repeatable; at home every run tries other examples.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.register_profile("searching", deadline=None)
hypothesis.settings.load_profile("repeatable" if IN_CI else "searching")


@pytest.fixture(scope="session")
def repo_root() -> pathlib.Path:
    """The top folder of the repository."""
    return REPO_ROOT


@pytest.fixture(scope="session")
def zoo() -> ModuleType:
    """The model zoo: `zoo.ZOO[name](attention)` -> (module, kwargs, dynamic axes, tags)."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    return importlib.import_module("tests.zoo")
