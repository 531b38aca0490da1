"""Mixtures of experts that count in NumPy how many tokens each expert gets: computed for every token and added by weight.

The `moe_infer` of DeepSeek's code, as HiDream of diffusers has it, sorts the tokens by expert and cuts them at counts that
depend on the numbers. While an export lasts each expert sees every token; tokens that did not choose it get zeros from it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

_FLAT: Final = ("x", "flat_expert_indices", "flat_expert_weights")
_BY_TOKEN: Final = ("x", "topk_ids", "topk_weight")


@contextlib.contextmanager
def dense_experts(module: nn.Module, notes: list[str]) -> Iterator[None]:
    """Every `moe_infer` inside `module` in a form that exports, inside the context."""
    found = [part for part in module.modules() if _counts_tokens(part)]
    if found:
        notes.append("mixture of experts: exported with every expert computed for every token (moe_infer counts tokens in NumPy)")
    for part in found:
        part.moe_infer = _dense(part)
    try:
        yield
    finally:
        for part in found:
            del part.moe_infer


def _counts_tokens(part: Any) -> bool:
    """Whether `part` has a `moe_infer` of a known form, and experts that all lie in this process."""
    function = getattr(type(part), "moe_infer", None)
    if function is None or "moe_infer" in vars(part) or not isinstance(getattr(part, "experts", None), nn.ModuleList):
        return False
    names = tuple(inspect.signature(function).parameters)[1:]
    return names in (_FLAT, _BY_TOKEN) and getattr(part, "ep_size", 1) == 1 and None not in part.experts


def _dense(part: Any) -> Any:
    def moe_infer(x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Tokens (N, C), the experts (N, K) that each chose and their weights: sums (N, C)."""
        indices, weights = (item.reshape(x.shape[0], -1) for item in (indices, weights))
        total = torch.zeros_like(x)
        for index, expert in enumerate(part.experts):
            chosen = indices == index
            weight = torch.where(chosen, weights, 0).sum(-1, keepdim=True)
            # A token that did not choose this expert may overflow in it: no product with its weight of zero.
            total = total + torch.where(chosen.any(-1, keepdim=True), expert(x) * weight, 0).to(x.dtype)
        return total

    return moe_infer
