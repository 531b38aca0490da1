"""ONNX's own checker and strict inference of types and shapes, on a model without its large weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import onnx
import onnx_ir as ir
from onnx import checker

from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.soundness.functions import all_nodes
from qknorm_onnx.graph.soundness.inference import inference_fault

# Shapes, axes and bounds decide about other shapes; larger tensors do not.
_LARGEST_KEPT: Final = 1 << 8  # elements
# Operators that ONNX does not have, in ONNX's own domain: plugins of other runtimes. Nothing can be said of them.
_FOREIGN_DOMAIN: Final = "unknown"

MIXED_TYPES: Final = (
    ": types are mixed that the operator takes alike only, so that no runtime loads the file. Converters to float16 may leave it "
    "so (onnxconverter-common does): convert the original again, with onnxruntime.transformers.float16"
)

_Key = tuple[str, str, str]


def skeleton(model: ir.Model, label: str) -> onnx.ModelProto:
    """The model as a message in which large weights are inputs of their type and shape. `model` is the same afterwards.

    Raises:
        InputError: it has something that no message can say.
    """
    with _light(model):
        try:
            proto = ir.to_proto(model)
        except ir.serde.SerdeError as error:
            raise InputError(f"{label} cannot be written as it was read: {_root(error)}") from error
    proto.graph.name = proto.graph.name or "graph"  # the checker wants one, runtimes do not
    return proto


def check_with_onnx(content: bytes, label: str) -> bool:
    """Whether the shapes that the model, a skeleton as bytes, states for inner values are right.

    They may be wrong, as some exporters write them and as runtimes forgive: only what operators say of their inputs counts.
    Operators that ONNX does not know are left out.

    Raises:
        InputError: ONNX's checker or its inference of types and shapes finds a fault.
    """
    proto = onnx.ModelProto.FromString(content)
    _set_foreign_apart(proto)
    content = proto.SerializeToString()
    _make_checkable(proto)
    checked = proto.SerializeToString()
    del proto  # ONNX makes messages of its own: never more than one at a time
    fault = _checker_fault(checked)
    if fault is not None:
        raise InputError(f"{label}: {fault}")
    proto = onnx.ModelProto.FromString(content)
    _close_opaque_functions(proto)
    if _inference_fault(proto) is None:
        return True
    _forget_stated_shapes(proto)
    fault = _inference_fault(proto)
    if fault is not None:
        raise InputError(f"{label}: {fault}{MIXED_TYPES if 'inconsistent type' in fault else ''}")
    return False


def _make_checkable(proto: onnx.ModelProto) -> None:
    """The checker wants ranks of inputs and outputs, which runtimes do not. What is stated of inner values it does not read."""
    for value in (*proto.graph.input, *proto.graph.output):
        for kind in _unranked(value.type):
            kind.shape.SetInParent()
    del proto.graph.value_info[:]


def _checker_fault(content: bytes) -> str | None:
    """What the checker, which infers nothing, says of the model."""
    try:
        checker.check_model(content)
    except checker.ValidationError as error:
        return _reason(error)
    return None


def _unranked(kind: onnx.TypeProto) -> list[onnx.TypeProto.Tensor]:
    if kind.HasField("tensor_type"):
        return [] if kind.tensor_type.HasField("shape") else [kind.tensor_type]
    nested = kind.sequence_type if kind.HasField("sequence_type") else kind.optional_type
    return _unranked(nested.elem_type) if nested.HasField("elem_type") else []


def _inference_fault(proto: onnx.ModelProto) -> str | None:
    fault = inference_fault(proto)
    return _first_line(fault) if fault is not None else None


def _forget_stated_shapes(proto: onnx.ModelProto) -> None:
    del proto.graph.value_info[:]
    for output in proto.graph.output:
        if output.type.HasField("tensor_type"):
            output.type.tensor_type.ClearField("shape")


def _close_opaque_functions(proto: onnx.ModelProto) -> None:
    """Take out the bodies of functions in which a type cannot be told: strict inference forgives that in a graph only."""
    functions = {(function.domain, function.name, function.overload): function for function in proto.functions}
    callers: dict[_Key, list[_Key]] = {key: [] for key in functions}
    waiting: list[_Key] = []
    for key, function in functions.items():
        for node in all_nodes(function):
            called = (node.domain, node.op_type, node.overload)
            if called in functions:
                callers[called].append(key)
            elif not onnx.defs.has(node.op_type, node.domain):
                waiting.append(key)
    opaque: set[_Key] = set()
    while waiting:
        key = waiting.pop()
        if key not in opaque:
            opaque.add(key)
            waiting.extend(callers[key])
    if opaque:
        kept = [function for key, function in functions.items() if key not in opaque]
        proto.ClearField("functions")
        proto.functions.extend(kept)


def _set_foreign_apart(proto: onnx.ModelProto) -> None:
    """Move operators that ONNX does not have out of its domain, for the checker only."""
    for scope in (proto, *proto.functions):
        version = next((entry.version for entry in scope.opset_import if entry.domain in ("", "ai.onnx")), 0)
        graph = scope.graph if isinstance(scope, onnx.ModelProto) else scope
        known: dict[str, bool] = {}
        foreign = False
        for node in all_nodes(graph):
            if node.domain not in ("", "ai.onnx"):
                continue
            if node.op_type not in known:
                known[node.op_type] = not node.op_type or onnx.defs.has(node.op_type, "")
            if not known[node.op_type] and version:
                node.domain, foreign = _FOREIGN_DOMAIN, True
        if foreign:
            scope.opset_import.add(domain=_FOREIGN_DOMAIN, version=1)


def _root(error: BaseException) -> str:
    """The first line of what is behind a chain of errors, each of which only says where it was."""
    while error.__cause__ is not None:
        error = error.__cause__
    return _reason(error)


def _reason(error: BaseException) -> str:
    return _first_line(str(error) or type(error).__name__)


def _first_line(text: str) -> str:
    """The first line of one of ONNX's errors, which go on with the whole node."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else "no reason is given")[:500]


def _is_large(tensor: ir.TensorProtocol | None) -> bool:
    """Whether a weight is left out: what lies outside of the file is, whatever its size."""
    return tensor is not None and (isinstance(tensor, ir.ExternalTensor) or tensor.size > _LARGEST_KEPT)


@contextlib.contextmanager
def _light(model: ir.Model) -> Iterator[None]:
    """The main graph's large weights taken out meanwhile, inputs instead."""
    graph = model.graph
    taken = [value for value in graph.initializers.values() if _is_large(value.const_value)]
    inputs, everything = list(graph.inputs), list(graph.initializers.values())
    kept = [value for value in everything if value not in set(taken)]
    given = set(inputs)
    try:
        graph.initializers.clear()
        for value in kept:
            graph.register_initializer(value)
        for value in taken:
            tensor = value.const_value
            assert tensor is not None, "only weights with data were taken"
            if value.shape is None:
                value.shape = ir.Shape(tensor.shape.numpy())
            if value.type is None:
                value.type = ir.TensorType(tensor.dtype)
            if value not in given:
                graph.inputs.append(value)
        yield
    finally:
        graph.inputs.clear()
        graph.inputs.extend(inputs)
        graph.initializers.clear()
        for value in everything:
            graph.register_initializer(value)
