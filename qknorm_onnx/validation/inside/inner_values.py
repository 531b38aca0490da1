"""The values inside a model on one case, each reduced to figures as it comes: what it should be, what it is, how large it is."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qknorm_onnx.runtime.runner import Arithmetic, make_runner
from qknorm_onnx.runtime.value_types import FLOAT_TYPES
from qknorm_onnx.validation.measures.fingerprint import Fingerprint, fingerprint
from qknorm_onnx.validation.measures.metrics import finite, relative_error

Tensor = npt.NDArray[Any]

# Values that one run gives back, in both arithmetics, take no more; a single larger one still comes.
MOST_BYTES: Final = 512 << 20
_BYTES_OF_BOTH: Final = 16  # of one number: float64 and at most float64


@dataclasses.dataclass(frozen=True, kw_only=True)
class InnerValue:
    """Figures of one float value: `error` is max|y - r| / max|r| against the same graph in float64, `lost` counts values that
    are not finite though the exact ones are, or that are NaN. `largest` and `smallest` are sizes of exact values, 0 left out.
    """

    name: str
    node: ir.Node
    dtype: ir.DataType
    size: int
    error: float
    lost: int
    largest: float
    smallest: float
    exact: Fingerprint


def inner_values(
    model: ir.Model, inputs: Mapping[str, Tensor], *, arithmetic: Arithmetic, most_bytes: int = MOST_BYTES
) -> Iterator[InnerValue]:
    """Every float result of the main graph's operators, in graph order. The model runs once for each `most_bytes` of them.

    Raises:
        CannotRunError: with its inner values as outputs, the model does not run.
    """
    results = [
        (node, output)
        for node in model.graph
        for output in node.outputs
        if output.dtype in FLOAT_TYPES and output.name and not output.is_graph_output()
    ]
    parts = list(_parts([value for _, value in results], _sizes(model, inputs), most_bytes))
    for part in parts:
        named = {str(value.name) for value in part}
        shown = named | {str(value.name) for value in model.graph.outputs if part is parts[-1]}
        watched = _watched(model, named)
        exact = make_runner(watched, arithmetic="float64").run(inputs)
        given = make_runner(watched, arithmetic=arithmetic).run(inputs)
        for node in model.graph:
            for output in node.outputs:
                name = str(output.name)
                if name in shown and name in exact and name in given and output.dtype in FLOAT_TYPES:
                    yield _figures(node, output, exact.pop(name), given.pop(name))


def _watched(model: ir.Model, names: set[str]) -> ir.Model:
    """A copy whose outputs are the model's own and the values of these names."""
    watched = model.clone()
    for node in watched.graph:
        watched.graph.outputs.extend(output for output in node.outputs if output.name in names)
    return watched


def _sizes(model: ir.Model, inputs: Mapping[str, Tensor]) -> dict[str, int]:
    """What the symbols of the inputs' shapes are on this case."""
    sizes: dict[str, int] = {}
    for value in model.graph.inputs:
        array = inputs.get(str(value.name))
        if array is not None and value.shape is not None and len(value.shape) == array.ndim:
            sizes |= {
                str(dim.value): size for dim, size in zip(value.shape, array.shape, strict=True) if not isinstance(dim, int)
            }
    return sizes


def _parts(values: Sequence[ir.Value], sizes: Mapping[str, int], most_bytes: int) -> Iterator[list[ir.Value]]:
    part: list[ir.Value] = []
    taken = 0
    for value in values:
        needed = _BYTES_OF_BOTH * _num_elements(value, sizes)
        if part and taken + needed > most_bytes:
            yield part
            part, taken = [], 0
        part.append(value)
        taken += needed
    yield part


def _num_elements(value: ir.Value, sizes: Mapping[str, int]) -> int:
    """About how many numbers a value has; a size that follows from nothing known counts as the largest known one."""
    unknown = max(sizes.values(), default=1)
    if value.shape is None:
        return unknown**3
    return math.prod(dim if isinstance(dim, int) else sizes.get(str(dim.value), unknown) for dim in value.shape)


def _figures(node: ir.Node, value: ir.Value, exact: Tensor, given: Tensor) -> InnerValue:
    # NaN may come from the file's own constants (an epsilon that became 0), and then is there in float64 as well.
    lost = (finite(exact) & ~finite(given)) | np.isnan(given.astype(np.float64))
    sizes = np.abs(exact[np.isfinite(exact) & (exact != 0)])
    assert value.dtype is not None, "only typed values are watched"
    return InnerValue(
        name=str(value.name),
        node=node,
        dtype=value.dtype,
        size=int(exact.size),
        error=relative_error(given, exact, finite(exact) & finite(given)),
        lost=int(lost.sum()),
        largest=float(sizes.max(initial=0.0)),
        smallest=float(sizes.min(initial=math.inf)),
        exact=fingerprint(exact),
    )
