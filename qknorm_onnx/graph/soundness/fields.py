"""A walk over all fields of a model message: text that is no text, and what the graph library would drop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.soundness.scopes import describe
from qknorm_onnx.graph.soundness.tensors import KNOWN_TYPES

# What onnx_ir has no place for: it would be gone from the written file.
_UNKEPT: Final = {
    ("ModelProto", "training_info"): "training information is not kept; remove it from the model",
    ("TensorProto", "segment"): "tensors in segments are not kept; store the tensor in one piece",
    ("TypeProto", "map_type"): "a map as the type of a value is not kept; take the operator that makes it out of the model",
    ("TypeProto", "opaque_type"): "opaque types are not kept",
}

_DEVICES_SINCE_IR_VERSION: Final = 11
_MOST_OUTPUTS: Final = 1 << 16  # of a Split: ONNX's inference makes room for all that it is said to have


def check_fields(model: onnx.ModelProto, label: str) -> list[tuple[str, onnx.TensorProto]]:
    """All dense tensors of the model, each with the name of what holds it.

    Raises:
        InputError: a text is not UTF-8, or the model has something that cannot be kept.
    """
    tensors: list[tuple[str, onnx.TensorProto]] = []
    for owner, message in _messages(model, label):
        if isinstance(message, onnx.TensorProto):
            tensors.append((message.name or owner, message))
        elif isinstance(message, onnx.TypeProto.Tensor) and message.elem_type not in KNOWN_TYPES:
            raise InputError(f"{label}: {owner} is of the unknown data type {message.elem_type}: the file is damaged, or newer")
        elif isinstance(message, onnx.TensorShapeProto.Dimension) and message.dim_value < 0:  # ONNX's inference ends the process
            raise InputError(f"{label}: {owner} has the size {message.dim_value}; a size that is not fixed has a name instead")
        elif isinstance(message, onnx.NodeProto):
            _check_node(message, label, model.ir_version)
        elif isinstance(message, onnx.DeviceConfigurationProto):
            _check_kept(f"{label}: the device configuration {message.name!r}", model.ir_version)
    return tensors


def _check_node(node: onnx.NodeProto, label: str, ir_version: int) -> None:
    """What ONNX's checker passes, and its inference or the graph library cannot stand."""
    for configuration in node.device_configurations:
        _check_devices(configuration, node, f"{label}: the device configuration of {describe(node)}", ir_version)
    if node.domain not in ("", "ai.onnx"):
        return
    made = ", ".join(map(repr, node.output[:4]))
    if node.op_type == "Constant" and len(node.attribute) != 1:
        raise InputError(
            f"{label}: the Constant that makes {made} has {len(node.attribute)} attributes; its value must be the only one"
        )
    for attribute in node.attribute:
        if node.op_type == "Split" and attribute.name == "num_outputs" and attribute.i > max(len(node.output), _MOST_OUTPUTS):
            raise InputError(f"{label}: the Split that makes {made} is to have {attribute.i} outputs, and has {len(node.output)}")


def _check_devices(configuration: onnx.NodeDeviceConfigurationProto, node: onnx.NodeProto, what: str, ir_version: int) -> None:
    if not configuration.configuration_id:
        raise InputError(f"{what} does not say which one it is; remove it")
    _check_kept(what, ir_version)
    for spec in configuration.sharding_spec:
        if not spec.tensor_name or spec.tensor_name not in {*node.input, *node.output}:
            raise InputError(f"{what} splits {spec.tensor_name!r}, which is no input or output of the node; remove it")


def _check_kept(what: str, ir_version: int) -> None:
    if ir_version < _DEVICES_SINCE_IR_VERSION:
        raise InputError(
            f"{what} is not kept in IR version {ir_version}; remove it, or give the model IR version {_DEVICES_SINCE_IR_VERSION}"
        )


def _messages(model: onnx.ModelProto, label: str) -> Iterator[tuple[str, Message]]:
    """Every message inside `model`, with the name of the node, value or graph that it belongs to."""
    waiting: list[tuple[str, Message]] = [("the model", model)]
    while waiting:
        owner, message = waiting.pop()
        children = _children(message, label, owner)
        own_name = getattr(message, "name", "")
        yield owner, message
        here = (
            f"{own_name!r}" if own_name and isinstance(own_name, str) and not isinstance(message, onnx.AttributeProto) else owner
        )
        waiting.extend((here, child) for child in reversed(children))


def _children(message: Message, label: str, owner: str) -> list[Message]:
    children: list[Message] = []
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            mend = _UNKEPT.get((message.DESCRIPTOR.name, field.name))
            if mend is not None:
                raise InputError(f"{label}: {mend} (in {owner})")
            children.extend(_items(value))
        elif field.type == FieldDescriptor.TYPE_STRING:
            for text in _items(value):
                _check_text(text, f"{label}: the {field.name} of a {message.DESCRIPTOR.name} in {owner}")
    return children


def _check_text(text: str | bytes, what: str) -> None:
    if isinstance(text, str):
        if text.isascii():
            return
        text = text.encode("utf-8", "surrogateescape")
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{what} is not UTF-8: the file is damaged") from error


def _items(value: Any) -> list[Any]:
    return [value] if isinstance(value, (Message, str, bytes)) else list(value)
