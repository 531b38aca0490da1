"""A module evaluated with its sums in another order: the same function, rounded in another, equally valid way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from qknorm_onnx.validation.modes.operator_mode import OperatorMode

_ATEN: Final = torch.ops.aten
# Place of the first factor among the arguments; the second one is behind it.
_PRODUCTS: Final = {_ATEN.mm.default: 0, _ATEN.bmm.default: 0, _ATEN.addmm.default: 1, _ATEN.baddbmm.default: 1}
_BIASED: Final = frozenset({_ATEN.addmm.default, _ATEN.baddbmm.default})
_HALVES: Final = frozenset({torch.float16, torch.bfloat16})
# Place of the axes that are summed over.
_REDUCTIONS: Final = {_ATEN.mean.dim: 1, _ATEN.sum.dim_IntList: 1, _ATEN.linalg_vector_norm.default: 2}


class ReorderedSums(OperatorMode):
    """While active, matrix products, sums, means and vector norms add their terms in an order drawn from `seed`.

    Nothing is disturbed: the terms are the same, so that in exact arithmetic nothing changes. Sums inside other operators
    (convolutions, softmax) keep their order.

    A product of half types is added in float32 and rounded once, in whatever order: eight such runs are one and the same. There
    the terms are added in two parts, each of which is rounded, as where the work of a product is shared out.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._random = torch.Generator().manual_seed(seed)

    def operator(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one operator, its terms shuffled before where it is a sum of them."""
        given = list(args)
        if func in _PRODUCTS:
            first = _PRODUCTS[func]
            self._shuffle_product(given, first)
            if given[first].dtype in _HALVES:
                return _in_two_parts(func, given, kwargs, first=first)
        elif func in _REDUCTIONS:
            self._shuffle_axes(given, _REDUCTIONS[func])
        return func(*given, **kwargs)

    def _shuffle_product(self, args: list[Any], first: int) -> None:
        left, right = args[first], args[first + 1]
        order = self._order(left.shape[-1])
        args[first], args[first + 1] = left.index_select(-1, order), right.index_select(-2, order)

    def _shuffle_axes(self, args: list[Any], place: int) -> None:
        axes = args[place] if len(args) > place else None
        for axis in axes or ():
            args[0] = args[0].index_select(axis, self._order(args[0].shape[axis]))

    def _order(self, count: int) -> torch.Tensor:
        return torch.randperm(count, generator=self._random)


def _in_two_parts(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, first: int) -> torch.Tensor:
    """The product over the first half of the terms plus that over the others; a bias is in the first."""
    left, right = args[first], args[first + 1]
    middle = left.shape[-1] // 2
    lower = func(*args[:first], left[..., :middle], right[..., :middle, :], **kwargs)
    more = {**kwargs, "beta": 0} if func in _BIASED else kwargs
    upper = func(*args[:first], left[..., middle:], right[..., middle:, :], **more)
    return torch.as_tensor(lower + upper)
