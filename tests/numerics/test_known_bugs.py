"""`validate` must fail for the mistakes that real exporters make, and pass honest models (B68)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
import torch

from qknorm_onnx.graph.canonical.qk_norm_node import is_attention_node
from qknorm_onnx.validation.validate import validate
from tests.numerics.rotary_attention import RotaryAttention, changed, example, graph_of, right_spec

DTYPES = ("float32", "float16", "bfloat16")


def _norms_dropped(module: RotaryAttention) -> ir.Model:
    spec = changed(right_spec(), norm={"q_kind": "none", "k_kind": "none", "q_epsilon": 0.0, "k_epsilon": 0.0})
    return graph_of(module, spec, q_weight=None, k_weight=None)


def _key_norm_dropped(module: RotaryAttention) -> ir.Model:
    return graph_of(module, changed(right_spec(), norm={"k_kind": "none"}), k_weight=None)


def _l2_epsilon(module: RotaryAttention) -> ir.Model:
    """The epsilon of F.normalize instead of the one under the root: visible only on small rows."""
    return graph_of(module, changed(right_spec(), norm={"epsilon_mode": "clamp"}))


def _epsilon_scaled(module: RotaryAttention) -> ir.Model:
    return graph_of(module, changed(right_spec(), norm={"q_epsilon": 1e-3, "k_epsilon": 1e-3}))


def _layer_norm(module: RotaryAttention) -> ir.Model:
    return graph_of(module, changed(right_spec(), norm={"q_kind": "layer", "k_kind": "layer"}))


def _rotary_first(module: RotaryAttention) -> ir.Model:
    return graph_of(module, changed(right_spec(), rotary={"order": "before_norm"}))


def _rotary_interleaved(module: RotaryAttention) -> ir.Model:
    return graph_of(module, changed(right_spec(), rotary={"interleaved": True}))


def _weight_of_head_0(module: RotaryAttention) -> ir.Model:
    return graph_of(module, q_weight=module.q_weight.detach().numpy()[0])


def _scale_lost(module: RotaryAttention) -> ir.Model:
    return graph_of(module, changed(right_spec(), attention={"scale": 1.0}))


def _window_plus_one(module: RotaryAttention) -> ir.Model:
    return graph_of(module, changed(right_spec(), attention={"left_window_size": right_spec().attention.left_window_size + 1}))


def _gain_rows_swapped(module: RotaryAttention) -> ir.Model:
    weight = module.q_weight.detach().numpy().copy()
    weight[[0, 1]] = weight[[1, 0]]
    return graph_of(module, q_weight=weight)


def _causality_lost(module: RotaryAttention) -> ir.Model:
    return graph_of(module, changed(right_spec(), attention={"is_causal": False}))


def _tiled_heads(module: RotaryAttention) -> ir.Model:
    """Query head h reads key head h % 2 instead of h // 2."""
    order = [0, 2, 1, 3]
    q, weight = module.q_proj.weight.detach().numpy(), module.q_weight.detach().numpy()
    o = module.o_proj.weight.detach().numpy()
    return graph_of(
        module,
        **{
            "q_proj.weight": q.reshape(4, -1, q.shape[1])[order].reshape(q.shape),
            "q_weight": weight[order],
            "o_proj.weight": o.reshape(o.shape[0], 4, -1)[:, order].reshape(o.shape),
        },
    )


BUGS = (
    _norms_dropped,
    _key_norm_dropped,
    _layer_norm,
    _rotary_first,
    _rotary_interleaved,
    _weight_of_head_0,
    _scale_lost,
    _window_plus_one,
    _gain_rows_swapped,
    _causality_lost,
    _tiled_heads,
)


def _smaller(module: RotaryAttention) -> RotaryAttention:
    """The same module with queries and keys of about 1e-3, where epsilon matters."""
    with torch.no_grad():
        module.q_proj.weight.mul_(3e-3)
        module.k_proj.weight.mul_(3e-3)
    return module


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__.strip("_"))
def test_a_known_bug_fails_in_every_type(bug: Callable[[RotaryAttention], ir.Model]):
    module = RotaryAttention()
    report = validate(bug(module), module, kwargs=example(), dtypes=DTYPES)
    assert not report.passed
    for dtype in DTYPES:
        failed = [row for row in report.of(dtype) if row.verdict == "failed"]
        assert any(row.case == "example" for row in failed), f"{dtype}: {report.summary()}"
    located = [row.fault for row in report.rows if row.fault is not None]
    assert {fault.kind for fault in located} == {"meaning"}, "the graph is wrong, its arithmetic is not"


@pytest.mark.parametrize("bug", [_l2_epsilon, _epsilon_scaled], ids=["clamp instead of root", "scaled"])
def test_a_wrong_epsilon_fails_where_rows_are_small(bug: Callable[[RotaryAttention], ir.Model]):
    module = _smaller(RotaryAttention())
    assert validate(graph_of(module), module, kwargs=example(), dtypes=DTYPES).passed
    report = validate(bug(module), module, kwargs=example(), dtypes=DTYPES)
    for dtype in DTYPES:
        assert any(row.verdict == "failed" for row in report.of(dtype)), report.summary()


@pytest.mark.parametrize("seed", range(20))
def test_an_honest_model_passes_whatever_its_weights_and_inputs(seed: int):
    module = RotaryAttention(seed)
    inputs = example(batch=1 + seed % 3, length=7 + seed % 5, seed=100 + seed)
    report = validate(graph_of(module), module, kwargs=inputs, dtypes=DTYPES, seeds=2)
    assert report.passed, report.summary()
    assert {row.how for row in report.of("bfloat16")} == {"converted, emulated"}


def test_a_plain_graph_without_its_norms_fails(plain_graph: ir.Model, plain_module: torch.nn.Module, plain_inputs):
    assert validate(plain_graph, plain_module, kwargs=plain_inputs).passed
    broken = plain_graph.clone()
    roots = [node for node in broken.graph if node.op_type in ("Sqrt", "ReduceL2")]
    assert roots, "the plain graph has norms"
    bypassed = 0
    for node in list(broken.graph):
        if node.op_type in ("Div", "Mul") and any(_is_statistic(value) for value in node.inputs):
            wide = next(value for value in node.inputs if not _is_statistic(value))
            ir.convenience.replace_all_uses_with(node.outputs[0], wide)
            bypassed += 1
    assert bypassed
    report = validate(broken, plain_module, kwargs=plain_inputs, dtypes=("float32", "float16"))
    assert [row.verdict for row in report.rows if row.case == "example"] == ["failed", "failed"]


def _is_statistic(value: ir.Value | None) -> bool:
    """A value with one number per row that a root made."""
    node = value.producer() if value is not None else None
    if node is None:
        return False
    if node.op_type in ("Sqrt", "ReduceL2"):
        return True
    return node.op_type in ("Reciprocal", "Clip", "Max", "Expand", "Add") and _is_statistic(node.inputs[0])


@pytest.fixture(scope="module")
def plain_inputs() -> dict[str, torch.Tensor]:
    return example()


@pytest.fixture(scope="module")
def plain_module() -> torch.nn.Module:
    return RotaryAttention(5).eval()


@pytest.fixture(scope="module")
def plain_graph(plain_module: torch.nn.Module, plain_inputs: dict[str, torch.Tensor]) -> ir.Model:
    """What torch.onnx makes of the module, without any of our passes."""
    pytest.importorskip("onnxscript")
    shapes = {"x": {0: "batch", 1: "length"}, "cos": {0: "length"}, "sin": {0: "length"}}
    program = torch.onnx.export(plain_module, kwargs=plain_inputs, dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert program is not None
    assert not any(is_attention_node(node) for node in program.model.graph)
    return program.model


def test_weights_of_head_0_are_caught_by_the_random_weights_only():
    """With weights of ones the bug is invisible: why test modules always have random ones."""
    module = RotaryAttention()
    with torch.no_grad():
        module.q_weight.fill_(1.0)
    broken = graph_of(module, q_weight=np.ones(16, dtype=np.float32))
    assert validate(broken, module, kwargs=example()).passed
