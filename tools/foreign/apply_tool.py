"""Applies one tool to one file, in the environment of requirements/foreign/tools.txt, without this package.

python apply_tool.py TOOL SOURCE RESULT INPUTS.npz     several tools, one after the other: FIRST+SECOND
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime


def converted(version: int) -> Callable[[str, str, str], None]:
    """onnx's version converter."""

    def tool(source: str, result: str, _inputs: str) -> None:
        onnx.save(onnx.version_converter.convert_version(onnx.load(source), version), result)

    return tool


def optimised(level: str) -> Callable[[str, str, str], None]:
    """What onnxruntime's optimizer writes."""

    def tool(source: str, result: str, _inputs: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level.upper()}")
        options.optimized_model_filepath = result
        onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])

    return tool


def simplified(source: str, result: str, _inputs: str) -> None:
    """onnxsim; RuntimeError where it finds its own result wrong."""
    import onnxsim

    model, same = onnxsim.simplify(onnx.load(source))
    if not same:
        raise RuntimeError("onnxsim says that its result computes something else")
    onnx.save(model, result)


def slimmed(source: str, result: str, _inputs: str) -> None:
    """onnxslim."""
    import onnxslim

    onnxslim.slim(source, result)


def of_transformers(source: str, result: str, _inputs: str) -> None:
    """onnxruntime's optimizer for transformers, as for BERT."""
    from onnxruntime.transformers.optimizer import optimize_model

    optimize_model(source, model_type="bert", num_heads=4, hidden_size=0, opt_level=0).save_model_to_file(result)


def dynamically_quantised(source: str, result: str, _inputs: str) -> None:
    """onnxruntime's quantize_dynamic, weights of 8 bits."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(source, result, weight_type=QuantType.QInt8)


class Once:
    """Calibration with one set of inputs."""

    def __init__(self, inputs: dict[str, np.ndarray]) -> None:
        self._waiting = [inputs]

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The next inputs, or None."""
        return self._waiting.pop() if self._waiting else None


def statically_quantised(*, weights_only: bool, fmt: str = "QDQ", **settings: Any) -> Callable[[str, str, str], None]:
    """onnxruntime's quantize_static; all products, or those with weights only."""

    def tool(source: str, result: str, inputs: str) -> None:
        from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

        graph = onnx.load(source).graph
        taken = {value.name for value in graph.input}
        fed = {name: array for name, array in np.load(inputs).items() if name in taken}
        reader: Any = Once(fed)
        weights = {tensor.name for tensor in graph.initializer}
        computed = [node.name for node in graph.node if node.op_type == "MatMul" and not weights & set(node.input)]
        quantize_static(
            source,
            result,
            reader,
            quant_format=QuantFormat[fmt],
            op_types_to_quantize=["MatMul"],
            nodes_to_exclude=computed if weights_only else [],
            **{name: getattr(QuantType, value) if isinstance(value, str) else value for name, value in settings.items()},
        )

    return tool


def packed(source: str, result: str, _inputs: str) -> None:
    """Weights of 4 bits in blocks of 16."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(onnx.load(source), block_size=16, is_symmetric=True)
    quantizer.process()
    onnx.save(quantizer.model.model, result)


def narrowed_by_onnxruntime(source: str, result: str, _inputs: str) -> None:
    """Float16 by onnxruntime."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=True), result)


def narrowed_by_common(source: str, result: str, _inputs: str) -> None:
    """Float16 by onnxconverter-common."""
    from onnxconverter_common import float16

    onnx.save(float16.convert_float_to_float16(onnx.load(source), keep_io_types=True), result)


def narrowed_in_part(source: str, result: str, _inputs: str) -> None:
    """Float16 by onnxruntime, with the operators of norms and softmax left in float32."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    kept = ["Pow", "ReduceMean", "ReduceL2", "Sqrt", "LayerNormalization", "Softmax"]
    onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=True, op_block_list=kept), result)


def preprocessed(source: str, result: str, _inputs: str) -> None:
    """What onnxruntime advises before static quantisation: symbolic shapes, and its optimizer."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    quant_pre_process(source, result, auto_merge=True)


def external(source: str, result: str, _inputs: str) -> None:
    """Weights in a file beside it."""
    place = pathlib.Path(result).name + ".data"
    onnx.save(onnx.load(source), result, save_as_external_data=True, location=place, size_threshold=0)


def fixed(source: str, result: str, inputs: str) -> None:
    """Inputs of fixed sizes: those of the first case."""
    model, sizes = onnx.load(source), np.load(inputs)
    for value in model.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, sizes[value.name].shape, strict=True):
            dim.Clear()
            dim.dim_value = size
    for value in model.graph.output:
        for dim in value.type.tensor_type.shape.dim:
            dim.Clear()
    del model.graph.value_info[:]
    onnx.save(model, result)


TOOLS: dict[str, Callable[[str, str, str], None]] = {
    "convert20": converted(20),
    "convert23": converted(23),
    "convert24": converted(24),
    "preprocessed": preprocessed,
    "external": external,
    "fixed": fixed,
    "onnxsim": simplified,
    "onnxslim": slimmed,
    "basic": optimised("basic"),
    "extended": optimised("extended"),
    "layout": optimised("layout"),
    "all": optimised("all"),
    "transformers": of_transformers,
    "quantize_dynamic": dynamically_quantised,
    "qdq_weights": statically_quantised(weights_only=True),
    "qdq_channels": statically_quantised(weights_only=True, per_channel=True, activation_type="QUInt8", weight_type="QInt8"),
    "qoperator": statically_quantised(weights_only=True, fmt="QOperator", activation_type="QUInt8"),
    "qdq": statically_quantised(weights_only=False),
    "nbits": packed,
    "float16_onnxruntime": narrowed_by_onnxruntime,
    "float16_blocked": narrowed_in_part,
    "float16_common": narrowed_by_common,
}


def main() -> int:
    """Exit code 0 where the file was written; what the tool says otherwise stands in the last line of stderr."""
    name, source, result, inputs = sys.argv[1:]
    onnxruntime.set_default_logger_severity(3)
    with tempfile.TemporaryDirectory() as folder:
        *before, last = name.split("+")
        for number, step in enumerate(before):
            made = str(pathlib.Path(folder) / f"{number}.onnx")
            TOOLS[step](source, made, inputs)
            source = made
        TOOLS[last](source, result, inputs)
    return 0 if pathlib.Path(result).is_file() else 1


if __name__ == "__main__":
    sys.exit(main())
