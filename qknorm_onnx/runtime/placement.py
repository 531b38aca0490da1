"""Which kernel runs each canonical node of a session: our native one, or ONNX Runtime's operators through the function body.

The answer comes from the session itself, which says where each node of its final graph was placed. What
`native_kernels_for` decided is only the reason that goes with it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import onnx_ir as ir

import qknorm_onnx.custom_ops as custom_ops
from qknorm_onnx.graph.model_file import ModelSource
from qknorm_onnx.runtime.native_kernels import NativeKernels, canonical_nodes, dtype_name, native_kernels_for
from qknorm_onnx.runtime.session import HasModel, create_session, import_onnxruntime, model_of
from qknorm_onnx.spec.signature import DOMAIN, Provider
from qknorm_onnx.spec.targets import EXECUTION_PROVIDERS

if TYPE_CHECKING:
    import onnxruntime

RunsIn = Literal["native kernel", "function body", "unknown"]

_RECORD_PLACEMENT: Final = "session.record_ep_graph_assignment_info"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodePlacement:
    """Where one canonical node runs.

    execution_provider: of the native kernel, for example `CPUExecutionProvider`; "" for a function body, whose operators
        may be on several.
    kernel: what computes, for people: `avx2, float32`.
    reason: why it is not the native kernel; "" where it is.
    """

    name: str
    op_type: str
    runs_in: RunsIn
    execution_provider: str = ""
    kernel: str = ""
    reason: str = ""


def node_placements(program_or_path: HasModel | ModelSource, *, provider: Provider = "cpu") -> tuple[NodePlacement, ...]:
    """Create a session on `provider`, as `create_session` does, and say for each canonical node which kernel runs it.

    Raises:
        InputError: onnxruntime or the provider is missing, or the file is no ONNX model.
    """
    ort = import_onnxruntime()
    model = model_of(program_or_path)
    nodes = list(canonical_nodes(model))
    if not nodes:
        return ()
    options = ort.SessionOptions()
    options.add_session_config_entry(_RECORD_PLACEMENT, "1")
    session = create_session(program_or_path, providers=_providers(provider), session_options=options)
    kernels = native_kernels_for(model, provider=provider)
    placed = _placed_nodes(session)
    if placed is None and kernels.library is not None:
        return tuple(_unknown(node, kernels, "this onnxruntime does not say where it placed a node") for node in nodes)
    return tuple(_placement(node, placed or {}, kernels) for node in nodes)


def has_provider(provider: Provider) -> bool:
    """Whether the installed onnxruntime has `provider`. Raises InputError where there is no onnxruntime."""
    return EXECUTION_PROVIDERS[provider] in import_onnxruntime().get_available_providers()


def expected_placements(program_or_path: HasModel | ModelSource, *, provider: Provider) -> tuple[NodePlacement, ...]:
    """What can be said of a model on a machine without its provider: no session is made, each node is "unknown".

    The reasons say whether the native library registers a kernel for each node and serves its spec, and whether the kernel
    pack is there.

    Raises:
        InputError: the file is no ONNX model.
    """
    model = model_of(program_or_path)
    kernels = native_kernels_for(model, provider=provider)
    why = f"no session was made, because there is no {EXECUTION_PROVIDERS[provider]} here"
    return tuple(_unknown(node, kernels, why) for node in canonical_nodes(model))


def _providers(provider: Provider) -> list[str]:
    wanted = EXECUTION_PROVIDERS[provider]
    return [wanted] if provider == "cpu" else [wanted, EXECUTION_PROVIDERS["cpu"]]


_Placed = Mapping[tuple[str, str], collections.deque[str]]


def _placed_nodes(session: onnxruntime.InferenceSession) -> _Placed | None:
    """(name, operator) of the session's canonical nodes -> providers, one for each node; None if the session cannot say."""
    try:
        subgraphs = session.get_provider_graph_assignment_info()
    except (AttributeError, RuntimeError):
        return None
    found: dict[tuple[str, str], collections.deque[str]] = collections.defaultdict(collections.deque)
    for subgraph in subgraphs:
        for node in subgraph.get_nodes():
            if node.domain == DOMAIN:
                found[(node.name, node.op_type)].append(subgraph.ep_name)
    return found


def _placement(node: ir.Node, placed: _Placed, kernels: NativeKernels) -> NodePlacement:
    name = node.name or ""
    providers = placed.get((name, node.op_type))
    if providers:
        where = providers.popleft()
        return NodePlacement(
            name=name,
            op_type=node.op_type,
            runs_in="native kernel",
            execution_provider=where,
            kernel=_native_kernel(node, where),
        )
    reason = kernels.reason or "onnxruntime did not keep the node, although the native library has a kernel for it"
    kernel = "onnxruntime's operators"
    return NodePlacement(name=name, op_type=node.op_type, runs_in="function body", kernel=kernel, reason=reason)


def _unknown(node: ir.Node, kernels: NativeKernels, why: str) -> NodePlacement:
    expected = f"a function body is expected: {kernels.reason}" if kernels.library is None else "the native kernel is expected"
    return NodePlacement(name=node.name or "", op_type=node.op_type, runs_in="unknown", reason=f"{why}; {expected}")


def _native_kernel(node: ir.Node, execution_provider: str) -> str:
    """Instruction set and type of a native kernel, for example `avx2, float32`."""
    info: dict[str, Any] = custom_ops.build_info()
    instructions = info["instruction_set"] if execution_provider == EXECUTION_PROVIDERS["cpu"] else "CUDA kernel pack"
    return f"{instructions}, {dtype_name(node) or 'type unknown'}"
