"""Operators of PyTorch that torch.onnx (2.13) translates wrong, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnxscript import opset18 as op


def squeeze_dim(data: Any, dim: int) -> Any:
    """Translation of `aten::squeeze.dim`."""
    return squeeze_dims(data, [dim])


def squeeze_dims(data: Any, dim: Sequence[int]) -> Any:
    """Translation of `aten::squeeze.dims`: an axis of another size than 1 stays, where ONNX's Squeeze is an error (LTX-2).

    A dynamic size is not 1: torch.export makes an axis static that was exported as 1.
    """
    axes = [axis for axis in dim if len(data.shape) and data.shape[axis] == 1]
    if not axes:
        return op.Identity(data)
    places: Any = op.Constant(value_ints=axes)
    return op.Squeeze(data, places)


def stable_sort(data: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """Translation of `aten::sort.stable`: of equal values, TopK gives the one with the lower index first."""
    del stable
    if not len(data.shape):
        return op.Identity(data), op.Constant(value_int=0)
    axis = dim % len(data.shape)
    size = op.Shape(data, start=axis, end=axis + 1)
    return op.TopK(data, size, axis=dim, largest=int(descending), sorted=1)


def expm1(x: Any) -> Any:
    """Translation of `aten::expm1`, which torch.onnx writes as Exp(x) - 1: nothing of it is left near 0 (xIELU in Apertus).

    e^x - 1 = tanh(x / 2) (e^x + 1), in which nothing cancels.
    """
    half, one = (_number(number, x) for number in (0.5, 1.0))
    return op.Mul(op.Tanh(op.Mul(x, half)), op.Add(op.Exp(x), one))


def log1p(x: Any) -> Any:
    """Translation of `aten::log1p`, which torch.onnx writes as Log(1 + x): near 0 it is 2 atanh(x / (x + 2)) instead."""
    zero, limit, one, two = (_number(number, x) for number in (0.0, 0.25, 1.0, 2.0))
    near = op.Less(op.Abs(x), limit)
    # Where it is not taken, the other way must not see values that it has no result for.
    small = op.Where(near, x, zero)
    series = op.Mul(two, op.Atanh(op.Div(small, op.Add(small, two))))
    return op.Where(near, series, op.Log(op.Add(x, one)))


def _number(number: float, like: Any) -> Any:
    """A constant in the type of `like`."""
    constant: Any = op.Constant(value_float=number)
    return op.CastLike(constant, like)
