"""The files that are tried: each model for every target and type, beside its inputs and what PyTorch computes of them."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

import qknorm_onnx as qk
from qknorm_onnx.spec.signature import Dtype
from qknorm_onnx.spec.targets import TARGET_NAMES
from qknorm_onnx.torch_export.exporter import export_graph
from qknorm_onnx.torch_export.load import load_source
from qknorm_onnx.validation.cases.inputs import match_inputs
from qknorm_onnx.validation.cases.made import make_cases
from qknorm_onnx.validation.torch_side import TorchSide, call_of
from tools.runtimes.trial import MODELS, ModelFile, encoded

CASES: Final = ("example", "batch 1", "batch 3, longer")
DEFAULT_OPSET: Final = 20
OPSETS: Final = {"onnx": 23, "primitive": 18}  # as `qk.export` chooses them
# The error against float64 may be four times PyTorch's own in the type, and eight units of it: other sums, in other orders.
TIMES_TORCH, UNITS = 4, 8


def write_model(folder: pathlib.Path, model: str, dtype: Dtype, *, targets: Sequence[str] = TARGET_NAMES) -> dict[str, str]:
    """Write the files of one model in one type; returns by target what its file needs, or why there is none."""
    module, kwargs, axes = _built(model)
    kind = getattr(torch, dtype)
    module = module.to(kind)
    kwargs = {name: _narrowed(value, kind) for name, value in kwargs.items()}
    graphs: dict[int, Any] = {}
    said = {}
    for target in targets:
        opset = OPSETS.get(target, DEFAULT_OPSET)
        file = ModelFile(model=model, target=target, dtype=dtype)
        try:
            if opset not in graphs:
                graphs[opset] = export_graph(module, kwargs=kwargs, dynamic_shapes=axes, opset=opset)[0]
            program = qk.fuse(graphs[opset], target=target, verify=False, require_fusion=True)
            program.save(folder / f"{file.path}.onnx")
            said[target] = program.report.needs
        except Exception as error:
            said[target] = f"not written: {' '.join(str(error).split())}"
    graph = next(iter(graphs.values()))
    call = call_of(module, (), kwargs)
    inputs = match_inputs(graph, call.examples())
    side = TorchSide(call, inputs, dtype)
    types = {str(value.name): value.dtype.numpy() for value in graph.graph.inputs}
    cases = [_case(case.inputs, side, types) for case in make_cases(inputs) if case.name in CASES]
    (folder / f"{file.cases}.json").write_text(json.dumps(cases))
    return said


def _built(model: str) -> tuple[torch.nn.Module, dict[str, Any], Any]:
    name = MODELS[model]
    if "/" in name:
        loaded = load_source(name, with_past=True)
        return loaded.module, dict(loaded.kwargs), loaded.dynamic_shapes
    from tests.zoo import ZOO

    module, kwargs, axes, _ = ZOO[name]("sdpa")
    return module, kwargs, axes or None


def _narrowed(value: Any, kind: torch.dtype) -> Any:
    from torch.utils import _pytree as pytree

    return pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.to(kind) if leaf.is_floating_point() else leaf, value)


def _case(inputs: Mapping[str, Any], side: TorchSide, types: Mapping[str, Any]) -> dict[str, Any]:
    fed = {name: np.asarray(array).astype(types[name]) for name, array in inputs.items()}
    truth = side.truth(fed)
    own = side.in_dtype(fed)
    unit = float(torch.finfo(side._dtype).eps)
    outputs = []
    for exact, of_torch in zip(truth, own if own is not None else truth, strict=True):
        size = float(np.abs(exact).max(initial=0)) or 1.0
        allowed = TIMES_TORCH * float(np.abs(of_torch - exact).max(initial=0)) / size + UNITS * unit
        outputs.append({"exact": encoded(exact), "allowed": allowed})
    return {"inputs": {name: encoded(array) for name, array in fed.items()}, "outputs": outputs}
