"""Contract models whose batch and lengths have names, as those of exported models: a lowering may ask which are equal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from qknorm_onnx.lowering.registry import LoweringOutcome, lower
from tests.contract.case_models import NUMPY_TYPES, model_of
from tests.contract.spec_cases import Array, Case


def named_model(cases: Sequence[Case], dtype: str = "float32", *, opset: int = 20, attach: bool = True) -> ir.Model:
    """`model_of(cases)` with names for batch, new queries and new keys; tables and biases of batch 1 say so."""
    model = model_of(cases, dtype, opset=opset, attach=attach)
    values = {value.name: value for value in model.graph.inputs}
    for case in cases:
        for name, array in case.inputs.items():
            value = values[f"{case.id}/{name}"]
            assert value.shape is not None
            value.shape = ir.Shape(_dims(case, name, array, list(value.shape)))
    return model


def _dims(case: Case, name: str, array: Array, dims: list[int | ir.SymbolicDim]) -> list[int | str | ir.SymbolicDim]:
    queries, keys = case.inputs["query"].shape[1], case.inputs["key"].shape[1]
    batch, length = f"{case.id}_batch", f"{case.id}_queries"
    if name == "query":
        return [batch, length, dims[2]]
    if name in ("key", "value"):
        return [batch, length if keys == queries else f"{case.id}_keys", dims[2]]
    if name in ("cos", "sin") and array.ndim > 2:
        first: int | str = 1 if array.shape[0] == 1 else batch
        return [first, *([array.shape[1]] if array.ndim == 4 else []), *dims[array.ndim - 2 :]]
    return list(dims)


def lowered(
    cases: Sequence[Case], dtype: str = "float32", *, target: str = "ort", provider: str = "cpu", opset: int = 20
) -> tuple[ir.Model, dict[str, LoweringOutcome]]:
    """The model lowered, and what became of each case."""
    model = named_model(cases, dtype, opset=opset, attach=False)
    outcomes = lower(model, target=target, provider=provider)
    assert [outcome.name for outcome in outcomes] == [case.id for case in cases]
    return model, {outcome.name: outcome for outcome in outcomes}


def with_unused_entries(cases: Sequence[Case], outputs: dict[str, Array], dtype: str) -> dict[str, Array]:
    """`outputs` with the unused entries of fixed-size caches as they came in: they may hold anything."""
    found = dict(outputs)
    for case in cases:
        if "cache_length" not in case.inputs:
            continue
        new = case.inputs["key"].shape[1]
        for side in ("key", "value"):
            name = f"{case.id}/present_{side}"
            if name in found:
                found[name] = np.array(found[name])
                given = case.inputs[f"past_{side}"].astype(NUMPY_TYPES[dtype])
                for row, valid in enumerate(case.inputs["cache_length"]):
                    found[name][row, :, int(valid) + new :] = 0
                    found[name][row, :, int(valid) + new : given.shape[2]] = given[row, :, int(valid) + new :]
    return found
