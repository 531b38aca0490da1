"""A module with one explicit graph input for each tensor that it is called with.

`torch.export` takes dynamic shapes only for parameters that `forward` spells out, and gives a graph input no name of its
own where `forward` takes `**kwargs` or nested values. Here the example call is flattened once: every tensor becomes a
named input, everything else (flags, None, numbers) stays what it is in the example.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from qknorm_onnx.errors import ExportError
from qknorm_onnx.torch_export.patches.complex_numbers import RealArithmetic
from qknorm_onnx.torch_export.patches.scalar_repeats import ScalarRepeats


@dataclasses.dataclass(frozen=True)
class ExampleCall:
    """One call of a module: its tensors by the names that the graph inputs get, and how to call the module with others.

    A tensor's name is that of its parameter; inside a list or dict, `parameter.key`; of `*args`, `args_0` and so on.
    `structure` has the names of `args` and `kwargs`, and the tensors' names in the place of the tensors.
    """

    tensors: Mapping[str, Tensor]
    structure: Mapping[str, Any]
    _leaves: tuple[Any, ...] = dataclasses.field(repr=False)
    _tree: pytree.TreeSpec = dataclasses.field(repr=False)
    var_keyword: str = ""

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`args` and `kwargs` of the call with other tensors, in the order of `self.tensors`."""
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._tree)
        return args, kwargs

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> ExampleCall:
        """The same call with other tensors."""
        replacement = iter(tensors.values())
        leaves = tuple(next(replacement) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves)
        return dataclasses.replace(self, tensors=dict(tensors), _leaves=leaves)


def example_call(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> ExampleCall:
    """The call `module(*args, **kwargs)`. Raises ExportError where it does not fit the module's forward."""
    args, kwargs = tuple(args), dict(kwargs or {})
    signature = inspect.signature(module.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ExportError(f"the example inputs do not fit {type(module).__name__}.forward{signature}: {error}") from error
    structure = dict(zip(_positional_names(signature, len(args)), args, strict=True)) | kwargs
    leaves, tree = pytree.tree_flatten((args, kwargs))
    leaves = _without_aliases(leaves)
    values = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    named = {name: _named(value, name) for name, value in structure.items()}
    names = [name for value in named.values() for name in pytree.tree_leaves(value) if isinstance(name, _Name)]
    if not values:
        raise ExportError(f"the example inputs of {type(module).__name__} hold no tensor: an ONNX graph needs an input")
    variable = [p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    return ExampleCall(
        tensors=dict(zip(map(str, names), values, strict=True)),
        structure=named,
        _leaves=tuple(leaves),
        _tree=tree,
        var_keyword=variable[0] if variable else "",
    )


def _without_aliases(leaves: Sequence[Any]) -> list[Any]:
    """One tensor in two places is two inputs; torch.export would use one of them for both."""
    seen: set[int] = set()
    out: list[Any] = []
    for leaf in leaves:
        again = isinstance(leaf, Tensor) and id(leaf) in seen
        out.append(leaf.clone() if again else leaf)
        seen.add(id(leaf))
    return out


class _Name(str):
    """The name of a tensor, in its place; other strings are arguments."""

    __slots__ = ()


def _positional_names(signature: inspect.Signature, count: int) -> list[str]:
    names: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{index}" for index in range(count - len(names))]
        elif parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return names[:count]


def _named(value: Any, name: str) -> Any:
    """`value` with a `_Name` in the place of each tensor."""
    if isinstance(value, Tensor):
        return _Name(name)
    if isinstance(value, Mapping):
        return {key: _named(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_named(item, f"{name}.{index}") for index, item in enumerate(value)]
    leaves = pytree.tree_leaves(value)
    return None if len(leaves) == 1 and leaves[0] is value else _named(leaves, name)


class ExplicitSignature(nn.Module):
    """`wrapped`, called with the tensors of an `ExampleCall` one by one; returns its output tensors as a flat tuple.

    Complex numbers, which ONNX has not, are computed as pairs of real ones on the way.
    """

    def __init__(self, wrapped: nn.Module, call: ExampleCall) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.training = wrapped.training
        self.call = call
        self.arithmetic = RealArithmetic()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors of `named_outputs`, in order."""
        args, kwargs = self.call.arguments(tensors)
        with ScalarRepeats(), self.arithmetic:
            output = self.wrapped(*args, **kwargs)
        return tuple(tensor for _, tensor in named_outputs(output))

    def output_names(self) -> list[str]:
        """Run the example once; the names of the outputs. Whatever the module raises comes out unchanged.

        Complex numbers stay what they are here: the module may keep tensors of the first call.
        """
        args, kwargs = self.call.arguments(list(self.call.tensors.values()))
        with torch.no_grad():
            output = self.wrapped(*args, **kwargs)
        names = []
        for name, tensor in named_outputs(output):
            if tensor.is_complex():
                raise ExportError(f"output {name} is complex, which ONNX has not: return torch.view_as_real of it")
            names.append(name)
        return [f"{name}_output" if name in self.call.tensors else name for name in names]


def named_outputs(output: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a module's output: `output`, `output_0` ..., or the keys of a dict or ModelOutput. None is left out."""
    if isinstance(output, Mapping):
        yield from _output_items(output.items())
    elif isinstance(output, (list, tuple)):
        yield from _output_items((f"output_{index}", item) for index, item in enumerate(output))
    else:
        yield from _output_tensors(output, "output")


def _output_items(items: Any) -> Iterator[tuple[str, Tensor]]:
    for name, item in items:
        yield from _output_tensors(item, str(name))


def _output_tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if value is None or isinstance(value, (bool, int, float, str)):
        return
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        yield from _output_items((f"{name}.{key}", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from _output_items((f"{name}.{index}", item) for index, item in enumerate(value))
    else:
        leaves = pytree.tree_leaves(value)
        if len(leaves) == 1 and leaves[0] is value:
            raise ExportError(
                f"output {name} is a {type(value).__name__}, which is no tensor: wrap the module so that it returns tensors only"
            )
        yield from _output_tensors(leaves, name)
