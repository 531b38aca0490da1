"""Unusual files that are right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.hostile import seeds
from tests.hostile.changes import (
    FLOAT,
    Write,
    bomb,
    call_attribute,
    changed,
    deep_bodies,
    external_entries,
    node_of,
    operator,
    sparse_weight,
    with_external,
)


def _control_characters(model: onnx.ModelProto) -> None:
    node_of(model, "o" if any(node.name == "o" for node in model.graph.node) else "relu").name = "\x1b[31mred\x07\r\nname"


def _shuffled(model: onnx.ModelProto) -> None:
    nodes = list(reversed(model.graph.node))
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _wrong_inner_shapes(model: onnx.ModelProto) -> None:
    model.graph.value_info.append(helper.make_tensor_value_info("h", FLOAT, ["n", 99]))


def _wrong_output_shape(model: onnx.ModelProto) -> None:
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", FLOAT, ["n", 99]))


def _unnamed_graph(model: onnx.ModelProto) -> None:
    model.graph.name = ""


def _weights_as_inputs(model: onnx.ModelProto) -> None:
    model.ir_version = 3
    model.opset_import[0].version = 8
    model.graph.input.extend(helper.make_tensor_value_info(item.name, FLOAT, item.dims) for item in model.graph.initializer)


def _empty_tensors(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((0, 3), np.float32), "none"))
    model.graph.node.append(helper.make_node("Concat", ["none", "y"], ["z"], axis=0))
    model.graph.output.append(helper.make_tensor_value_info("z", FLOAT, None))


def _typed_data(model: onnx.ModelProto) -> None:
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        tensor.CopyFrom(helper.make_tensor(tensor.name, FLOAT, array.shape, array.ravel().tolist()))


def _four_bits(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 21
    model.graph.initializer.append(helper.make_tensor("small", TensorProto.INT4, [3, 5], [1, -2, 3, -4, 5] * 3))
    model.graph.node.append(helper.make_node("Cast", ["small"], ["big"], to=FLOAT))
    model.graph.output.append(helper.make_tensor_value_info("big", FLOAT, [3, 5]))


def _texts(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array(["a", "ü"], object), "words"))
    model.graph.node.append(helper.make_node("Identity", ["words"], ["said"]))
    model.graph.output.append(helper.make_tensor_value_info("said", TensorProto.STRING, [2]))


def _unused_function(model: onnx.ModelProto) -> None:
    del model.graph.node[0]
    model.graph.node[0].input[0] = "x"


def _vendor_operator(model: onnx.ModelProto) -> None:
    operator("relu", "Relu", "com.vendor")(model)
    model.opset_import.append(helper.make_opsetid("com.vendor", 7))


def _linked_in_the_folder(folder: Path, model: onnx.ModelProto) -> None:
    (folder / "link.data").symlink_to(folder / "weights.data")
    external_entries(model, location="link.data")


def _download_cache(folder: Path) -> Path:
    """As a download cache lays files out: all are links to blobs in another folder."""
    blobs, snapshot = folder / "blobs", folder / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    seeds.with_external_weights(blobs / "model.onnx")
    (blobs / "weights.data").rename(blobs / "5f3a")
    (blobs / "model.onnx").rename(blobs / "77ab")
    (snapshot / "weights.data").symlink_to(Path("../../blobs/5f3a"))
    (snapshot / "model.onnx").symlink_to(Path("../../blobs/77ab"))
    return snapshot / "model.onnx"


def _dimension_in_other_letters(model: onnx.ModelProto) -> None:
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_param = "größe + n_2"


def _dimension_as_long_sum(model: onnx.ModelProto) -> None:
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_param = " + ".join(["n"] * 3000)


def odd() -> Iterator[tuple[str, Write]]:
    changes = {
        "control characters in a name": _control_characters,
        "nodes in another order": _shuffled,
        "stated inner shapes that are wrong": _wrong_inner_shapes,
        "a stated output shape that is wrong": _wrong_output_shape,
        "a graph without a name": _unnamed_graph,
        "weights that are inputs too": _weights_as_inputs,
        "a size named in other letters": _dimension_in_other_letters,
        "a size that is a sum of 3000": _dimension_as_long_sum,
        "tensors without elements": _empty_tensors,
        "weights in typed fields": _typed_data,
        "weights of four bits": _four_bits,
        "texts": _texts,
        "sparse initializer": sparse_weight(),
        "sparse initializer with an index for each axis": sparse_weight(indices=((0, 1), (3, 5))),
        "sparse initializer without values": sparse_weight(values=(), indices=()),
    }
    for name, change in changes.items():
        yield name, changed("plain", change)
    yield "control characters in the name of our node", changed("canonical", _control_characters)
    yield "our nodes in another order", changed("canonical", _shuffled)
    yield "bodies 20 deep", changed("branching", deep_bodies(20))
    yield "an unused function", changed("functions", _unused_function)
    yield "functions nested 12 deep, one call each", changed("functions", bomb(12, 1))
    yield "weights through a link in the folder", with_external(_linked_in_the_folder)
    yield "weights and model through links of a download cache", _download_cache


def foreign() -> Iterator[tuple[str, Write]]:
    yield "an operator of another runtime in ONNX's domain", changed("plain", operator("relu", "EfficientNMS_TRT"))
    yield "an operator of a vendor", changed("plain", _vendor_operator)
    yield "an operator beside functions of its domain", changed("functions", operator("call", "Thrice", "other.functions"))
    yield "a call with an attribute that its function ignores", changed("functions", call_attribute)
