"""One side of a proof: a subgraph that is ready to run, with its float weights as further inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qknorm_onnx.proof.structure import structure_of
from qknorm_onnx.runtime.emulation import emulate_flattened
from qknorm_onnx.runtime.float64_twin import raise_flattened
from qknorm_onnx.runtime.runner import Runner, is_float, run_prepared
from qknorm_onnx.runtime.value_types import flattened

Tensor = npt.NDArray[Any]
Arithmetic = Literal["float64", "float32", "own type"]

# Twice the most that storing a constant as float32 changes it by.
CONSTANT_ULP: Final = 2.0**-23


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProofSide:
    """A subgraph's runner, its weights in the runner's order, and the names of its own inputs."""

    runner: Runner
    weights: tuple[Tensor, ...]
    inputs: tuple[str, ...]

    def run(self, inputs: Mapping[str, Tensor], *, weights: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Outputs in order. Raises CannotRunError where the runtime refuses the inputs."""
        arrays = [*(inputs[name] for name in self.inputs), *(self.weights if weights is None else weights)]
        outputs = self.runner.run(dict(zip(self.runner.input_names, arrays, strict=True)))
        return [outputs[name] for name in self.runner.output_names]

    def moved_weights(self, random: np.random.Generator) -> list[Tensor]:
        """The weights, each value moved up or down by `CONSTANT_ULP` of itself.

        A whole number that stands alone is stored exactly, and may be an exponent: -1 to the power of 2.0000002 is NaN.
        """
        return [weight.astype(np.float64) if _is_whole(weight) else _moved(weight, random) for weight in self.weights]

    def moved_inputs(self, inputs: Mapping[str, Tensor], random: np.random.Generator) -> dict[str, Tensor]:
        """The inputs, each float moved as the weights are."""
        return {name: _moved(array, random) if is_float(array.dtype) else array for name, array in inputs.items()}


def _is_whole(array: Tensor) -> bool:
    return array.size == 1 and bool(array == np.rint(array))


def _moved(array: Tensor, random: np.random.Generator) -> Tensor:
    return array.astype(np.float64) * (1 + CONSTANT_ULP * random.choice([-1.0, 1.0], array.shape))


class ProofSideMaker:
    """Makes sides; subgraphs that differ only in the values of their weights share one runner."""

    def __init__(self) -> None:
        self._runners: dict[Hashable, Runner] = {}

    def make(self, model: ir.Model, arithmetic: Arithmetic) -> ProofSide:
        """`model` in float64, in float32 (what is wider stays so) or in its own type (bfloat16 emulated).

        Raises:
            CannotRunError: no runtime can.
        """
        flat = flattened(model)
        structure = structure_of(flat)
        weights = tuple(value.const_value.numpy() for value in structure.weights if value.const_value is not None)
        names = tuple(str(value.name) for value in flat.graph.inputs)
        key = (structure.key, arithmetic)
        if key not in self._runners:
            self._runners[key] = _runner(flat, structure.weights, arithmetic)
        return ProofSide(runner=self._runners[key], weights=weights, inputs=names)


def _runner(flat: ir.Model, weights: Sequence[ir.Value], arithmetic: Arithmetic) -> Runner:
    for value in weights:
        del flat.graph.initializers[str(value.name)]
        value.const_value = None
        flat.graph.inputs.append(value)
    if arithmetic != "own type":
        raise_flattened(flat, to=ir.DataType.DOUBLE if arithmetic == "float64" else ir.DataType.FLOAT)
    elif any(value.dtype == ir.DataType.BFLOAT16 for value in flat.graph.inputs):
        emulate_flattened(flat)
    return run_prepared(flat, threads=1)
