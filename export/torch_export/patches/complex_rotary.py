"""Complex numbers as pairs of real tensors, while a module is exported.

Rotary embedding is often written with complex numbers (Llama 4: `torch.polar`, `view_as_complex`, a product,
`view_as_real`), which ONNX has not. Inside `RealArithmetic` these functions give and take `ComplexPair`s instead: the
same numbers, (a + bi)(c + di) = (ac - bd) + (ad + bc)i. No module is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Function = Callable[..., Any]

# Functions that move values about and can be done to both parts alike; the last axis of a pair is the tensors' own.
_LAYOUT_METHODS = frozenset(
    {
        "__getitem__",
        "clone",
        "contiguous",
        "detach",
        "expand",
        "flatten",
        "index_select",
        "movedim",
        "narrow",
        "permute",
        "repeat",
        "repeat_interleave",
        "reshape",
        "select",
        "squeeze",
        "swapaxes",
        "to",
        "transpose",
        "unflatten",
        "unsqueeze",
        "view",
    }
)


class ComplexPair:
    """A complex tensor as its real and imaginary part, both real tensors of one shape."""

    def __init__(self, real: Tensor, imag: Tensor) -> None:
        self.real = real
        self.imag = imag

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What a torch function does where one argument is a pair."""
        del types
        name = getattr(func, "__name__", "")
        if name in ("mul", "multiply", "__mul__", "__rmul__"):
            return _product(*args)
        if func is torch.view_as_real:
            return torch.stack([args[0].real, args[0].imag], dim=-1)
        if name in _LAYOUT_METHODS and isinstance(args[0], ComplexPair):
            return args[0]._both(name, *args[1:], **dict(kwargs or {}))
        # Anything else on real complex tensors: what cannot be exported then is the exporter's to say.
        plain = [torch.complex(a.real, a.imag) if isinstance(a, ComplexPair) else a for a in args]
        return func(*plain, **dict(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name in _LAYOUT_METHODS:
            return lambda *args, **kwargs: self._both(name, *args, **kwargs)
        return getattr(self.real, name)  # shape, device, size() ...

    def __getitem__(self, index: Any) -> ComplexPair:
        return ComplexPair(self.real[index], self.imag[index])

    def __mul__(self, other: Any) -> ComplexPair:
        return _product(self, other)

    __rmul__ = __mul__

    def _both(self, name: str, *args: Any, **kwargs: Any) -> ComplexPair:
        return ComplexPair(getattr(self.real, name)(*args, **kwargs), getattr(self.imag, name)(*args, **kwargs))

    def conj(self) -> ComplexPair:
        """The complex conjugate."""
        return ComplexPair(self.real, -self.imag)


def _product(left: Any, right: Any) -> ComplexPair:
    if not isinstance(left, ComplexPair):
        left, right = right, left
    if isinstance(right, Tensor) and right.is_complex():
        right = ComplexPair(right.real, right.imag)
    if isinstance(right, ComplexPair):
        real = left.real * right.real - left.imag * right.imag
        return ComplexPair(real, left.real * right.imag + left.imag * right.real)
    if isinstance(right, (int, float)) and right == 1:
        return left
    return ComplexPair(left.real * right, left.imag * right)


class RealArithmetic(TorchFunctionMode):
    """Inside this context `torch.polar` and `view_as_complex` make pairs; `used` says whether they were called."""

    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def __torch_function__(
        self, func: Function, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Replaces the two functions that make complex tensors."""
        del types
        if func is torch.polar and not (kwargs or {}).get("out"):
            self.used = True
            magnitude, angle = _polar_arguments(*args, **dict(kwargs or {}))
            return ComplexPair(magnitude * torch.cos(angle), magnitude * torch.sin(angle))
        if func is torch.view_as_complex:
            self.used = True
            return ComplexPair(args[0][..., 0], args[0][..., 1])
        return func(*args, **dict(kwargs or {}))


def _polar_arguments(abs: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002 (torch.polar's own names)
    return abs, angle
