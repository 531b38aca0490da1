"""Example inputs of a module, matched with the inputs of its graph and varied in size and values.

Every value is held as NumPy float64, int64 or bool; floats are rounded to the type under test before they are used.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qknorm_onnx.errors import InputError

Tensor = npt.NDArray[Any]
Kind = Literal["activations", "float mask", "bool", "positions", "flags", "tokens", "number"]

_TOKENS: Final = re.compile(r"(input|token)s?(_ids?)?$|^ids$|tokens$")
_POSITIONS: Final = re.compile(r"(^|_)pos(ition)?s?(_|$)")
_PAST: Final = re.compile(r"past|cache|prev|mems?\b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphInput:
    """An input of the graph with its example: `leaf` is its place among the module's tensors, `dims` its declared shape."""

    name: str
    leaf: int
    example: Tensor
    dims: tuple[int | str | ir.SymbolicDim, ...]
    kind: Kind

    @property
    def is_called_position(self) -> bool:
        """Whether the name says position."""
        return _POSITIONS.search(self.name) is not None

    @property
    def is_called_past(self) -> bool:
        """Whether the name says that it is a cache."""
        return self.kind in ("activations", "float mask") and _PAST.search(self.name) is not None

    @property
    def symbols(self) -> tuple[str, ...]:
        """The plain symbols of the shape."""
        return tuple(dim for dim in self.dims if isinstance(dim, str))

    def resized(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape with new sizes of symbols; dimensions that follow from nothing known keep the example's."""
        return tuple(_size(dim, example, sizes) for dim, example in zip(self.dims, self.example.shape, strict=True))


def match_inputs(model: ir.Model, leaves: Sequence[tuple[str, Tensor]]) -> tuple[GraphInput, ...]:
    """The graph's inputs with the module's tensors, by name where names are equal, the others in order.

    Raises:
        InputError: the graph takes more inputs than the module was given, or of another rank.
    """
    values = [value for value in model.graph.inputs if not value.is_initializer()]
    by_name = {name: index for index, (name, _) in enumerate(leaves)}
    taken = {str(value.name): by_name[str(value.name)] for value in values if value.name in by_name}
    rest = [index for index in range(len(leaves)) if index not in taken.values()]
    open_values = [str(value.name) for value in values if value.name not in taken]
    if len(open_values) > len(rest):
        names = ", ".join(name for name, _ in leaves) or "nothing"
        raise InputError(f"the graph takes {', '.join(open_values)}, which the module's example inputs ({names}) do not give")
    if open_values and len(open_values) != len(rest):
        raise InputError(f"it is not clear which of the module's inputs go to {', '.join(open_values)}: give args as exported")
    taken |= dict(zip(open_values, rest, strict=False))
    return tuple(_graph_input(value, taken[str(value.name)], leaves[taken[str(value.name)]][1]) for value in values)


def example_sizes(inputs: Sequence[GraphInput]) -> dict[str, int]:
    """Sizes of the plain symbols in the example."""
    sizes: dict[str, int] = {}
    for graph_input in inputs:
        for dim, size in zip(graph_input.dims, graph_input.example.shape, strict=True):
            if isinstance(dim, str):
                sizes.setdefault(dim, size)
    return sizes


def random_like(graph_input: GraphInput, shape: tuple[int, ...], random: np.random.Generator) -> Tensor:
    """New values of the example's kind in another shape.

    Activations are normal with the example's mean and deviation; tokens are drawn from the example's range; positions go
    on counting; masks and flags repeat the example's pattern, so that a visible key stays visible.
    """
    example = graph_input.example
    if graph_input.kind == "activations":
        return example.mean() + (example.std() or 1.0) * random.standard_normal(shape)
    if graph_input.kind == "tokens":
        return random.integers(int(example.min()), int(example.max()) + 1, shape)
    if graph_input.kind == "positions":
        start = example.min() if example.size else 0
        return np.broadcast_to(start + np.arange(shape[-1]), shape).copy()
    return _tiled(example, shape)


def _graph_input(value: ir.Value, leaf: int, example: Tensor) -> GraphInput:
    rank = len(value.shape) if value.shape is not None else example.ndim
    if rank != example.ndim:
        raise InputError(f"graph input {value.name} has rank {rank}, the module's example has shape {example.shape}")
    dims = tuple(_dim(dim) for dim in value.shape) if value.shape is not None else tuple(example.shape)
    return GraphInput(name=str(value.name), leaf=leaf, example=example, dims=dims, kind=_kind(str(value.name), example))


def _dim(dim: Any) -> int | str | ir.SymbolicDim:
    if isinstance(dim, int):
        return dim
    if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
        return str(dim.value) if str(dim.value).isidentifier() else dim
    return "?"


def _size(dim: int | str | ir.SymbolicDim, example: int, sizes: Mapping[str, int]) -> int:
    if isinstance(dim, int):
        return dim
    if isinstance(dim, str):
        return example if dim == "?" else sizes.get(dim, example)
    if not dim.free_symbols() <= set(sizes):
        return example
    size = dim.evaluate(dict(sizes))
    return size if isinstance(size, int) else example


def _kind(name: str, example: Tensor) -> Kind:
    if example.dtype == np.bool_:
        return "bool"
    if np.issubdtype(example.dtype, np.floating):
        is_mask = example.size > 0 and (not np.isfinite(example).all() or np.abs(example).max() > 1e4)
        return "float mask" if is_mask else "activations"
    if example.ndim == 0 or not example.size:
        return "number"
    return _kind_of_integers(name, example)


def _kind_of_integers(name: str, example: Tensor) -> Kind:
    """Names count where values say nothing: tokens 0, 1, 2 of an example look like positions, one position like a flag."""
    consecutive = bool((np.diff(example, axis=-1) == 1).all())
    called_tokens = _TOKENS.search(name) is not None
    if consecutive and (_POSITIONS.search(name) is not None or (example.shape[-1] > 1 and not called_tokens)):
        return "positions"
    return "flags" if example.min() >= 0 and example.max() <= 1 and not called_tokens else "tokens"


def _tiled(example: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The example cut or repeated along each axis."""
    out = example
    for axis, size in enumerate(shape):
        out = np.take(out, np.arange(size) % max(example.shape[axis], 1), axis=axis)
    return out
