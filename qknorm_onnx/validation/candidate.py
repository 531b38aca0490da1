"""The model under judgement, ready to run in one type, and how that was made possible."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qknorm_onnx.runtime.half_precision import convert_dtype
from qknorm_onnx.runtime.runner import Arithmetic, CannotRunError, Runner, make_runner, model_float_type
from qknorm_onnx.spec.signature import Dtype

Tensor = npt.NDArray[Any]

NUMPY_TYPES: Final[dict[Dtype, np.dtype[Any]]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
_IR_TYPES: Final[dict[Dtype, ir.DataType]] = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """`model` computes in `dtype` under `arithmetic`; `how` says it in words, for the report."""

    model: ir.Model
    dtype: Dtype
    arithmetic: Arithmetic
    runner: Runner
    how: str

    def run(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Outputs in the model's order. Raises CannotRunError."""
        outputs = self.runner.run(inputs)
        return [outputs[name] for name in self.runner.output_names]


def candidate_in(model: ir.Model, dtype: Dtype) -> Candidate:
    """`model` in `dtype`: as it is where that is its own type, else converted from float32.

    bfloat16 is emulated: onnxruntime's CPU provider cannot run a whole bfloat16 model.

    Raises:
        CannotRunError: the file is in another type, or no runtime can run it.
    """
    own = model_float_type(model)
    how = "native"
    if own != _IR_TYPES[dtype]:
        if own != ir.DataType.FLOAT:
            raise CannotRunError(f"the file computes in {own.name.lower()}; export the module in {dtype} to judge that")
        model = convert_dtype(model, dtype)
        how = "converted"
    arithmetic: Arithmetic = "bfloat16 emulated" if dtype == "bfloat16" else "native"
    if dtype == "bfloat16":
        how = "emulated" if how == "native" else "converted, emulated"
    runner = make_runner(model, arithmetic=arithmetic)
    if runner.how.startswith("onnx.reference"):
        how += ", onnx.reference"
    return Candidate(model=model, dtype=dtype, arithmetic=arithmetic, runner=runner, how=how)


def rounded_inputs(inputs: Mapping[str, Tensor], dtype: Dtype) -> dict[str, Tensor]:
    """The inputs with floats rounded to `dtype`, held in float64 again; values beyond its range are clipped to it."""
    limit = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    return {
        name: _rounded(array, NUMPY_TYPES[dtype], limit) if np.issubdtype(array.dtype, np.floating) else array
        for name, array in inputs.items()
    }


def _rounded(array: Tensor, dtype: np.dtype[Any], limit: float) -> Tensor:
    clipped = np.where(np.isfinite(array), np.clip(array, -limit, limit), array)
    return clipped.astype(dtype).astype(np.float64)
