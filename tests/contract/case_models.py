"""Contract cases as one ONNX model of canonical nodes, and running and judging such models.

Many cases share one model: a session costs more than the cases in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch

from qknorm_onnx.graph.canonical.qk_norm_node import AttentionInputs, make_attention_node
from qknorm_onnx.graph.passes.attach_bodies import AttachBodiesPass
from qknorm_onnx.torch_export.operators.eager import attention as torch_attention
from qknorm_onnx.validation.measures.error_budget import budget
from tests.contract.spec_cases import Array, Case

NUMPY_TYPES: dict[str, Any] = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
IR_TYPES = {
    "float64": ir.DataType.DOUBLE,
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}
OPTIMISATION_LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")


def rounded(case: Case, dtype: str) -> dict[str, Array]:
    """The inputs of a case in `dtype`; bools and integers as they are."""
    kept = (np.bool_, np.int64)
    out = {}
    for name, value in case.inputs.items():
        with np.errstate(over="ignore"):
            out[name] = value if value.dtype in kept else value.astype(NUMPY_TYPES[dtype])
    return out


def model_of(
    cases: Sequence[Case],
    dtype: str | Callable[[Case], str] = "float64",
    *,
    opset: int = 18,
    attach: bool = True,
    static: Callable[[str], bool] = lambda name: True,
    constants: Callable[[str], bool] = lambda name: False,
) -> ir.Model:
    """One model with a canonical node per case; graph inputs are `<case>/<input>`, outputs `<case>/<output>`.

    Batch and lengths are dynamic; the last dimension is static for the inputs for which `static` says so. Inputs for
    which `constants` says so become initializers.
    """
    graph = ir.Graph([], [], nodes=[], opset_imports={"": opset, "ai.qknorm": 1}, name="cases")
    for case in cases:
        kind = dtype if isinstance(dtype, str) else dtype(case)
        values = {}
        for name, array in rounded(case, kind).items():
            value = _value(f"{case.id}/{name}", array, static=static(name))
            if constants(name):
                value.const_value = ir.tensor(array, name=value.name)
                graph.register_initializer(value)
            else:
                graph.inputs.append(value)
            values[name] = value
        node = make_attention_node(case.spec, AttentionInputs(**values), name=case.id, num_outputs=case.num_outputs)
        graph.append(node)
        graph.outputs.extend(node.outputs)
    model = ir.Model(graph, ir_version=10)
    if attach:
        AttachBodiesPass()(model)
    return model


def feeds_of(model: ir.Model, cases: Sequence[Case], dtype: str | Callable[[Case], str] = "float64") -> dict[str, Array]:
    """The graph inputs of `model_of(cases, dtype)`."""
    wanted = {value.name for value in model.graph.inputs}
    out = {}
    for case in cases:
        kind = dtype if isinstance(dtype, str) else dtype(case)
        out |= {f"{case.id}/{name}": value for name, value in rounded(case, kind).items() if f"{case.id}/{name}" in wanted}
    return out


def run_ort(model: ir.Model, feeds: dict[str, Array], level: str = "ORT_ENABLE_ALL") -> dict[str, Array]:
    """The outputs by name, computed by ONNX Runtime's CPU provider."""
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    values = {name: _ort_value(array) for name, array in feeds.items()}
    names = [output.name for output in session.get_outputs()]
    return {name: _numpy(value) for name, value in zip(names, session.run_with_ort_values(names, values), strict=True)}


def error(found: Array, expected: Array) -> float:
    """max|found - expected| / max|expected|; NaN only where both are; infinite where shapes or NaN differ."""
    found = found.astype(np.float64)
    if found.shape != expected.shape or not np.array_equal(np.isnan(found), np.isnan(expected)):
        return float("inf")
    if not expected.size:
        return 0.0
    difference = np.nanmax(np.abs(found - expected), initial=0.0)
    largest = np.nanmax(np.abs(expected), initial=0.0)
    return float(difference / largest) if largest else float(difference)


def errors(cases: Sequence[Case], outputs: dict[str, Array], dtype: str = "float64") -> dict[str, float]:
    """The error of every output of every case against the reference on the same rounded inputs."""
    out = {}
    for case in cases:
        expected = case.expected({name: _wide(value) for name, value in rounded(case, dtype).items()})
        for name, value in zip(("Y", "present_key", "present_value"), expected, strict=False):
            out[f"{case.id}/{name}"] = error(outputs[f"{case.id}/{name}"], value)
    assert out, "nothing was compared"
    return out


def over_budget(cases: Sequence[Case], outputs: dict[str, Array], dtype: str) -> dict[str, str]:
    """The outputs whose error exceeds the budget: twice PyTorch's own in `dtype`, and four units of the type."""
    found = errors(cases, outputs, dtype)
    out = {}
    for case in cases:
        given = rounded(case, dtype)
        expected = case.expected({name: _wide(value) for name, value in given.items()})
        eager = torch_attention(case.spec, {name: _torch(value) for name, value in given.items()})
        for name, value, own in zip(("Y", "present_key", "present_value"), expected, eager, strict=False):
            of_torch = error(own.double().numpy(), value)
            allowed = budget(dtype, torch_error=of_torch, float32_error=of_torch).allowed
            of_case = found[f"{case.id}/{name}"]
            if not of_case <= allowed:
                out[f"{case.id}/{name}"] = f"error {of_case:.3g}, allowed {allowed:.3g}"
    return out


def _wide(value: Array) -> Array:
    return value if value.dtype in (np.bool_, np.int64) else value.astype(np.float64)


def _value(name: str, array: Array, *, static: bool) -> ir.Value:
    dims: list[int | None] = [None] * array.ndim
    if array.ndim and static:
        dims[-1] = array.shape[-1]
    return ir.Value(name=name, shape=ir.Shape(dims), type=ir.TensorType(ir.tensor(array).dtype))


def _ort_value(array: Array) -> ort.OrtValue:
    if array.dtype == ml_dtypes.bfloat16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), int(ir.DataType.BFLOAT16))
    return ort.OrtValue.ortvalue_from_numpy(array)


def _numpy(value: ort.OrtValue) -> Array:
    if value.data_type() == "tensor(bfloat16)":  # NumPy has no such type of its own
        return torch.from_dlpack(value).float().numpy().astype(ml_dtypes.bfloat16)
    return value.numpy()


def _torch(array: Array) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    return torch.from_numpy(np.array(array))
