"""Complex numbers as pairs of real tensors, while a module is exported.

Rotary embedding is often written with complex numbers (Llama 4, Qwen-Image, Lumina: `torch.polar`, `view_as_complex`, a product,
`view_as_real`), which ONNX has not. Inside `RealArithmetic` these functions give and take `ComplexPair`s instead: the
same numbers, (a + bi)(c + di) = (ac - bd) + (ad + bc)i. No module is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from qknorm_onnx.torch_export.patches.complex_pair import FUNCTIONS, REAL_OF, ComplexPair, applied, pair_of, polar

Function = Callable[..., Any]


class RealArithmetic(TorchFunctionMode):
    """Inside this context complex tensors become pairs where they are made or used; `used` says whether there were any."""

    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def __torch_function__(
        self, func: Function, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Replaces the functions that make complex tensors, and those of complex tensors that the module holds."""
        del types
        kwargs = kwargs or {}
        if func in _MAKERS and kwargs.get("out") is None:
            self.used = True
            return _MAKERS[func](*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _CREATORS and kwargs.get("dtype") in REAL_OF:
            self.used = True
            real = func(*args, **{**kwargs, "dtype": REAL_OF[kwargs["dtype"]]})
            return ComplexPair(real, torch.zeros_like(real))
        part = _PARTS.get(func)
        if part is not None and _is_complex(args[0]):
            return getattr(pair_of(args[0]), part)
        if name in FUNCTIONS and func is not Tensor.__setitem__ and any(map(_makes_complex, pytree.tree_leaves((args, kwargs)))):
            self.used = True
            return applied(func, args, kwargs)
        return func(*args, **kwargs)


def _makes_complex(value: Any) -> bool:
    """Whether a function that is given `value` has a complex tensor in it or for a result."""
    return isinstance(value, complex) or (isinstance(value, torch.dtype) and value in REAL_OF) or _is_complex(value)


def _is_complex(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in REAL_OF


def _pair_of_last_axis(tensor: Tensor) -> ComplexPair:
    return ComplexPair(tensor[..., 0], tensor[..., 1])


def _polar(abs: Tensor, angle: Tensor) -> ComplexPair:  # noqa: A002 (torch.polar's own names)
    return polar(abs, angle)


_MAKERS: Final[Mapping[Any, Function]] = {
    torch.polar: _polar,
    torch.complex: lambda real, imag: ComplexPair(real, imag),
    torch.view_as_complex: _pair_of_last_axis,
}
_CREATORS: Final = ("zeros", "ones", "empty", "full", "new_zeros", "new_empty")
_PARTS: Final[Mapping[Any, str]] = {
    Tensor.real.__get__: "real",  # type: ignore[attr-defined]
    Tensor.imag.__get__: "imag",  # type: ignore[attr-defined]
}
