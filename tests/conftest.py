"""Fixtures that every test may use."""

from __future__ import annotations

import importlib.util
import os
import pathlib
from types import ModuleType

import hypothesis
import pytest

REPO_ROOT = pathlib.Path(__file__).resolve().parents[1]
ZOO_PATH = REPO_ROOT.parent / "shared" / "zoo" / "zoo.py"

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
    """The collection of tiny models beside the repository: `zoo.ZOO[name]()` -> (module, kwargs, dynamic axes, tags).

    It is not part of the repository: without it a test is skipped, except in CI, where that is an error.
    """
    if not ZOO_PATH.is_file():
        if IN_CI:
            pytest.fail(f"CI needs the model zoo, and {ZOO_PATH.name} is not at ../shared/zoo/", pytrace=False)
        pytest.skip("the model zoo (../shared/zoo/zoo.py) is not beside this clone")
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("qknorm_zoo", ZOO_PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
