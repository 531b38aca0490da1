"""Weights that are in both module and file, found by their values: embedding tables, and the projections of q and k."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qknorm_onnx.runtime.value_types import FLOAT_TYPES
from qknorm_onnx.spec.signature import Dtype
from qknorm_onnx.validation.cases.domain import Domain
from qknorm_onnx.validation.cases.inputs import GraphInput
from qknorm_onnx.validation.measures.error_budget import unit
from qknorm_onnx.validation.report.parity_row import ParityRow

if TYPE_CHECKING:
    import torch

    from qknorm_onnx.validation.modes.observation import Observation

Tensor = npt.NDArray[Any]

_SAMPLED: Final = 64  # rows or values that are looked at before all of a weight is
_CHUNK: Final = 4096  # rows that are compared at once
# A projection of queries or keys, alone or packed with others: q_proj, to_k, wq, query, c_attn, qkv, in_proj, W_pack.
_PROJECTION: Final = re.compile(
    r"(^|\.|_)(q|k|qk|qkv|w_?q|w_?k|w_?qkv|to_q|to_k|to_qkv|q_?proj|k_?proj|qkv_?proj|in_proj|query|key|query_key_value|c_attn|W_pack)"
    r"(_(lin|proj|b_proj))?\.?_?(weight|bias)$",
    re.IGNORECASE,
)


def is_projection(name: str) -> bool:
    """Whether a parameter's name says that it projects queries or keys; norms and embeddings of that name are not meant."""
    return _PROJECTION.search(name) is not None


class FileWeights:
    """The float initializers of a model, to be found by value."""

    def __init__(self, model: ir.Model) -> None:
        self._by_shape: dict[tuple[int, ...], list[ir.Value]] = {}
        for graph in _graphs(model):
            for value in graph.initializers.values():
                if value.const_value is not None and value.dtype in FLOAT_TYPES:
                    shape = value.const_value.numpy().shape
                    self._by_shape.setdefault(shape, []).append(value)

    def equal(self, weight: Tensor) -> list[ir.Value]:
        """The initializers that hold `weight`, rounded to their type, as it is or transposed."""
        return list(dict.fromkeys(value for value, array in self._turned(weight.shape) if _is_equal(array, weight)))

    def mostly_equal(self, table: Tensor) -> Iterator[tuple[ir.Value, Tensor]]:
        """Initializers whose rows are those of `table` at most of the rows sampled, turned so that rows are rows."""
        rows = np.unique(np.linspace(0, len(table) - 1, _SAMPLED).astype(np.int64)) if len(table) else np.arange(0)
        for value, array in self._turned(table.shape):
            same = [np.array_equal(array[row], table[row].astype(array.dtype)) for row in rows]
            if sum(same) * 2 > len(same):
                yield value, array

    def _turned(self, shape: tuple[int, ...]) -> Iterator[tuple[ir.Value, Tensor]]:
        """Every initializer that has this shape, as it is or transposed; a square one twice."""
        for stored in dict.fromkeys((shape, shape[::-1])):
            for value in self._by_shape.get(stored, ()):
                assert value.const_value is not None
                array = value.const_value.numpy()
                for turned in (array, array.T) if array.ndim > 1 else (array,):
                    if turned.shape == shape:
                        yield value, turned


def _is_equal(array: Tensor, weight: Tensor) -> bool:
    picked = np.linspace(0, weight.size - 1, _SAMPLED).astype(np.int64) if weight.size else np.arange(0)
    places = np.unravel_index(picked, weight.shape)
    if not np.array_equal(array[places], weight[places].astype(array.dtype)):
        return False
    return bool(np.array_equal(array, weight.astype(array.dtype)))


def _graphs(model: ir.Model) -> Iterator[ir.Graph]:
    yield model.graph
    for node in model.graph.all_nodes():
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield attribute.as_graph()
            elif attribute.type == ir.AttributeType.GRAPHS:
                yield from attribute.as_graphs()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableDifference:
    """Rows of a table of the module that differ in the file's initializer; none where they are equal."""

    table: str
    initializer: str
    rows: tuple[int, ...]
    error: float  # the largest difference, over the largest value of the table


def compare_tables(model: ir.Model, tables: Mapping[str, Tensor]) -> Iterator[TableDifference]:
    """Each table with each initializer of its shape that mostly equals it. A table that is nowhere gives nothing."""
    weights = FileWeights(model)
    for name, table in tables.items():
        for value, array in weights.mostly_equal(table):
            rows, error = _differing_rows(table, array)
            yield TableDifference(table=name, initializer=str(value.name), rows=rows, error=error)


def _differing_rows(table: Tensor, array: Tensor) -> tuple[tuple[int, ...], float]:
    rows: list[int] = []
    largest, difference = 0.0, 0.0
    for start in range(0, len(table), _CHUNK):
        wanted = table[start : start + _CHUNK].astype(array.dtype)
        given = array[start : start + _CHUNK]
        apart = np.abs(given.astype(np.float64) - wanted.astype(np.float64)).max(axis=tuple(range(1, table.ndim)))
        rows += [start + int(row) for row in np.flatnonzero(~(apart == 0))]
        largest = max(largest, float(np.abs(wanted.astype(np.float64)).max(initial=0)))
        difference = max(difference, float(apart.max(initial=0)))
    return tuple(rows), difference / largest if largest else difference


def scaled_model(model: ir.Model, weights: Mapping[str, Tensor], factors: Mapping[str, float], dtype: np.dtype[Any]) -> ir.Model:
    """A copy of `model` with initializers that hold a weight multiplied by its factor, rounded to `dtype` before and after."""
    scaled = model.clone()
    found = FileWeights(scaled)
    holders = {value: name for name in factors for value in found.equal(weights[name])}
    for value, name in holders.items():
        assert value.const_value is not None
        array = value.const_value.numpy()
        rounded = array.astype(dtype).astype(np.float64) * factors[name]
        value.const_value = ir.tensor(rounded.astype(dtype).astype(array.dtype), name=value.name)
    return scaled


def projections_in_both(model: ir.Model, weights: Iterable[tuple[str, Tensor]]) -> tuple[str, ...]:
    """Names of the parameters called projections of q or k that the file holds; a bias only with its weight, and the reverse."""
    found = FileWeights(model)
    named = {name: tensor for name, tensor in weights if is_projection(name) and tensor.ndim <= 2 and tensor.size > 1}
    held = {name for name, tensor in named.items() if not tensor.any() or found.equal(tensor)}
    return tuple(name for name in named if all(other in held for other in named if _layer(other) == _layer(name)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedWeights:
    """The weights of `module` that `model` holds too, as far as cases and comparisons need them."""

    module: torch.nn.Module
    observation: Observation
    scalable: tuple[str, ...]
    differences: tuple[TableDifference, ...]

    @staticmethod
    def of(model: ir.Model, module: torch.nn.Module, observation: Observation) -> SharedWeights:
        """Found by value: projections of q and k by their names in the module, tables by what `observation` saw."""
        arrays = ((name, array_of(tensor)) for name, tensor in module.named_parameters() if is_projection(name))
        tables = {name: array_of(module.get_parameter(name)) for name in observation.tables}
        return SharedWeights(
            module=module,
            observation=observation,
            scalable=projections_in_both(model, arrays),
            differences=tuple(compare_tables(model, tables)),
        )

    @property
    def vocabularies(self) -> frozenset[int]:
        """The lengths of the module's embedding tables."""
        import torch

        return frozenset(part.num_embeddings for part in self.module.modules() if isinstance(part, torch.nn.Embedding))

    def weight(self, name: str) -> Tensor:
        """A parameter of the module."""
        return array_of(self.module.get_parameter(name))

    def domain(self, inputs: Sequence[GraphInput], places: Sequence[int], *, windows: tuple[int, ...]) -> Domain:
        """What the cases need to know; `places` are those of the module's tensors among its arguments."""
        by_place = {places[i.leaf]: i.name for i in inputs}
        sizes = self.observation.result_sizes
        scalable: dict[str, float] = {}
        for name in self.scalable:
            size = next((sizes[other] for other in sizes if _layer(other) == _layer(name)), 0.0)
            if size > 0:
                scalable[name] = size
        return Domain(
            rows={by_place[place]: rows for place, rows in self.observation.rows.items() if place in by_place},
            written=frozenset(by_place[place] for place in self.observation.written if place in by_place),
            windows=windows,
            parameters=sum(tensor.numel() for tensor in self.module.parameters()),
            scalable=scalable,
        )

    def untried(self) -> Iterator[str]:
        """The tables of the module that no initializer equals at most of its rows."""
        found = {difference.table for difference in self.differences}
        for name in self.observation.tables:
            if name not in found:
                yield f"table {name} was not found among the file's initializers: its rows are tried by tokens only"

    def table_rows(self, dtype: Dtype, how: str) -> Iterator[ParityRow]:
        """The verdict on each table: equal in every row, or not."""
        for difference in self.differences:
            row = ParityRow(
                dtype=dtype,
                how=how,
                case="tables",
                output=difference.table,
                verdict="passed",
                error=difference.error,
                torch_error=0.0,
                budget=unit(dtype),
                purpose="wrong rows of an embedding",
            )
            if difference.rows:
                shown = ", ".join(map(str, difference.rows[:5])) + (" ..." if len(difference.rows) > 5 else "")
                reason = f"initializer {difference.initializer} differs in {len(difference.rows)} rows: {shown}"
                row = dataclasses.replace(row, verdict="failed", reason=reason)
            yield row


def array_of(tensor: torch.Tensor) -> Tensor:
    """A parameter as NumPy; bfloat16, which NumPy has not, as float32."""
    tensor = tensor.detach().cpu()
    return np.asarray((tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy())


def _layer(name: str) -> str:
    return re.sub(r"[._]?(weight|bias)$", "", name)
