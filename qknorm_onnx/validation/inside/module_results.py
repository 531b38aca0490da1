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

WHOLE: Final = "the module itself"
_INDEX: Final = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleResult:
    """The first float tensor that a part returned; `name` is the part's path in the module; the whole has none."""

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
    handles = [part.register_forward_hook(_note(name, results)) for name, part in module.named_modules()]
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
    """Where the graph's `values` leave the module's `results`; None where nothing can be said.

    A part's result should be there if that of its twin in another layer is, or of a part inside it, or if it is the whole module.
    Where the result of a part around it is there all the same, its absence is none of a fault.
    """
    telling = [result for result in results if result.value.tells]
    found = _found(telling, values)
    right = [result.name for result, is_there in zip(telling, found, strict=True) if is_there]
    twins = {_twin(name) for name in right}
    for place, result in enumerate(telling):
        name = result.name
        if found[place] or any(_is_inside(name, around) for around in right):
            continue
        if name and _twin(name) not in twins and not any(_is_inside(inner, name) for inner in right):
            continue
        before = [place for place in range(place) if found[place]]
        if not before:
            return None
        suspects = [item.name for item, is_there in zip(telling[: place + 1], found, strict=False) if not is_there]
        parent = name.rpartition(".")[0]
        near = tuple(item for item in suspects if _is_inside(item, parent) or _is_inside(item, name) or item == name)
        return FirstDifference(last_right=telling[before[-1]].name, first_wrong=name or WHOLE, suspects=near)
    return None


def _found(results: Sequence[ModuleResult], values: Sequence[Fingerprint]) -> list[bool]:
    by_count: dict[int, list[Fingerprint]] = {}
    for value in values:
        by_count.setdefault(value.count, []).append(value)
    return [any(value.equals(result.value) for value in by_count.get(result.value.count, ())) for result in results]


def _is_inside(name: str, around: str) -> bool:
    """Whether the part `name` lies inside another one; the whole module has no name."""
    return name != around and (not around or name.startswith(f"{around}."))


def _twin(name: str) -> str:
    """The same part of any layer."""
    return _INDEX.sub("#", name)
