"""What common tools make of a file is read as the file itself: quantisers, optimizers, converters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest

import qknorm_onnx as qk
from tests.foreign.foreign_models import assert_alike, qwen3, saved, torchscript


def quantised(path: Path, result: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(path, result, weight_type=QuantType.QInt8)


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
