"""A whole ONNX Runtime session of two layers: where the nodes run, what is copied, and whether a CUDA graph captures it.

Only where onnxruntime and the exporter's packages are installed; with `CUDAExecutionProvider` on a GPU, else on the CPU,
which shows that the step works.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import pathlib
import tempfile
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.gpu_cases import FLOOR_UNITS, TORCH_FACTOR, Shape, relative_error
from benchmarks.gpu_report import Report
from benchmarks.gpu_steps import COLUMNS, Plan
from benchmarks.gpu_timing import enqueue_seconds
from qknorm_onnx.torch_export.operators.modules import QKNormAttention

NEEDED = ("onnxruntime", "onnx", "onnx_ir", "onnxscript")


class Layers(nn.Module):
    """Two residual layers of Qwen3's attention; norm weights are random."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.heads * shape.head_size
        self.layers = nn.ModuleList(
            QKNormAttention.from_spec(shape.spec, d_model=width, head_size=shape.head_size, bias=False, rotary_base=10000.0)
            for _ in range(2)
        )
        for name, parameter in self.named_parameters():
            if name.endswith("norm_weight"):
                nn.init.uniform_(parameter, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, width)."""
        for layer in self.layers:
            x = x + layer(x)
        return x


@dataclasses.dataclass(frozen=True)
class Session:
    """A session, the provider that it was made for, and the operators of its final graph with how often they occur."""

    session: Any
    provider: str
    operators: dict[str, int]


def check_session(plan: Plan, report: Report, deadline: float) -> None:
    """Placement, copies, the result, and on a GPU a CUDA graph."""
    del deadline
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        report.notes.append(f"session: not run, these are not installed: {', '.join(missing)}")
        return
    import onnxruntime

    provider = "cuda" if plan.device == "cuda" else "cpu"
    if provider == "cuda" and "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        report.notes.append("session: not run, this onnxruntime has no CUDAExecutionProvider; install onnxruntime-gpu")
        return
    try:
        _check_session(plan, report, provider)
    except Exception as error:
        report.failures.append(f"session: {type(error).__name__}: {error}")


def _check_session(plan: Plan, report: Report, provider: str) -> None:
    import qknorm_onnx as qk

    torch.manual_seed(3)
    dtype = torch.float16 if provider == "cuda" else torch.float32
    shape = dataclasses.replace(plan.prefills[0], new=min(plan.prefills[0].new, 1024))
    module = Layers(shape).to(dtype).eval()
    x = torch.randn(1, shape.new, shape.heads * shape.head_size).to(dtype)
    program = qk.export(module, (x,), provider=provider, require_fusion=True)
    made = make_session(program.model, provider)
    _report_placement(made, report)
    with torch.no_grad():
        expected = module.double()(x.double()).numpy()
        allowed = TORCH_FACTOR * relative_error(module.to(dtype)(x), expected) + FLOOR_UNITS * torch.finfo(dtype).eps
    name = made.session.get_inputs()[0].name
    error = relative_error(torch.from_numpy(made.session.run(None, {name: x.numpy()})[0]), expected)
    rows = [("as it is", f"{error:.2e}", f"{allowed:.2e}", "yes" if error <= allowed else "NO")]
    if not error <= allowed:
        report.failures.append(f"session: error {error:.2e}, allowed {allowed:.2e}")
    if provider == "cuda":
        rows += _check_cuda_graph(program.model, x, expected, allowed, plan, report)
    report.table("Session of two layers against float64", ("session", "error", "allowed", "passed"), rows)


def make_session(model: Any, provider: str, **provider_options: str) -> Session:
    """A session on `provider`, with the graph that ONNX Runtime made of the model."""
    import onnx
    import onnxruntime

    import qknorm_onnx as qk

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED  # else it cannot be written
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "optimised.onnx"
        options.optimized_model_filepath = str(path)
        cuda: list[Any] = [("CUDAExecutionProvider", provider_options)] if provider == "cuda" else []
        session = qk.create_session(model, providers=[*cuda, "CPUExecutionProvider"], session_options=options)
        written = onnx.load(str(path), load_external_data=False)
    return Session(session, provider, dict(collections.Counter(node.op_type for node in written.graph.node)))


def copies(operators: dict[str, int]) -> int:
    """Nodes that copy between host and device."""
    return sum(count for name, count in operators.items() if name.startswith("Memcpy"))


def _report_placement(made: Session, report: Report) -> None:
    """Our nodes on the provider, and no copy between host and device anywhere."""
    wanted = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}[made.provider]
    placed = [
        (subgraph.ep_name, node.name, node.op_type)
        for subgraph in made.session.get_provider_graph_assignment_info()
        for node in subgraph.get_nodes()
    ]
    ours = [(name, operator, provider) for provider, name, operator in placed if operator.startswith("QKNorm")]
    report.table("Session: our nodes", ("node", "operator", "provider"), ours)
    elsewhere = sorted({f"{operator} on {provider}" for provider, _, operator in placed if provider != wanted})
    if not ours or any(provider != wanted for _, _, provider in ours):
        report.failures.append(f"session: the attention nodes are not all on {wanted}")
    if elsewhere:
        report.notes.append(f"session: nodes on another provider than {wanted}: {', '.join(elsewhere)}")
    if copies(made.operators):
        report.failures.append(f"session: {copies(made.operators)} copies between host and device inside the graph")


def _check_cuda_graph(
    model: Any, x: Tensor, expected: np.ndarray, allowed: float, plan: Plan, report: Report
) -> list[tuple[str, ...]]:
    """The same session captured in a CUDA graph: fixed memory, the second run replays, other input gives other output."""
    made = make_session(model, "cuda", enable_cuda_graph="1")
    binding = made.session.io_binding()
    device_x = torch.zeros_like(x, device="cuda")
    y = torch.empty(expected.shape, dtype=x.dtype, device="cuda")
    for bind, value, tensor in (
        (binding.bind_input, made.session.get_inputs()[0], device_x),
        (binding.bind_output, made.session.get_outputs()[0], y),
    ):
        bind(value.name, "cuda", 0, np.float16, tuple(tensor.shape), tensor.data_ptr())
    made.session.run_with_iobinding(binding)  # captures, with an input of zeros
    device_x.copy_(x)
    torch.cuda.synchronize()

    def run() -> None:
        made.session.run_with_iobinding(binding)
        binding.synchronize_outputs()

    run()
    error = relative_error(y, expected)
    if not error <= allowed:
        report.failures.append(f"session in a CUDA graph: error {error:.2e}, allowed {allowed:.2e}")
    taken = enqueue_seconds(run, device="cuda", repeats=plan.repeats)
    report.table("Session in a CUDA graph", COLUMNS[:2], [("replay and wait", f"{taken * 1e6:.1f}")])
    return [("in a CUDA graph", f"{error:.2e}", f"{allowed:.2e}", "yes" if error <= allowed else "NO")]
