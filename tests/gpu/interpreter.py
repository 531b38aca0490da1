"""Triton's interpreter for the tests: on, before anything imports Triton, and mended for bfloat16 matrix products."""

from __future__ import annotations

import os
from typing import Any

import ml_dtypes
import numpy as np


def start() -> None:
    """Makes Triton interpret the kernels on the CPU. Must run before the first import of Triton."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    multiply = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        # The interpreter keeps bfloat16 as uint16 and multiplies the bit patterns.
        handles = [interpreter.TensorHandle(_as_float(x), interpreter.tl.float32) for x in (a, b)]
        return multiply(self, *handles, d, input_precision, max_num_imprecise_acc)

    builder.create_dot = create_dot


def _as_float(handle: Any) -> Any:
    data = handle.data
    is_bfloat16 = data.dtype == np.uint16
    return (data.view(ml_dtypes.bfloat16) if is_bfloat16 else data).astype(np.float32)
