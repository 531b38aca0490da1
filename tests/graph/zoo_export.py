"""Models of the zoo as graphs, exported once per session, and the parity of a fused graph with the module it came from."""

from __future__ import annotations

import dataclasses
import re
from types import ModuleType
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from qknorm_onnx.errors import ExportError
from qknorm_onnx.graph.fusion_report import FusionReport
from qknorm_onnx.graph.passes.attach_bodies import AttachBodiesPass
from qknorm_onnx.graph.passes.fuse import FuseQKNormPass
from qknorm_onnx.graph.passes.prepare import PreparePass
from qknorm_onnx.proof.region_prover import RegionProver
from qknorm_onnx.torch_export.exporter import export_graph
from qknorm_onnx.torch_export.patches.module_patches import mended

EPS = float(np.finfo(np.float32).eps)


@dataclasses.dataclass(frozen=True)
class Exported:
    """A module, its example inputs, the dynamic axes and its graph before fusion."""

    module: torch.nn.Module
    kwargs: dict[str, torch.Tensor]
    axes: dict[str, dict[int, str]]
    model: ir.Model


_exported: dict[tuple[str, str, int], Exported] = {}


def exported(zoo: ModuleType, name: str, *, attention: str = "sdpa", opset: int = 20) -> Exported:
    """Entry `name` of the zoo, built with the given attention implementation and exported with its dynamic axes."""
    key = (name, attention, opset)
    if key not in _exported:
        module, kwargs, axes, _ = zoo.ZOO[name](attention)
        _exported[key] = Exported(module, kwargs, axes, export(module, kwargs, axes, opset=opset))
    return _exported[key]


def export(module: torch.nn.Module, kwargs: dict[str, Any], axes: dict[str, dict[int, str]], *, opset: int) -> ir.Model:
    """The module's graph; where the module treats small or large sizes apart, within the bounds that the refusal names."""
    try:
        return export_graph(module, kwargs=kwargs, dynamic_shapes=axes or None, opset=opset)[0]
    except ExportError as error:
        bounds = {kind: int(size) for kind, size in re.findall(r"Dim\('\w+', (min|max)=(\d+)", str(error))}
        if not bounds:
            raise
    bounded = {name: {axis: torch.export.Dim(dim, **bounds) for axis, dim in dims.items()} for name, dims in axes.items()}
    return export_graph(module, kwargs=kwargs, dynamic_shapes=bounded, opset=opset)[0]


def fused(model: ir.Model) -> tuple[ir.Model, FusionReport]:
    """A copy of `model` with proven rewrites and their bodies."""
    copy = model.clone()
    PreparePass()(copy)
    fuse = FuseQKNormPass(RegionProver())
    fuse(copy)
    AttachBodiesPass()(copy)
    assert_in_order(copy)
    return copy, fuse.report


def assert_in_order(model: ir.Model) -> None:
    """Every node reads what nodes before it made, as ONNX demands; not every runtime minds."""
    made = set()
    for node in model.graph:
        late = [value for value in node.inputs if value is not None and value.producer() is not None and value not in made]
        assert not late, f"{node.name} reads {late[0].name}, which is made after it"
        made.update(node.outputs)


def assert_parity(model: ir.Model, source: Exported, *, sizes: dict[str, int]) -> None:
    """The graph's error against float64 is at most twice that of PyTorch in float32, at other sizes than the exported ones."""
    inputs = resized(source, sizes)
    own, exact = _truth(source, inputs)
    output = run(model, feeds(inputs))[0]
    assert output.shape == exact.shape
    if np.isfinite(exact).all():
        allowed = 2 * _error(own, exact) + 4 * EPS
    else:  # eager TimesFM is NaN in float64, and fine in float32: that is all there is to compare with
        exact, allowed = own, 8 * EPS
    assert exact.size and _error(output, exact) <= allowed


def assert_no_worse(model: ir.Model, source: Exported) -> None:
    """The graph's error against float64 is at most twice that of the graph before fusion, on the example."""
    _, exact = _truth(source, source.kwargs)
    before, after = (_error(run(graph, feeds(source.kwargs))[0], exact) for graph in (source.model, model))
    assert exact.size and after <= 2 * before + 4 * EPS


def _truth(source: Exported, inputs: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The module's output in float32 and in float64."""
    with torch.no_grad(), mended(source.module, keep_cache=False):
        own = source.module(**inputs).numpy()
        double = pytree.tree_map(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, inputs)
        source.module.double()
        try:
            return own, source.module(**double).numpy()
        finally:
            source.module.float()


def _error(given: np.ndarray, exact: np.ndarray) -> float:
    assert np.isfinite(given).all()
    return float(np.abs(given - exact).max() / np.abs(exact).max())


def resized(source: Exported, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """Random inputs like the example's, with other sizes for the named axes."""
    generator = torch.Generator().manual_seed(3)
    out = {}
    for name, tensor in source.kwargs.items():
        axes = source.axes.get(name, {})
        if not axes:  # also lists of tensors
            out[name] = tensor
            continue
        shape = [sizes.get(axes.get(axis, ""), size) for axis, size in enumerate(tensor.shape)]
        if tensor.is_floating_point():
            out[name] = torch.randn(shape, generator=generator)
        elif tensor.dtype == torch.bool:
            out[name] = torch.ones(shape, dtype=torch.bool)
        else:
            out[name] = torch.randint(5, 100, shape, generator=generator)
    return out


def feeds(inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    """Graph inputs by name; the tensors of a list have its name and their place."""
    lists = {name: value if isinstance(value, list) else [value] for name, value in inputs.items()}
    return {
        f"{name}.{place}" if isinstance(inputs[name], list) else name: tensor.numpy()
        for name, tensors in lists.items()
        for place, tensor in enumerate(tensors)
    }


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs of onnxruntime on the CPU, without the native library."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)
