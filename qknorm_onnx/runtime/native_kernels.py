"""Whether the native library can run a model's canonical nodes, and where it lies.

ONNX Runtime has no fallback from a registered operator without a kernel of the right type to the node's function body:
the library is registered for a model only where it serves every canonical node of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir

from qknorm_onnx import custom_ops
from qknorm_onnx.spec.signature import DOMAIN, KERNEL_DTYPES, Provider

_DTYPE_NAMES = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.DOUBLE: "float64",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
}


@dataclasses.dataclass(frozen=True)
class NativeKernels:
    """`library` is None where the nodes run through their function bodies; `reason` then says why, in one sentence."""

    library: Path | None
    reason: str = ""


def native_kernels_for(model: ir.Model, *, provider: Provider) -> NativeKernels:
    """The native library, if it is there and serves every canonical node of `model` on `provider`."""
    nodes = list(_canonical_nodes(model))
    if not nodes:
        return NativeKernels(None, "the model has no node of the domain ai.qknorm")
    for node in nodes:
        missing = _missing_kernel(node, provider)
        if missing:
            return NativeKernels(None, missing)
    try:
        return NativeKernels(custom_ops.library_path())
    except FileNotFoundError as error:
        return NativeKernels(None, str(error))


def _canonical_nodes(model: ir.Model) -> Iterator[ir.Node]:
    graphs = [model.graph, *(function.graph for function in model.functions.values())]
    for graph in graphs:
        yield from (node for node in graph.all_nodes() if node.domain == DOMAIN)


def _missing_kernel(node: ir.Node, provider: Provider) -> str:
    first = node.inputs[0]
    dtype = first.dtype if first is not None else None
    name = _DTYPE_NAMES.get(dtype, "an unknown type") if dtype is not None else "an unknown type"
    if name in KERNEL_DTYPES.get((node.op_type, provider), ()):
        return ""
    return f"there is no {provider} kernel of {node.op_type} for {name} (node {node.name})"
