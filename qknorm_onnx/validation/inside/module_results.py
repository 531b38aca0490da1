"""The results of a module's parts, and the first of them that a graph does not have.

Names are not needed: whoever made the file, the result of a part that it computes rightly is among its values. Parts whose
results a rewrite took away (a norm inside a fused attention) are told by their twins in other layers: where no layer has it,
its absence says nothing.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from qknorm_onnx.validation.measures.fingerprint import Fingerprint, fingerprint

if TYPE_CHECKING:
    import torch

_INDEX: Final = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleResult:
    """The first float tensor that a part returned; `name` is the part's path in the module."""

    name: str
    value: Fingerprint


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstDifference:
    """`last_right`: the last part whose result the graph has; `first_wrong`: the next one that it should have and has not.

    `suspects`: parts up to and with the latter whose results the graph has not, beside it or behind the former.
    """

    last_right: str
    first_wrong: str
    suspects: tuple[str, ...]

    @staticmethod
    def are_twins(one: str, other: str) -> bool:
        """Whether both are the same part, or the same parameter of it, in two layers."""
        return _twin(one) == _twin(other)


@contextmanager
def recorded(module: torch.nn.Module) -> Iterator[list[ModuleResult]]:
    """While it lasts, the results of all parts are noted in the order in which they end."""
    results: list[ModuleResult] = []
    handles = [part.register_forward_hook(_note(name, results)) for name, part in module.named_modules() if name]
    try:
        yield results
    finally:
        for handle in handles:
            handle.remove()


def _note(name: str, results: list[ModuleResult]) -> Callable[[Any, Any, Any], None]:
    def hook(_part: Any, _inputs: Any, output: Any) -> None:
        import torch
        from torch.utils import _pytree as pytree

        first = next(iter(pytree.tree_leaves(output)), None)
        if torch.is_tensor(first) and first.is_floating_point():
            results.append(ModuleResult(name=name, value=fingerprint(first.detach().double().cpu().numpy())))

    return hook


def first_difference(results: Sequence[ModuleResult], values: Sequence[Fingerprint]) -> FirstDifference | None:
    """Where the graph's `values` leave the module's `results`; None where they do not, or where nothing can be said."""
    telling = [result for result in results if result.value.tells]
    by_count: dict[int, list[Fingerprint]] = {}
    for value in values:
        by_count.setdefault(value.count, []).append(value)
    found = [any(value.equals(result.value) for value in by_count.get(result.value.count, ())) for result in telling]
    if True not in found or found[-1]:
        return None
    last = len(found) - 1 - found[::-1].index(True)
    twins = {_twin(result.name) for result, is_there in zip(telling, found, strict=True) if is_there}
    around = telling[last].name.rpartition(".")[0]  # the part that holds the last right one ends behind it
    expected = (place for place in range(last + 1, len(telling)) if _twin(telling[place].name) in twins | {_twin(around)})
    wrong = next(expected, last + 1)
    parent = telling[wrong].name.rpartition(".")[0]
    missing = [(place, result.name) for place, result in enumerate(telling[: wrong + 1]) if not found[place]]
    return FirstDifference(
        last_right=telling[last].name,
        first_wrong=telling[wrong].name,
        suspects=tuple(name for place, name in missing if place > last or name.startswith(f"{parent}.")),
    )


def _twin(name: str) -> str:
    """The same part of any layer."""
    return _INDEX.sub("#", name)
