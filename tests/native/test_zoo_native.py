"""Models of the zoo on the native kernels: the whole model in float32 and float16, each fused node alone in bfloat16."""

from __future__ import annotations

import numpy as np
import pytest

from qknorm_onnx import custom_ops
from qknorm_onnx.runtime.half_precision import convert_dtype
from qknorm_onnx.runtime.placement import node_placements
from tools.native_nodes import NativeNodes
from tools.zoo_entry import Measured, exported, nodes_alone, whole_model
from tools.zoo_facts import KNOWN_FAILURES, NOT_EXPORTED, facts

COLUMNS = {"float32": "fp32", "float16": "fp16"}
# L2 with a learned temperature; two streams prepared one by one.
QUICK = ["h_clamped_logit_scale", "h_joint_mmdit"]


@pytest.fixture(scope="module")
def grouped(zoo) -> Measured:
    """Two layers with grouped heads."""
    return exported(zoo, "h_rms_perhead_gqa")


def check_native(entry: str, measured: Measured) -> None:
    for dtype in ("float32", "float16"):
        model = measured.program.model if dtype == "float32" else convert_dtype(measured.program.model, dtype)
        placements = node_placements(model)
        assert placements
        assert [item.runs_in for item in placements] == ["native kernel"] * len(placements), placements
        assert all(item.kernel.endswith(dtype) for item in placements)
        cell = whole_model(measured, dtype)
        assert cell.verdict == "ok" or (entry, COLUMNS[dtype]) in KNOWN_FAILURES, f"{dtype}: {cell}"
    cell = nodes_alone(measured, "bfloat16")
    assert cell.verdict == "ok", f"bfloat16 nodes: {cell}"


@pytest.mark.parametrize("entry", QUICK)
def test_quick_entries(zoo, library_file, entry):
    check_native(entry, exported(zoo, entry))


@pytest.mark.slow
def test_every_fused_entry(zoo, library_file, subtests):
    for entry in zoo.ZOO:
        if facts(entry).fusable > facts(entry).unread and entry not in NOT_EXPORTED:
            with subtests.test(entry):
                check_native(entry, exported(zoo, entry))


def test_grouped_heads(grouped, library_file):
    check_native("h_rms_perhead_gqa", grouped)


def test_a_node_that_computes_something_else_is_found(grouped, library_file):
    nodes = NativeNodes(grouped.program.model, "bfloat16")
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 5, 64))}
    assert all(item.is_allowed for item in nodes.errors(feeds))
    for runner in nodes._runners:
        shifted(runner)
    assert not any(item.is_allowed for item in nodes.errors(feeds) if item.name.endswith(" Y"))


def shifted(runner):
    """The runner with values an eighth larger than the ones that it is given."""
    run = runner.run
    runner.run = lambda feeds: run({**feeds, "value": feeds["value"] * np.array(1.125, feeds["value"].dtype)})


def test_without_a_kernel_there_is_no_verdict(grouped, library_file, monkeypatch):
    def missing() -> None:
        raise FileNotFoundError("no library here")

    monkeypatch.setattr(custom_ops, "library_path", missing)
    assert "no library here" in whole_model(grouped, "float32").reason
    with pytest.raises(ValueError, match="no library here"):
        NativeNodes(grouped.program.model, "bfloat16")
