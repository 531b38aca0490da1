"""Exports that several tests look at, made once."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from qknorm_onnx.torch_export.exporter import export_graph


@dataclasses.dataclass(frozen=True)
class PlainExport:
    """A zoo model and its graph before any fusion."""

    module: torch.nn.Module
    kwargs: dict[str, torch.Tensor]
    dynamic_shapes: dict[str, Any]
    model: ir.Model
    notes: tuple[str, ...]


@pytest.fixture(scope="session")
def plain_export(zoo):
    """`plain_export(name, opset)` of a zoo model, with dynamic batch and sequence."""

    @functools.cache
    def make(name, opset=20):
        module, kwargs, dynamic_shapes, _ = zoo.ZOO[name]()
        model, notes = export_graph(module, kwargs=kwargs, dynamic_shapes=dynamic_shapes, opset=opset)
        return PlainExport(module, kwargs, dynamic_shapes, model, notes)

    return make


@pytest.fixture(scope="session")
def run_model():
    """`run_model(ir_model, named_tensors)` -> the outputs of onnxruntime's CPU provider, as tensors."""
    onnxruntime = pytest.importorskip("onnxruntime")
    sessions = {}

    def run(model, inputs):
        if id(model) not in sessions:
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = 1
            data = ir.to_proto(model).SerializeToString()
            sessions[id(model)] = model, onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        feeds = {name: np.asarray(value.detach()) for name, value in inputs.items()}
        return [torch.from_numpy(output) for output in sessions[id(model)][1].run(None, feeds)]

    return run


@pytest.fixture(scope="session")
def assert_as_torch():
    """`assert_as_torch(found, computed)`: in float32, no further from PyTorch than rounding explains."""

    def check(found, expected, *, bound=2e-5):
        expected = expected.detach()
        assert found.shape == expected.shape
        assert torch.isfinite(found).all()
        assert float((found - expected).abs().max()) <= bound * float(expected.abs().max())

    return check
