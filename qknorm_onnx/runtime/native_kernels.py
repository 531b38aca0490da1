"""Whether the native library can run a model's canonical nodes, and where it lies.

ONNX Runtime has no fallback from a registered operator without a kernel of the right type to the node's function body:
the library is registered for a model only where it serves every canonical node of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir

import qknorm_onnx.custom_ops as custom_ops
from qknorm_onnx.graph.canonical.qk_norm_node import (
    canonical_operator,
    input_values,
    is_attention_node,
    read_attention_node,
    read_rotary_node,
)
from qknorm_onnx.graph.onnxruntime_release import LIBRARY_SINCE
from qknorm_onnx.runtime.overloads import release_of
from qknorm_onnx.spec.cuda_support import cuda_refusal, head_sizes
from qknorm_onnx.spec.signature import DOMAIN, KERNEL_DTYPES, Dtype, Provider, numbered_name

_DTYPE_NAMES: dict[ir.DataType, Dtype] = {
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
    nodes = list(canonical_nodes(model))
    if not nodes:
        return NativeKernels(None, "the model has no node of the domain ai.qknorm")
    for node in nodes:
        missing = _missing_kernel(node, provider)
        if missing:
            return NativeKernels(None, missing)
    try:
        unfit = _unfit(nodes)
        if unfit:
            return NativeKernels(None, unfit)
        if provider == "cuda":
            custom_ops.kernel_pack_path()
        return NativeKernels(custom_ops.library_path())
    except FileNotFoundError as error:
        return NativeKernels(None, str(error))


def _unfit(nodes: list[ir.Node]) -> str:
    """Why the library, the installed onnxruntime and the file do not go together; empty where they do.

    Raises:
        FileNotFoundError: there is no library.
    """
    info = custom_ops.build_info()
    names = info.get("names_per_operator", 1)
    for node in nodes:
        operator = canonical_operator(node) or node.op_type
        if node.op_type not in {numbered_name(operator, number) for number in range(1, names + 1)}:
            return f"the kernel library is older than the file and does not know {node.op_type}: install qknorm-onnx again"
    try:
        import onnxruntime
    except ImportError:
        return ""
    if release_of(onnxruntime) >= LIBRARY_SINCE:
        return ""
    oldest = ".".join(map(str, LIBRARY_SINCE))
    return f"the kernel library needs onnxruntime {oldest} or newer, and this is {onnxruntime.__version__}"


def canonical_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """All nodes of `ai.qknorm` in the model, those inside its functions and subgraphs included."""
    graphs = [model.graph, *(function.graph for function in model.functions.values())]
    for graph in graphs:
        yield from (node for node in graph.all_nodes() if node.domain == DOMAIN)


def dtype_name(node: ir.Node) -> Dtype | None:
    """The type T of a canonical node: its first input's; None where the graph does not say it."""
    first = node.inputs[0]
    dtype = first.dtype if first is not None else None
    return _DTYPE_NAMES.get(dtype) if dtype is not None else None


def _missing_kernel(node: ir.Node, provider: Provider) -> str:
    name, operator = dtype_name(node), canonical_operator(node) or node.op_type
    if name is not None and name in KERNEL_DTYPES.get((operator, provider), ()):
        reason = _cuda_refusal(node, name) if provider == "cuda" else None
        return f"{reason} (node {node.name})" if reason else ""
    return f"there is no {provider} kernel of {operator} for {name or 'an unknown type'} (node {node.name})"


def _cuda_refusal(node: ir.Node, dtype: Dtype) -> str | None:
    spec, inputs = read_attention_node(node) if is_attention_node(node) else read_rotary_node(node)
    shapes = {name: value.shape for name, value in input_values(inputs).items() if value and value.shape}
    widths = {name: shape[2] for name, shape in shapes.items() if len(shape) == 3}
    known = {name: width for name, width in widths.items() if isinstance(width, int)}
    return cuda_refusal(spec, dtype=dtype, head_sizes=head_sizes(spec, known))
