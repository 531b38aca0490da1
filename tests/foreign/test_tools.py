"""What common tools make of a file is read as the file itself: quantisers, optimizers, converters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import qknorm_onnx as qk
from tests.foreign.foreign_models import assert_alike, qwen3, saved, torchscript


def quantised(path: Path, result: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(path, result, weight_type=QuantType.QInt8)


class Once:
    """Calibration with one set of inputs."""

    def __init__(self, inputs: dict[str, np.ndarray]) -> None:
        self.waiting = [inputs]

    def get_next(self) -> dict[str, np.ndarray] | None:
        return self.waiting.pop() if self.waiting else None


def statically_quantised(path: Path, result: Path, *, weights_only: bool) -> None:
    from onnxruntime.quantization import quantize_static

    graph = onnx.load(path).graph
    weights = {tensor.name for tensor in graph.initializer}
    computed = [node.name for node in graph.node if node.op_type == "MatMul" and not weights & set(node.input)]
    reader = Once({name: tensor.numpy() for name, tensor in qwen3("sdpa").example.items()})
    excluded = computed if weights_only else []
    quantize_static(path, result, reader, op_types_to_quantize=["MatMul"], nodes_to_exclude=excluded)


def packed(path: Path, result: Path) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(onnx.load(path), block_size=16, is_symmetric=True)
    quantizer.process()
    onnx.save(quantizer.model.model, result)


def optimised(level: str) -> Callable[[Path, Path], None]:
    def tool(path: Path, result: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
        options.optimized_model_filepath = str(result)
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    return tool


def converted(path: Path, result: Path) -> None:
    onnx.save(onnx.version_converter.convert_version(onnx.load(path), 23), result)


TOOLS: dict[str, Callable[[Path, Path], None]] = {
    "quantize_dynamic": quantised,
    "static QDQ of weights": functools.partial(statically_quantised, weights_only=True),
    "MatMulNBits": packed,
    "onnxruntime, basic": optimised("BASIC"),
    "onnxruntime, extended": optimised("EXTENDED"),
    "onnxruntime, all": optimised("ALL"),
    "version converter": converted,
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(torchscript(qwen3("sdpa"), 17), tmp_path_factory.mktemp("foreign"))


@pytest.mark.parametrize("tool", TOOLS)
def test_what_a_tool_wrote_fuses(tool: str, file: Path, tmp_path: Path) -> None:
    result = tmp_path / "result.onnx"
    TOOLS[tool](file, result)
    program = qk.fuse(result)
    assert len(program.report.fused) == 2
    assert not program.report.declined and not program.report.refused
    assert not any("unverified" in fused.note for fused in program.report.fused)
    assert_alike(program.to_proto(), result, qwen3("sdpa"))


def test_products_of_the_attention_in_eight_bits_are_declined(file: Path, tmp_path: Path) -> None:
    """One node would compute them in float32; the hint is what `static QDQ of weights` above does."""
    statically_quantised(file, tmp_path / "result.onnx", weights_only=False)
    report = qk.fuse(tmp_path / "result.onnx").report
    assert len(report.declined) == 2 and not report.fused and not report.plain
    for miss in report.declined:
        assert "QuantizeLinear" in miss.reason and "nodes_to_exclude" in miss.hint


@pytest.mark.parametrize("tool", ["MatMulNBits", "quantize_dynamic"])
def test_a_fused_file_is_quantised_as_it_would_be_unfused(tool: str, file: Path, tmp_path: Path) -> None:
    qk.fuse(file).save(tmp_path / "fused.onnx")
    TOOLS[tool](tmp_path / "fused.onnx", tmp_path / "result.onnx")
    TOOLS[tool](file, tmp_path / "unfused.onnx")
    program = qk.fuse(tmp_path / "result.onnx")
    assert len(program.report.fused) == 2 and not program.report.declined
    assert_alike(program.to_proto(), tmp_path / "unfused.onnx", qwen3("sdpa"))


def test_a_file_of_mixed_types_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """As onnxconverter-common's converter to float16 leaves it where a model converts types itself."""
    graph = onnx.parser.parse_graph(
        "mixed (float[batch, 4] x) => (float[batch, 4] y) <float16[4] scale = {1, 2, 3, 4}> { y = Mul(x, scale) }"
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)]), tmp_path / "mixed.onnx")
    with pytest.raises(qk.InputError, match=r"types are mixed .* onnxruntime\.transformers\.float16"):
        qk.fuse(tmp_path / "mixed.onnx")
