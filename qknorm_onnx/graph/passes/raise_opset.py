"""Models of ONNX opsets that are older than our function bodies, raised to the first that has them."""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.canonical.function_body import MINIMUM_OPSET
from qknorm_onnx.graph.passes.inline_functions import inline_functions

# Inputs of a node that old opsets kept as attributes, and the like, are smaller; only these are given to the converter.
LARGEST_CONVERTED = 1000

# What onnxruntime's optimizer writes into ONNX's domain, though ONNX has no such operators; they have but one version.
RUNTIME_OPERATORS = frozenset({"SimplifiedLayerNormalization"})
HELD_DOMAIN = "held.runtime"


def raise_to_floor(model: ir.Model) -> str | None:
    """Convert `model` in place to opset 18 if its opset is older, and say so in one line; None where nothing was to be done.

    ONNX's converter takes whole messages, so it is given the graph without its weights, which are put back by name.

    Raises:
        InputError: the converter refuses, or would change what the model takes and gives.
    """
    version = model.opset_imports.get("", model.opset_imports.get("ai.onnx"))
    if version is None or version >= MINIMUM_OPSET:
        return None
    kept = inline_functions(model).kept
    if kept:
        raise InputError(_refusal(version, kept[0]))
    common.LiftConstantsToInitializersPass(lift_all_constants=False, size_limit=LARGEST_CONVERTED)(model)
    weights = {str(value.name): value for value in model.graph.initializers.values()}
    converted = _converted(model, version)
    _put_back(converted.graph, weights, inputs={str(value.name) for value in model.graph.inputs})
    if _interface(converted.graph) != _interface(model.graph):
        raise InputError(_refusal(version, "its inputs and outputs would change"))
    model.graph = converted.graph
    model.opset_imports.update({"": MINIMUM_OPSET})
    return f"the file has ONNX opset {version}; it was raised to {MINIMUM_OPSET}, the first that has what function bodies need"


def _converted(model: ir.Model, version: int) -> ir.Model:
    small = model.clone()
    names = {str(value.name) for value in small.graph.inputs}
    for value in list(small.graph.initializers.values()):
        tensor = value.const_value
        if tensor is not None:
            value.shape, value.type = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
        if tensor is None or tensor.nbytes > LARGEST_CONVERTED:
            value.const_value = None
            small.graph.initializers.pop(str(value.name))
        if value.name not in names:
            small.graph.inputs.append(value)
    held = [node for node in small.graph.all_nodes() if node.domain == "" and node.op_type in RUNTIME_OPERATORS]
    for node in held:
        node.domain = HELD_DOMAIN
    if held:
        small.graph.opset_imports[HELD_DOMAIN] = 1
    try:
        converted = ir.from_proto(onnx.version_converter.convert_version(ir.to_proto(small), MINIMUM_OPSET))
    except (RuntimeError, ValueError, onnx.version_converter.ConvertError) as error:
        raise InputError(_refusal(version, _first_line(error))) from error
    for node in converted.graph.all_nodes():
        node.domain = "" if node.domain == HELD_DOMAIN else node.domain
    converted.graph.opset_imports.pop(HELD_DOMAIN, None)
    return converted


def _put_back(graph: ir.Graph, weights: dict[str, ir.Value], *, inputs: set[str]) -> None:
    """Make initializers of the inputs that stand for weights."""
    for value in list(graph.inputs):
        weight = weights.get(str(value.name))
        if weight is None or weight.const_value is None:
            continue
        if value.name not in inputs:
            graph.inputs.remove(value)
        if value.name not in graph.initializers:
            value.const_value = weight.const_value
            graph.register_initializer(value)


def _interface(graph: ir.Graph) -> tuple[list[str | None], list[str | None]]:
    return [value.name for value in graph.inputs], [value.name for value in graph.outputs]


def _refusal(version: int, why: str) -> str:
    return (
        f"the model has ONNX opset {version}, and {MINIMUM_OPSET} or newer is needed; ONNX's converter cannot raise it ({why}): "
        "export it again with a newer opset"
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
