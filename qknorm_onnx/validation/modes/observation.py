"""What a module does with its inputs and weights, watched in one run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from qknorm_onnx.validation.modes.operator_mode import OperatorMode

_ATEN: Final = torch.ops.aten
_PRODUCTS: Final = frozenset({_ATEN.mm, _ATEN.bmm, _ATEN.addmm, _ATEN.baddbmm, _ATEN.linear, _ATEN.matmul})
_WRITES: Final = frozenset(
    {_ATEN.index_put, _ATEN.index_put_, _ATEN.index_copy, _ATEN.index_copy_, _ATEN.scatter, _ATEN.scatter_}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """`rows`: of the table that an input picks rows from, by the input's place among the arguments; `written`: places of inputs
    that say where to write; `tables`: names of the parameters that rows are picked from; `result_sizes`: root of the mean
    square of each product with a parameter, by the parameter's name.
    """

    rows: Mapping[int, int] = dataclasses.field(default_factory=dict)
    written: frozenset[int] = frozenset()
    tables: tuple[str, ...] = ()
    result_sizes: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Observer(OperatorMode):
    """While active, notes what becomes of `inputs` (by place) and of the module's parameters. Nothing is changed."""

    def __init__(self, module: torch.nn.Module, inputs: Mapping[int, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = {_storage(tensor): place for place, tensor in inputs.items() if tensor.numel()}
        # A tied parameter is found under its first name.
        self._names = {_storage(tensor): name for name, tensor in reversed(list(module.named_parameters()))}
        self._rows: dict[int, int] = {}
        self._written: set[int] = set()
        self._tables: dict[str, None] = {}
        self._sizes: dict[str, float] = {}

    def observation(self) -> Observation:
        """What was seen up to now."""
        return Observation(
            rows=dict(self._rows), written=frozenset(self._written), tables=tuple(self._tables), result_sizes=dict(self._sizes)
        )

    def operator(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one operator and look at what it was given."""
        result = func(*args, **kwargs)
        packet = getattr(func, "overloadpacket", None)
        if packet is _ATEN.embedding:
            self._pick(args[0], args[1], axis=0)
        elif packet is _ATEN.index:
            self._index(args[0], args[1])
        elif packet is _ATEN.index_select:
            self._pick(args[0], args[2], axis=args[1])
        elif packet in _WRITES:
            self._written |= {self._places[_storage(t)] for t in _tensors(args[1:]) if _storage(t) in self._places}
        elif packet in _PRODUCTS:
            self._product(args, result)
        return result

    def _index(self, table: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> None:
        given = [(axis, index) for axis, index in enumerate(indices) if index is not None]
        if len(given) == 1 and given[0][1].dtype != torch.bool:
            self._pick(table, given[0][1], axis=given[0][0])

    def _pick(self, table: torch.Tensor, indices: torch.Tensor, *, axis: int) -> None:
        place = self._places.get(_storage(indices))
        if place is not None:
            rows = table.shape[axis]
            self._rows[place] = min(rows, self._rows.get(place, rows))
        name = self._names.get(_storage(table))
        if name is not None and axis == 0:
            self._tables[name] = None

    def _product(self, args: Sequence[Any], result: torch.Tensor) -> None:
        for tensor in _tensors(args):
            name = self._names.get(_storage(tensor))
            if name is not None and tensor.ndim > 1 and result.numel():
                self._sizes.setdefault(name, float(result.detach().double().square().mean().sqrt()))


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
