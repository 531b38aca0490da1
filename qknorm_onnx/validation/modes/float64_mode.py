"""Runs a module in float64 although its code names float32: norms, rotary tables and softmax often do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from qknorm_onnx.validation.modes.operator_mode import OperatorMode

_RAISED = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


class InFloat64(OperatorMode):  # type: ignore[no-untyped-call]
    """While active, every operator that asks for or would give a narrower float computes in float64 instead.

    `x.float()`, `softmax(dtype=torch.float32)` and new tensors in float32 thus lose nothing. A float32 tensor that the
    module holds keeps its value; a Python number that would have become float32 is not rounded.
    """

    def operator(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one operator with raised arguments, and raise what it returns."""
        return _raised(func(*_raised(tuple(args)), **_raised(dict(kwargs))))


def _raised(value: Any) -> Any:
    """Types and tensors raised, inside lists, tuples and dictionaries as well: operators take and give nothing deeper."""
    if type(value) in (tuple, list):
        return type(value)(_raised(item) for item in value)
    if type(value) is dict:
        return {key: _raised(item) for key, item in value.items()}
    if isinstance(value, torch.dtype):
        return _RAISED.get(value, value)
    if isinstance(value, torch.Tensor) and value.dtype in _RAISED:
        return value.to(_RAISED[value.dtype])
    return value
