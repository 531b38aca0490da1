"""Repeats by a tensor of one number, as by the number itself: the size of the result is known then.

Code that prepares for older exporters keeps sizes in tensors (Cosmos of diffusers repeats key heads so).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class ScalarRepeats(TorchFunctionMode):
    """Inside this context `repeat_interleave` is given a number in the place of a tensor without axes."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Replaces the second argument of `repeat_interleave`."""
        del types
        kwargs = dict(kwargs or {})
        if func in (torch.repeat_interleave, Tensor.repeat_interleave):
            args = [*args[:1], *(_number(item) for item in args[1:])]
            kwargs |= {"repeats": _number(kwargs["repeats"])} if "repeats" in kwargs else {}
        return func(*args, **kwargs)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.ndim == 0 else value
