"""Graphs and bodies that are none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.hostile.changes import (
    FLOAT,
    Change,
    Write,
    attribute,
    changed,
    edit,
    node_of,
    operator,
    opset,
    written,
)


def _no_opset(model: onnx.ModelProto) -> None:
    del model.opset_import[:]


def _two_opsets(model: onnx.ModelProto) -> None:
    model.opset_import.append(helper.make_opsetid("", 7))


def _cycle(model: onnx.ModelProto) -> None:
    edit("first", input=["y", "w1"])(model)
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 4
    edit("second", input=["r", "w1"])(model)


def _own_input(model: onnx.ModelProto) -> None:
    edit("relu", input=["r"])(model)


def _output(name: str) -> Change:
    def change(model: onnx.ModelProto) -> None:
        model.graph.output[0].name = name

    return change


def _no_outputs(model: onnx.ModelProto) -> None:
    del model.graph.output[:]


def _duplicate_graph_output(model: onnx.ModelProto) -> None:
    model.graph.output.add().CopyFrom(model.graph.output[0])


def _duplicate_input(model: onnx.ModelProto) -> None:
    model.graph.input.add().CopyFrom(model.graph.input[0])


def _initializer_is_an_output(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.ones((1, 6), np.float32), "r"))


def _input_is_an_output(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("r", FLOAT, [1, 6]))


def _input_type(kind: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        model.graph.input[0].type.tensor_type.elem_type = kind

    return change


def _input_shape(*dims: int | str) -> Change:
    def change(model: onnx.ModelProto) -> None:
        model.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", FLOAT, dims))

    return change


def _negative_inner_size(model: onnx.ModelProto) -> None:
    """A slice of it ended the process inside of ONNX's inference."""
    bounds = [numpy_helper.from_array(np.array([bound], np.int64), f"bound{i}") for i, bound in enumerate((0, 4, -1, 1))]
    model.graph.initializer.extend(bounds)
    model.graph.input.append(helper.make_tensor_value_info("table", FLOAT, [0, -1]))
    model.graph.node.append(helper.make_node("Slice", ["table", *(item.name for item in bounds)], ["part"], name="slice"))


def _weights_of_another_type(model: onnx.ModelProto) -> None:
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.ones((6, 3), np.float64), "w2"))


def _weights_that_do_not_fit(model: onnx.ModelProto) -> None:
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.ones((5, 3), np.float32), "w2"))


def _no_graph(model: onnx.ModelProto) -> None:
    model.ClearField("graph")


def _untyped_input(model: onnx.ModelProto) -> None:
    model.graph.input[0].ClearField("type")


def _unnamed_input(model: onnx.ModelProto) -> None:
    model.graph.input[0].name = ""


def _attribute_proto(**fields: object) -> Change:
    def change(model: onnx.ModelProto) -> None:
        node = helper.make_node("Softmax", ["r"], ["s"], name="softmax")
        node.attribute.append(onnx.AttributeProto(name="axis", **fields))
        model.graph.node.append(node)

    return change


def _attribute_twice(model: onnx.ModelProto) -> None:
    node = helper.make_node("Softmax", ["r"], ["s"], name="softmax", axis=0)
    node.attribute.append(helper.make_attribute("axis", 1))
    model.graph.node.append(node)


def _devices(name: str, *, ir_version: int, splits: tuple[str, ...] = ()) -> Change:
    def change(model: onnx.ModelProto) -> None:
        model.ir_version = ir_version
        configuration = node_of(model, "relu").device_configurations.add(configuration_id=name)
        for tensor in splits:
            configuration.sharding_spec.add(tensor_name=tensor, device=[0, 1])

    return change


def _devices_of_the_model(model: onnx.ModelProto) -> None:
    model.configuration.add(name="mesh", num_devices=2)


def _cast_to_nothing(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Cast", ["r"], ["s"], name="cast", to=0))


def _constant(**values: object) -> Change:
    def change(model: onnx.ModelProto) -> None:
        node = helper.make_node("Constant", [], ["made"])
        node.attribute.extend(helper.make_attribute(name, value) for name, value in values.items())
        model.graph.node.insert(0, node)

    return change


def _split_into_many(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Split", ["r"], ["left", "right"], axis=-1, num_outputs=(1 << 31) - 1))


def _map_input(model: onnx.ModelProto) -> None:
    value = model.graph.input.add(name="map")
    value.type.map_type.key_type = TensorProto.INT64
    value.type.map_type.value_type.tensor_type.elem_type = FLOAT


def _training(model: onnx.ModelProto) -> None:
    model.training_info.add().algorithm.CopyFrom(helper.make_graph([], "train", [], []))


def structure() -> Iterator[tuple[str, Write]]:
    changes = {
        "a cycle": _cycle,
        "a node that reads itself": _own_input,
        "undefined input": edit("relu", input=["nowhere"]),
        "undefined graph output": _output("nowhere"),
        "no outputs": _no_outputs,
        "graph output without a name": _output(""),
        "two nodes with one output": edit("relu", output=["h"]),
        "one node with two equal outputs": edit("relu", output=["r", "r"]),
        "graph output given twice": _duplicate_graph_output,
        "graph input given twice": _duplicate_input,
        "initializer that is a node's output": _initializer_is_an_output,
        "input that is a node's output": _input_is_an_output,
        "output of a node is the graph's input": edit("relu", output=["x"]),
        "too many inputs": edit("relu", input=["h", "h", "h"]),
        "no inputs": edit("first", input=[]),
        "too many outputs": edit("relu", output=["r", "s", "t"]),
        "no outputs of a node": edit("relu", output=[]),
        "absent required input": edit("first", input=["", "w1"]),
        "operator without a name": operator("relu", ""),
        "domain that is not imported": operator("relu", "Relu", "com.nowhere"),
        "unknown attribute": attribute("relu", slope=2.0),
        "attribute of the wrong kind": _attribute_proto(type=onnx.AttributeProto.FLOAT, f=1.0),
        "attribute of no kind": _attribute_proto(),
        "attribute of kind 77": lambda model: _raw_attribute_kind(model),
        "attribute that refers to nothing": _attribute_proto(type=onnx.AttributeProto.INT, ref_attr_name="outer"),
        "attribute given twice": _attribute_twice,
        "device configuration without a name": _devices("", ir_version=11),
        "device configuration in an IR version that has none": _devices("mesh", ir_version=10),
        "device configurations of a model in an IR version that has none": _devices_of_the_model,
        "device configuration that splits what has no name": _devices("mesh", ir_version=11, splits=("",)),
        "device configuration that splits another node's value": _devices("mesh", ir_version=11, splits=("h", "y")),
        "cast to data type 0": _cast_to_nothing,
        "Constant without a value": _constant(),
        "Split into 2^31 - 1 outputs": _split_into_many,
        "Constant of two values": _constant(value_float=1.0, value_int=2),
        "opset 999": opset(999),
        "opset 0": opset(0),
        "opset -1": opset(-1),
        "opset 2^62": opset(1 << 62),
        "no opset": _no_opset,
        "two opsets of one domain": _two_opsets,
        "input of data type 0": _input_type(0),
        "input of data type 99": _input_type(99),
        "input of another type": _input_type(TensorProto.DOUBLE),
        "input that does not fit": _input_shape("n", 5),
        "negative input size": _input_shape(-3, -4),
        "negative inner size, sliced": _negative_inner_size,
        "weights of another type": _weights_of_another_type,
        "weights that do not fit": _weights_that_do_not_fit,
        "no graph": _no_graph,
        "input without a type": _untyped_input,
        "input without a name": _unnamed_input,
        "a map as input": _map_input,
        "training information": _training,
    }
    for name, change in changes.items():
        yield name, changed("plain", change)
    yield from _bodies()


def _raw_attribute_kind(model: onnx.ModelProto) -> None:
    attribute = onnx.AttributeProto()
    attribute.ParseFromString(b"\x0a\x04axis\xa0\x01\x4d")
    node = helper.make_node("Softmax", ["r"], ["s"], name="softmax")
    node.attribute.append(attribute)
    model.graph.node.append(node)


def _outer(model: onnx.ModelProto) -> onnx.NodeProto:
    return node_of(model, "outer")


def _branch(model: onnx.ModelProto, name: str) -> onnx.GraphProto:
    return next(item for item in _outer(model).attribute if item.name == name).g


def _branch_reads_nothing(model: onnx.ModelProto) -> None:
    _branch(model, "else_branch").node[0].input[0] = "nowhere"


def _branch_reads_later(model: onnx.ModelProto) -> None:
    _branch(model, "else_branch").node[0].input[0] = "y"


def _branch_reads_inside_of_another(model: onnx.ModelProto) -> None:
    _branch(model, "else_branch").node[0].input[0] = "c"


def _branch_shadows(model: onnx.ModelProto) -> None:
    _branch(model, "else_branch").node[0].output[0] = "x"
    _branch(model, "else_branch").output[0].name = "x"


def _branch_missing(model: onnx.ModelProto) -> None:
    kept = [item for item in _outer(model).attribute if item.name != "else_branch"]
    del _outer(model).attribute[:]
    _outer(model).attribute.extend(kept)


def _branches_of_other_types(model: onnx.ModelProto) -> None:
    graph = _branch(model, "else_branch")
    graph.node[0].CopyFrom(helper.make_node("Cast", ["x"], ["d"], to=TensorProto.INT64))
    graph.output[0].type.tensor_type.elem_type = TensorProto.INT64


def _branch_without_outputs(model: onnx.ModelProto) -> None:
    del _branch(model, "else_branch").output[:]


def _loop_without_its_state(model: onnx.ModelProto) -> None:
    del node_of(model, "loop").attribute[0].g.input[2:]


def _bodies() -> Iterator[tuple[str, Write]]:
    changes = {
        "branch that reads nothing known": _branch_reads_nothing,
        "branch that reads a later value": _branch_reads_later,
        "branch that reads inside of another": _branch_reads_inside_of_another,
        "branch that names a value as the graph around it": _branch_shadows,
        "branch missing": _branch_missing,
        "branches of other types": _branches_of_other_types,
        "branch without outputs": _branch_without_outputs,
        "loop whose body lacks its state": _loop_without_its_state,
    }
    for name, change in changes.items():
        yield name, changed("branching", change)
    for levels in (90, 2000):
        yield f"bodies {levels} deep", lambda folder, levels=levels: _deep_bytes(folder, levels)


def _deep_bytes(folder: Path, levels: int) -> Path:
    """Written by hand: no library writes so many levels."""
    graph = b""
    for _ in range(levels):
        attribute = _field(1, b"then_branch") + _field(6, graph) + b"\xa0\x01\x05"
        graph = _field(1, _field(2, b"d") + _field(4, b"If") + _field(5, attribute)) + _field(2, b"g")
    return written(folder, b"\x08\x0a" + _field(8, _field(1, b"") + b"\x10\x14") + _field(7, graph))


def _field(number: int, content: bytes) -> bytes:
    size, length = len(content), b""
    while size > 127:
        length += bytes([size & 127 | 128])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content
