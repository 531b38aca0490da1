"""Masks of transformers models as torch.onnx writes them: read back, and compared with what runs."""

from __future__ import annotations

import time
from types import ModuleType

import numpy as np
import onnx_ir as ir
import pytest

from qknorm_onnx.graph.recognise.masks.mask import MaskContext

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")
from tests.graph.mask_export import check, cores, export, read, summary  # noqa: E402

DYNAMIC = torch.export.Dim.DYNAMIC


def with_signature(module: torch.nn.Module, names: list[str]) -> torch.nn.Module:
    """The module behind a forward with named arguments, which torch.onnx needs for dynamic shapes."""
    source = f"def forward(self, {', '.join(names)}):\n    return self.inner({', '.join(f'{name}={name}' for name in names)})\n"
    space: dict[str, object] = {}
    exec(source, space)
    kind = type("Named", (torch.nn.Module,), {"forward": space["forward"]})
    named = kind()
    named.inner = module
    return named


def export_entry(
    zoo: ModuleType, name: str, attention: str, opset: int, extra: dict[str, torch.Tensor]
) -> tuple[ir.Model, dict[str, torch.Tensor]]:
    module, arguments, axes, _ = zoo.ZOO[name](attention)
    arguments = arguments | extra
    dynamic = tuple(dict.fromkeys(axes.get(key, {0: 0, 1: 0}), DYNAMIC) for key in arguments)
    return export(with_signature(module, list(arguments)), tuple(arguments.values()), dynamic, opset), arguments


FULL, WINDOW = (True, -1, -1, "both"), (True, 3, -1, "both")
# entry, attention, opset -> one summary a layer
ENTRIES = [
    ("qwen3", "sdpa", 20, [FULL, FULL]),
    ("qwen3_sliding", "eager", 23, [FULL, WINDOW]),
    ("h_rms_sliding", "eager", 18, [WINDOW, WINDOW]),
]
MORE_ENTRIES = [
    ("gemma3_text", "sdpa", 23, [WINDOW, FULL]),
    ("neomme", "sdpa", 20, [(False, 4, 4, "both"), (False, -1, -1, "none")]),
    ("qwen3", "eager", 18, [FULL, FULL]),
    ("qwen3", "sdpa", 23, [FULL, FULL]),
    ("qwen3_sliding", "sdpa", 20, [FULL, WINDOW]),
    ("gemma3_text", "sdpa", 20, [WINDOW, FULL]),
    ("cohere_qk", "sdpa", 20, [FULL, FULL]),
    ("flint", "eager", 20, [WINDOW, FULL]),
    ("h_cosine_tau_causal", "eager", 23, [FULL, FULL]),
]


@pytest.mark.parametrize(
    ("name", "attention", "opset", "expected"),
    [pytest.param(*entry, id="-".join(map(str, entry[:3]))) for entry in ENTRIES]
    + [pytest.param(*entry, id="-".join(map(str, entry[:3])), marks=pytest.mark.slow) for entry in MORE_ENTRIES],
)
def test_zoo(zoo: ModuleType, name: str, attention: str, opset: int, expected: list[object]) -> None:
    model, arguments = export_entry(zoo, name, attention, opset, {})
    found = list(cores(model))
    durations = []
    for _ in range(3):  # the garbage of the export may be collected in one of them
        context = MaskContext()
        start = time.process_time()
        fragments = [read(model, core, context) for core in found]
        durations.append(time.process_time() - start)
    assert min(durations) < 0.2
    assert [summary(fragment) for fragment in fragments] == expected
    assert all(fragment.rows_never_empty and not fragment.residual for fragment in fragments)
    for batch, length in [(1, 1), (3, 9)]:
        key, value = next(iter(arguments.items()))
        shape = (batch, length, *value.shape[2:])
        array = np.ones(shape, np.int64) if value.dtype == torch.long else np.zeros(shape, np.float32)
        for core, fragment in zip(found, fragments, strict=True):
            check(model, core, fragment, {key: array})


@pytest.mark.parametrize(
    ("name", "opset", "expected"),
    [pytest.param("qwen3", 20, FULL, marks=pytest.mark.slow), ("qwen3_sliding", 23, WINDOW)],
)
def test_padding_stays_beside_causality(zoo: ModuleType, name: str, opset: int, expected: tuple[bool, int, int, str]) -> None:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = 0
    model, _ = export_entry(zoo, name, "sdpa", opset, {"attention_mask": mask})
    core = list(cores(model))[-1]
    fragment = read(model, core, MaskContext())
    assert summary(fragment) == expected
    (term,) = fragment.residual
    assert term.broadcasts
    assert "'attention_mask' (a graph input)" in term.reason
    assert not fragment.rows_never_empty
    left = np.ones((3, 7), np.int64)
    left[0, :4] = left[1, 5:] = 0
    check(model, core, fragment, {"input_ids": np.ones((3, 7), np.int64), "attention_mask": left})


@pytest.mark.slow
def test_positions_of_the_caller_prove_nothing(zoo: ModuleType) -> None:
    ids = torch.arange(12)[None].repeat(2, 1)
    model, _ = export_entry(zoo, "qwen3", "sdpa", 20, {"position_ids": ids})
    core = next(cores(model))
    fragment = read(model, core, MaskContext())
    assert not fragment.recognised
    assert [term.value for term in fragment.residual] == [core[0]]
    assert "'position_ids' (a graph input)" in fragment.reasons[0]
    packed = np.array([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]])
    check(model, core, fragment, {"input_ids": np.ones((2, 7), np.int64), "position_ids": packed})


@pytest.mark.parametrize("name", [pytest.param("qwen3", marks=pytest.mark.slow), "qwen3_sliding"])
def test_cached_decode(zoo: ModuleType, name: str) -> None:
    module, inputs, _ = zoo.build_with_cache(name, "sdpa")
    batch, past = inputs[3].shape[0], inputs[3].shape[2]
    new = 3
    inputs = (
        torch.randint(5, 100, (batch, new)),
        torch.arange(past, past + new)[None].repeat(batch, 1),
        torch.ones(batch, past + new, dtype=torch.long),
        *inputs[3:],
    )
    names = ["input_ids", "position_ids", "attention_mask", *(f"past_{n}" for n in range(len(inputs) - 3))]
    source = f"def forward(self, {', '.join(names)}):\n    return self.inner({', '.join(names)})\n"
    space: dict[str, object] = {}
    exec(source, space)
    named = type("Named", (torch.nn.Module,), {"forward": space["forward"]})()
    named.inner = module
    axes = tuple({0: DYNAMIC, 1: DYNAMIC} if n < 3 else {0: DYNAMIC, 2: DYNAMIC} for n in range(len(inputs)))
    model = export(named, inputs, axes, 20)
    found = list(cores(model))
    context = MaskContext()
    fragments = [read(model, core, context) for core in found]
    window = 3 if name == "qwen3_sliding" else -1
    assert [summary(fragment) for fragment in fragments] == [(True, -1, -1, "lower_right"), (True, window, -1, "lower_right")]
    for length, before in [(1, 9), (4, 2), (5, 0)]:
        feeds = {
            "input_ids": np.ones((2, length), np.int64),
            "position_ids": np.arange(before, before + length)[None].repeat(2, 0),
            "attention_mask": np.random.default_rng(0).integers(0, 2, (2, before + length)),
        } | {f"past_{n}": np.zeros((2, 2, before, 32), np.float32) for n in range(len(inputs) - 3)}
        for core, fragment in zip(found, fragments, strict=True):
            check(model, core, fragment, feeds)
