"""Each canonical node of a model alone in a narrow type, run by its native kernel and judged against float64.

The inputs of a node are what reaches it in the float32 model, rounded to the types that the node has in the converted model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch

from qknorm_onnx.graph.canonical.qk_norm_node import (
    input_values,
    is_attention_node,
    make_attention_node,
    make_rotary_node,
    read_attention_node,
    read_rotary_node,
)
from qknorm_onnx.graph.passes.attach_bodies import AttachBodiesPass
from qknorm_onnx.runtime.half_precision import convert_dtype
from qknorm_onnx.runtime.native_kernels import canonical_nodes
from qknorm_onnx.runtime.placement import node_placements
from qknorm_onnx.runtime.runner import make_runner
from qknorm_onnx.spec.reference import qk_norm_attention, qk_norm_rotary
from qknorm_onnx.spec.signature import DOMAIN, VERSION, Dtype
from qknorm_onnx.torch_export.operators import torch_op
from qknorm_onnx.validation.measures.error_budget import budget
from qknorm_onnx.validation.measures.metrics import relative_error

Tensor = np.ndarray[Any, Any]
_OUTPUTS: Final = ("Y", "present_key", "present_value")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeError:
    """Error of one output of one node, and how large it may be."""

    name: str
    error: float
    allowed: float

    @property
    def is_allowed(self) -> bool:
        """Whether the error is within its allowance; NaN is not."""
        return self.error <= self.allowed


class NativeNodes:
    """The nodes of a float32 `model` in `dtype`, ready to be judged on any inputs of the model.

    Raises ValueError where a node would not run in its native kernel.
    """

    def __init__(self, model: ir.Model, dtype: Dtype) -> None:
        self._dtype = dtype
        tapped = model.clone()
        self._sources = [_inputs_of(node) for node in canonical_nodes(tapped)]
        _give_out(tapped, [value for inputs in self._sources for value in inputs.values()])
        self._tapped = make_runner(tapped)
        self._nodes = [_alone(node) for node in canonical_nodes(convert_dtype(model, dtype))]
        self._runners = [make_runner(_with_body(alone)) for alone in self._nodes]
        for alone in self._nodes:
            for placement in node_placements(_with_body(alone)):
                if placement.runs_in != "native kernel":
                    raise ValueError(f"{placement.name}: {placement.reason}")

    def errors(self, inputs: Mapping[str, Tensor]) -> Iterator[NodeError]:
        """The error of every output of every node on `inputs` of the whole model. Raises CannotRunError."""
        values = {**inputs, **self._tapped.run(inputs)}
        for sources, alone, runner in zip(self._sources, self._nodes, self._runners, strict=True):
            given = {name: _constant_or(values, source) for name, source in sources.items()}
            types = {str(value.name): value.dtype for value in alone.graph.inputs}
            feeds = {name: _rounded(array, types[name]) for name, array in given.items()}
            yield from self._judged(next(iter(alone.graph)), feeds, list(runner.run(feeds).values()))

    def _judged(self, node: ir.Node, feeds: dict[str, Tensor], outputs: list[Tensor]) -> Iterator[NodeError]:
        truths, own = _truth_and_torch(node, feeds)
        for name, given, truth, torch_output in zip(_OUTPUTS, outputs, truths, own, strict=False):
            allowed = budget(self._dtype, torch_error=relative_error(torch_output, truth), float32_error=0.0).allowed
            yield NodeError(name=f"{node.name} {name}", error=relative_error(given, truth), allowed=allowed)


def _inputs_of(node: ir.Node) -> dict[str, ir.Value]:
    _, inputs = read_attention_node(node) if is_attention_node(node) else read_rotary_node(node)
    return {name: value for name, value in input_values(inputs).items() if value is not None}


def _give_out(model: ir.Model, values: list[ir.Value]) -> None:
    outputs = set(model.graph.outputs)
    for value in values:
        if value.const_value is None and not value.is_graph_input() and value not in outputs:
            model.graph.outputs.append(value)
            outputs.add(value)


def _constant_or(values: Mapping[str, Tensor], source: ir.Value) -> Tensor:
    return values[str(source.name)] if source.const_value is None else source.const_value.numpy()


def _alone(node: ir.Node) -> ir.Model:
    """A model of a copy of `node`, with every input as an input of the graph."""
    inputs = {
        name: ir.Value(name=name, type=ir.TensorType(value.dtype or ir.DataType.FLOAT), shape=_shape(value))
        for name, value in _inputs_of(node).items()
    }
    if is_attention_node(node):
        spec, given = read_attention_node(node)
        made = make_attention_node(spec, dataclasses.replace(given, **inputs), name=str(node.name), num_outputs=len(node.outputs))
    else:
        rotary_spec, rotary_given = read_rotary_node(node)
        made = make_rotary_node(rotary_spec, dataclasses.replace(rotary_given, **inputs), name=str(node.name))
    graph = ir.Graph(list(inputs.values()), made.outputs, nodes=[made], opset_imports={"": 20, DOMAIN: VERSION}, name="alone")
    return ir.Model(graph, ir_version=10)


def _shape(value: ir.Value) -> ir.Shape | None:
    return None if value.shape is None else ir.Shape(list(value.shape))


def _with_body(model: ir.Model) -> ir.Model:
    copy = model.clone()
    AttachBodiesPass()(copy)
    return copy


def _rounded(array: Tensor, dtype: ir.DataType | None) -> Tensor:
    """`array` in `dtype`; finite values stay finite, so that the minimum of float32 in a mask does not become -inf."""
    if dtype is None or not np.issubdtype(array.dtype, np.floating) or array.dtype == dtype.numpy():
        return array
    limit = float(ml_dtypes.finfo(dtype.numpy()).max)
    return np.where(np.isfinite(array), np.clip(array, -limit, limit), array).astype(dtype.numpy())


def _truth_and_torch(node: ir.Node, feeds: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of the float64 reference, and of PyTorch in the type of the feeds."""
    tensors = {name: _to_torch(array) for name, array in feeds.items()}
    exact = {name: array if array.dtype == np.bool_ else _exact(array) for name, array in feeds.items()}
    if is_attention_node(node):
        spec, _ = read_attention_node(node)
        truth = list(qk_norm_attention(spec, exact).values())
        own = list(torch_op.qk_norm_attention_with_present(spec, **tensors))
    else:
        rotary_spec, _ = read_rotary_node(node)
        truth = [qk_norm_rotary(rotary_spec, exact)["Y"]]
        own = [torch_op.qk_norm_rotary(rotary_spec, **tensors)]
    return truth, [output.double().numpy() for output in own]


def _exact(array: Tensor) -> Tensor:
    return array if np.issubdtype(array.dtype, np.integer) else array.astype(np.float64)


def _to_torch(array: Tensor) -> torch.Tensor:
    contiguous = np.ascontiguousarray(array)
    if contiguous.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(contiguous.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(contiguous.copy())
