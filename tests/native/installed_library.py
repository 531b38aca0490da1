"""The native library that is installed. Without it a test is skipped, except in CI, where that is an error."""

from __future__ import annotations

import functools
import os
import pathlib

import pytest

from qknorm_onnx import custom_ops
from tests.native.kernel_call import NativeLibrary


def installed_file() -> pathlib.Path:
    """The shared library."""
    try:
        return custom_ops.library_path()
    except FileNotFoundError as missing:
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(f"CI needs the native library: {missing}", pytrace=False)
        pytest.skip(str(missing))


@functools.cache
def installed_library() -> NativeLibrary:
    """The library behind its plain C door."""
    return NativeLibrary(installed_file())
