"""What the modes of a validation have in common: they see operators, and go into the branch of `torch.cond` that is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, `operator` runs each operator of a module, in its stead.

    `torch.cond` is no operator of its own: the branch that its predicate chooses is run, seen like everything else.
    """

    supports_higher_order_operators = True

    def operator(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one operator."""
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """`operator`, or the branch of a `torch.cond`."""
        del types
        if func is not torch.ops.higher_order.cond:
            return self.operator(func, args, kwargs or {})
        predicate, if_true, if_false, operands = args
        with self:
            return (if_true if predicate else if_false)(*operands)
