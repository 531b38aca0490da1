"""Models that onnxruntime saved, optimised or in its own format: numbered names stay right with the library and without it."""

from __future__ import annotations

import collections

import onnx_ir as ir
import onnxruntime
import pytest

import qknorm_onnx as qk
from qknorm_onnx import custom_ops
from qknorm_onnx.graph.onnxruntime_release import needs_of
from qknorm_onnx.runtime.placement import node_placements
from qknorm_onnx.spec.variants.variant import norm_gains
from tests.contract.case_models import errors, feeds_of, model_of
from tests.contract.spec_cases import case

CASES = [
    case("sliding", inputs=norm_gains(), is_causal=True, left_window_size=2),
    case("global", inputs=norm_gains(), is_causal=True, heads=(6, 2)),
    case("sliding too", inputs=norm_gains(), is_causal=True, left_window_size=2, sizes={"seed": 7, "batch": 3, "length": 7}),
    case("cached", inputs=norm_gains(), is_causal=True, num_outputs=3, sizes={"past_length": 3}),
]
NAMES = {"QKNormAttention": 2, "QKNormAttention_2": 1, "QKNormAttention_3": 1}
LEVELS = ("ORT_ENABLE_BASIC", "ORT_ENABLE_ALL")


def options_of(*, library, level="ORT_ENABLE_ALL"):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    if library:
        options.register_custom_ops_library(str(custom_ops.library_path()))
    return options


def saved(path, *, library, level="ORT_ENABLE_ALL", file_format="ONNX"):
    """What onnxruntime saves of the model of `CASES`; and that model."""
    model = model_of(CASES, "float32")
    options = options_of(library=library, level=level)
    options.optimized_model_filepath = str(path)
    options.add_session_config_entry("session.save_model_format", file_format)
    content = ir.to_proto(model).SerializeToString()
    onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return model


def worst(session, model):
    names = [output.name for output in session.get_outputs()]
    outputs = dict(zip(names, session.run(None, feeds_of(model, CASES, "float32")), strict=True))
    return max(errors(CASES, outputs, "float32").values())


def canonical_names(path):
    return dict(collections.Counter(node.op_type for node in ir.load(path).graph.all_nodes() if node.domain == "ai.qknorm"))


@pytest.mark.parametrize("level", LEVELS)
def test_optimised_with_the_library_keeps_every_name(tmp_path, level):
    path = tmp_path / "optimised.onnx"
    model = saved(path, library=True, level=level)
    assert canonical_names(path) == NAMES
    assert needs_of(ir.load(path)).bodiless == tuple(NAMES)
    assert worst(qk.create_session(path), model) < 2e-5
    assert {item.runs_in for item in node_placements(path)} == {"native kernel"}
    with pytest.raises(
        qk.InputError, match=r"QKNormAttention, QKNormAttention_2, QKNormAttention_3 of this model have no function"
    ):
        qk.create_session(path, native_kernels=False)


@pytest.mark.parametrize("level", LEVELS)
def test_optimised_without_the_library_has_each_body_in_its_place(tmp_path, level):
    path = tmp_path / "optimised.onnx"
    model = saved(path, library=False, level=level)
    assert canonical_names(path) == {}
    for native_kernels in (True, False):
        assert worst(qk.create_session(path, native_kernels=native_kernels), model) < 2e-5


def test_fusing_a_file_that_the_library_optimised_gives_bodies_again(tmp_path):
    path = tmp_path / "optimised.onnx"
    model = saved(path, library=True)
    program = qk.fuse(path, verify=False)
    assert not needs_of(program.model).bodiless
    assert worst(qk.create_session(program, native_kernels=False), model) < 2e-5


@pytest.mark.parametrize("library", [True, False])
def test_ort_format(tmp_path, library):
    path = tmp_path / "model.ort"
    model = saved(path, library=library, file_format="ORT")
    session = onnxruntime.InferenceSession(str(path), options_of(library=library), providers=["CPUExecutionProvider"])
    assert worst(session, model) < 2e-5
    with_library = onnxruntime.InferenceSession(str(path), options_of(library=True), providers=["CPUExecutionProvider"])
    assert worst(with_library, model) < 2e-5
    if library:
        with pytest.raises(Exception, match="QKNormAttention"):
            onnxruntime.InferenceSession(str(path), options_of(library=False), providers=["CPUExecutionProvider"])


def test_create_session_says_that_a_file_is_in_ort_format(tmp_path):
    path = tmp_path / "model.ort"
    saved(path, library=True, file_format="ORT")
    with pytest.raises(qk.InputError, match=r"model\.ort is in onnxruntime's own format.*register_custom_ops_library"):
        qk.create_session(path)
