"""Files that are wrong in one way each, by kind. `HOSTILE` maps a name to a function that writes the file into a folder.

Each must be refused in one line by everything that reads files. `ODD` are unusual files that are right and must pass.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.hostile import seeds

Write = Callable[[Path], Path]
Change = Callable[[onnx.ModelProto], None]

FLOAT = TensorProto.FLOAT
OURS = "ai.qknorm"


def written(folder: Path, content: bytes | onnx.ModelProto, name: str = "model.onnx") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.SerializeToString())
    return path


def changed(seed: str, change: Change) -> Write:
    def write(folder: Path) -> Path:
        model = seeds.SEEDS[seed]()
        change(model)
        return written(folder, model)

    return write


# Loading


def loading() -> Iterator[tuple[str, Write]]:
    whole = seeds.plain().SerializeToString()
    for name, content in {
        "empty": b"",
        "text": b"this is no model\n",
        "zeros": b"\0" * 64,
        "archive": b"PK\x03\x04" + b"\0" * 60,
        "json": b'{"nodes": []}',
        "endless varint": b"\xff" * 64,
        "length beyond the end": b"\x3a\xff\xff\xff\xff\x07",
        "group tags": b"\x0b\x0c" * 20,
        "cut in the middle": whole[: len(whole) // 2],
        "cut by one byte": whole[:-1],
        "cut after the header": whole[:3],
        "bytes behind the end": whole + b"\xff\xfe\xfd",
        "another message": helper.make_tensor("t", FLOAT, [2], [1.0, 2.0]).SerializeToString(),
    }.items():
        yield name, lambda folder, content=content: written(folder, content)
    for place, old in {"node name": b"first", "value name": b"w1", "operator": b"MatMul", "graph name": b"graph"}.items():

        def write(folder: Path, old: bytes = old) -> Path:
            return written(folder, whole.replace(old, b"\xff" + old[1:]))

        yield f"invalid UTF-8 in the {place}", write


# Tensors


def _weight(model: onnx.ModelProto) -> onnx.TensorProto:
    return model.graph.initializer[0]


def _set(**fields: object) -> Change:
    def change(model: onnx.ModelProto) -> None:
        for name, value in fields.items():
            setattr(_weight(model), name, value)

    return change


def _dims(*dims: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        del _weight(model).dims[:]
        _weight(model).dims.extend(dims)

    return change


def _two_fields(model: onnx.ModelProto) -> None:
    _weight(model).float_data.extend([1.0] * 24)


def _wrong_field(model: onnx.ModelProto) -> None:
    _weight(model).ClearField("raw_data")
    _weight(model).int64_data.extend([1] * 24)


def _no_data(model: onnx.ModelProto) -> None:
    _weight(model).ClearField("raw_data")


def _constant(model: onnx.ModelProto) -> onnx.TensorProto:
    node = helper.make_node("Constant", [], ["k"], name="constant", value=numpy_helper.from_array(np.ones((2, 3), np.float32)))
    model.graph.node.insert(0, node)
    return model.graph.node[0].attribute[0].t


def _constant_without_data(model: onnx.ModelProto) -> None:
    _constant(model).ClearField("raw_data")


def _constant_of_unknown_type(model: onnx.ModelProto) -> None:
    _constant(model).data_type = 99


def _constant_outside(model: onnx.ModelProto) -> None:
    tensor = _constant(model)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL


def _segment(model: onnx.ModelProto) -> None:
    _weight(model).segment.begin = 0
    _weight(model).segment.end = 12


def _unnamed(model: onnx.ModelProto) -> None:
    _weight(model).name = ""


def _twice(model: onnx.ModelProto) -> None:
    model.graph.initializer.add().CopyFrom(_weight(model))


def _string_with_raw_data(model: onnx.ModelProto) -> None:
    _weight(model).data_type = TensorProto.STRING


def _sparse(
    *, values: object = (1.0, 2.0), indices: object = (0, 5), dims: tuple[int, ...] = (4, 6), kind: type = np.float32
) -> Change:
    def change(model: onnx.ModelProto) -> None:
        name = _weight(model).name
        sparse = onnx.SparseTensorProto(dims=dims)
        sparse.values.CopyFrom(numpy_helper.from_array(np.array(values, kind), name))
        sparse.indices.CopyFrom(numpy_helper.from_array(np.array(indices, np.int64), f"{name}_indices"))
        del model.graph.initializer[0]
        model.graph.sparse_initializer.append(sparse)

    return change


def _sparse_attribute(model: onnx.ModelProto) -> None:
    sparse = onnx.SparseTensorProto(dims=[4])
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(1, np.float32), "v"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array([9], np.int64), "i"))
    model.graph.node.append(helper.make_node("Constant", [], ["k"], sparse_value=sparse))


def tensors() -> Iterator[tuple[str, Write]]:
    changes = {
        "data type 0": _set(data_type=0),
        "data type 99": _set(data_type=99),
        "data type -1": _set(data_type=-1),
        "data type of another size": _set(data_type=TensorProto.DOUBLE),
        "initializer shorter than its shape": _dims(40, 6),
        "initializer longer than its shape": _dims(2, 6),
        "negative dimension": _dims(-4, -6),
        "dimensions whose product overflows": _dims(1 << 62, 1 << 62),
        "dimension of 2^62": _dims(1 << 62),
        "data in two fields": _two_fields,
        "data in the field of another type": _wrong_field,
        "no data": _no_data,
        "raw data of a string tensor": _string_with_raw_data,
        "constant without data": _constant_without_data,
        "constant of data type 99": _constant_of_unknown_type,
        "constant outside without a place": _constant_outside,
        "a segment of a tensor": _segment,
        "initializer without a name": _unnamed,
        "initializer given twice": _twice,
        "sparse initializer with an index outside": _sparse(indices=(0, 99)),
        "sparse initializer with a negative index": _sparse(indices=(-3, 5)),
        "sparse initializer with fewer indices": _sparse(indices=(0,)),
        "sparse initializer with three columns of indices": _sparse(indices=((0, 0, 0), (1, 1, 1))),
        "sparse initializer of 2^80 elements": _sparse(dims=(1 << 40, 1 << 40)),
        "sparse initializer of 2^40 elements": _sparse(dims=(1 << 20, 1 << 20)),
        "sparse initializer with a negative dimension": _sparse(dims=(-4, 6)),
        "sparse constant with an index outside": _sparse_attribute,
    }
    for name, change in changes.items():
        yield name, changed("plain", change)


# External data


def _entries(model: onnx.ModelProto, **wanted: str | None) -> None:
    tensor = _weight(model)
    kept = {entry.key: entry.value for entry in tensor.external_data}
    for key, value in wanted.items():
        kept.pop(key, None)
        if value is not None:
            kept[key] = value
    del tensor.external_data[:]
    for key, value in kept.items():
        tensor.external_data.add(key=key, value=value)


def _external(prepare: Callable[[Path, onnx.ModelProto], None]) -> Write:
    def write(folder: Path) -> Path:
        inside = folder / "inside"
        inside.mkdir()
        path = inside / "model.onnx"
        model = seeds.with_external_weights(path)
        prepare(inside, model)
        return written(inside, model)

    return write


def _located(location: str | Callable[[Path], str]) -> Callable[[Path, onnx.ModelProto], None]:
    def prepare(folder: Path, model: onnx.ModelProto) -> None:
        (folder.parent / "secret.data").write_bytes(b"\0" * 4096)
        _entries(model, location=location if isinstance(location, str) else location(folder))

    return prepare


def _given(**wanted: str | None) -> Callable[[Path, onnx.ModelProto], None]:
    return lambda _folder, model: _entries(model, **wanted)


def _through_a_link(folder: Path, model: onnx.ModelProto) -> None:
    (folder.parent / "secret.data").write_bytes(b"\0" * 4096)
    (folder / "link.data").symlink_to(folder.parent / "secret.data")
    _entries(model, location="link.data")


def _through_a_linked_folder(folder: Path, model: onnx.ModelProto) -> None:
    (folder.parent / "secret.data").write_bytes(b"\0" * 4096)
    (folder / "sub").symlink_to(folder.parent)
    _entries(model, location="sub/secret.data")


def _dangling(folder: Path, model: onnx.ModelProto) -> None:
    (folder / "link.data").symlink_to(folder / "nowhere.data")
    _entries(model, location="link.data")


def _circle(folder: Path, model: onnx.ModelProto) -> None:
    (folder / "link.data").symlink_to(folder / "link.data")
    _entries(model, location="link.data")


def _shortened(folder: Path, _model: onnx.ModelProto) -> None:
    data = folder / "weights.data"
    data.write_bytes(data.read_bytes()[:-8])


def _removed(folder: Path, _model: onnx.ModelProto) -> None:
    (folder / "weights.data").unlink()


def _a_folder(folder: Path, model: onnx.ModelProto) -> None:
    (folder / "sub").mkdir()
    _entries(model, location="sub")


def _a_pipe(folder: Path, model: onnx.ModelProto) -> None:
    os.mkfifo(folder / "pipe")
    _entries(model, location="pipe")


def external_data() -> Iterator[tuple[str, Write]]:
    preparations = {
        "weights at an absolute path": _located(lambda folder: str(folder.parent / "secret.data")),
        "weights at an absolute path into the folder": _located(lambda folder: str(folder / "weights.data")),
        "weights above the folder": _located("../secret.data"),
        "weights above the folder by a detour": _located("sub/../../secret.data"),
        "weights in a device": _located("/dev/zero"),
        "weights in a process file": _located("/proc/self/environ"),
        "weights nowhere": _located(""),
        "weights in the folder itself": _located("."),
        "weights at a name with a zero byte": _located("weights\0.data"),
        "weights at a name of 5000 letters": _located("w" * 5000),
        "weights through a link out of the folder": _through_a_link,
        "weights through a folder that is a link": _through_a_linked_folder,
        "weights through a broken link": _dangling,
        "weights through a link to itself": _circle,
        "weights missing": _removed,
        "weights cut": _shortened,
        "weights in a subfolder itself": _a_folder,
        "weights in a pipe": _a_pipe,
        "negative offset": _given(offset="-4"),
        "textual offset": _given(offset="four"),
        "fractional offset": _given(offset="0.5"),
        "offset behind the end": _given(offset="100000"),
        "offset of 2^70": _given(offset=str(1 << 70)),
        "empty offset": _given(offset=""),
        "negative length": _given(length="-96"),
        "textual length": _given(length="long"),
        "length too short": _given(length="8"),
        "length too long": _given(length="100"),
        "length of 2^70": _given(length=str(1 << 70)),
        "no location": _given(location=None),
    }
    for name, prepare in preparations.items():
        yield name, _external(prepare)


# Structure


def _node(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.name == name)


def _edit(name: str, **lists: list[str]) -> Change:
    def change(model: onnx.ModelProto) -> None:
        node = _node(model, name)
        for field, values in lists.items():
            del getattr(node, field)[:]
            getattr(node, field).extend(values)

    return change


def _operator(name: str, op_type: str, domain: str = "") -> Change:
    def change(model: onnx.ModelProto) -> None:
        _node(model, name).op_type = op_type
        _node(model, name).domain = domain

    return change


def _attribute(name: str, **attributes: object) -> Change:
    def change(model: onnx.ModelProto) -> None:
        _node(model, name).attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())

    return change


def _opset(version: int, domain: str = "") -> Change:
    def change(model: onnx.ModelProto) -> None:
        for entry in model.opset_import:
            if entry.domain == domain:
                entry.version = version

    return change


def _no_opset(model: onnx.ModelProto) -> None:
    del model.opset_import[:]


def _two_opsets(model: onnx.ModelProto) -> None:
    model.opset_import.append(helper.make_opsetid("", 7))


def _cycle(model: onnx.ModelProto) -> None:
    _edit("first", input=["y", "w1"])(model)
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 4
    _edit("second", input=["r", "w1"])(model)


def _own_input(model: onnx.ModelProto) -> None:
    _edit("relu", input=["r"])(model)


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
        "undefined input": _edit("relu", input=["nowhere"]),
        "undefined graph output": _output("nowhere"),
        "no outputs": _no_outputs,
        "graph output without a name": _output(""),
        "two nodes with one output": _edit("relu", output=["h"]),
        "one node with two equal outputs": _edit("relu", output=["r", "r"]),
        "graph output given twice": _duplicate_graph_output,
        "graph input given twice": _duplicate_input,
        "initializer that is a node's output": _initializer_is_an_output,
        "input that is a node's output": _input_is_an_output,
        "output of a node is the graph's input": _edit("relu", output=["x"]),
        "too many inputs": _edit("relu", input=["h", "h", "h"]),
        "no inputs": _edit("first", input=[]),
        "too many outputs": _edit("relu", output=["r", "s", "t"]),
        "no outputs of a node": _edit("relu", output=[]),
        "absent required input": _edit("first", input=["", "w1"]),
        "operator without a name": _operator("relu", ""),
        "domain that is not imported": _operator("relu", "Relu", "com.nowhere"),
        "unknown attribute": _attribute("relu", slope=2.0),
        "attribute of the wrong kind": _attribute_proto(type=onnx.AttributeProto.FLOAT, f=1.0),
        "attribute of no kind": _attribute_proto(),
        "attribute of kind 77": lambda model: _raw_attribute_kind(model),
        "attribute that refers to nothing": _attribute_proto(type=onnx.AttributeProto.INT, ref_attr_name="outer"),
        "attribute given twice": _attribute_twice,
        "opset 999": _opset(999),
        "opset 0": _opset(0),
        "opset -1": _opset(-1),
        "opset 2^62": _opset(1 << 62),
        "no opset": _no_opset,
        "two opsets of one domain": _two_opsets,
        "input of data type 0": _input_type(0),
        "input of data type 99": _input_type(99),
        "input of another type": _input_type(TensorProto.DOUBLE),
        "input that does not fit": _input_shape("n", 5),
        "negative input size": _input_shape(-3, -4),
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
    return _node(model, "outer")


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
    del _node(model, "loop").attribute[0].g.input[2:]


def _deep(levels: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        graph = helper.make_graph([helper.make_node("Neg", ["x"], ["deep0"])], "g", [], [_float("deep0")])
        for level in range(1, levels + 1):
            name = f"deep{level}"
            shallow = helper.make_graph([helper.make_node("Abs", ["x"], [f"flat{level}"])], "g", [], [_float(f"flat{level}")])
            node = helper.make_node("If", ["flag"], [name], then_branch=graph, else_branch=shallow)
            graph = helper.make_graph([node], "g", [], [_float(name)])
        model.graph.node.insert(0, graph.node[0])

    return change


def _float(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, FLOAT, None)


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


# Functions


def _function(model: onnx.ModelProto, name: str) -> onnx.FunctionProto:
    return next(item for item in model.functions if item.name == name)


def _calls_itself(model: onnx.ModelProto) -> None:
    _function(model, "Twice").node[0].op_type = "Twice"
    del _function(model, "Twice").node[0].attribute[:]


def _call_each_other(model: onnx.ModelProto) -> None:
    scaled = _function(model, "Scaled")
    scaled.node[1].CopyFrom(helper.make_node("Twice", ["a"], ["b"], domain="other.functions"))
    scaled.opset_import.append(helper.make_opsetid("other.functions", 1))


def _bomb(levels: int, width: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        imports = [helper.make_opsetid("", 20), helper.make_opsetid("bomb", 1)]
        for level in range(levels):
            domain, op_type = ("bomb", f"F{level - 1}") if level else ("", "Neg")
            nodes = [helper.make_node(op_type, [f"v{i}" if i else "a"], [f"v{i + 1}"], domain=domain) for i in range(width)]
            nodes.append(helper.make_node("Identity", [f"v{width}"], ["b"]))
            model.functions.append(helper.make_function("bomb", f"F{level}", ["a"], ["b"], nodes, imports))
        model.opset_import.append(helper.make_opsetid("bomb", 1))
        model.graph.node.insert(0, helper.make_node(f"F{levels - 1}", ["x"], ["boom"], domain="bomb", name="bomb"))

    return change


def _function_twice(model: onnx.ModelProto) -> None:
    model.functions.add().CopyFrom(model.functions[0])


def _function_node(name: str, index: int, **lists: list[str]) -> Change:
    def change(model: onnx.ModelProto) -> None:
        node = _function(model, name).node[index]
        for field, values in lists.items():
            del getattr(node, field)[:]
            getattr(node, field).extend(values)

    return change


def _function_outputs(model: onnx.ModelProto) -> None:
    del _function(model, "Scaled").output[:]
    _function(model, "Scaled").output.append("nowhere")


def _function_opset(model: onnx.ModelProto) -> None:
    _function(model, "Scaled").opset_import[0].version = 999


def _function_without_opset(model: onnx.ModelProto) -> None:
    del _function(model, "Scaled").opset_import[:]


def _function_attribute(model: onnx.ModelProto) -> None:
    del _function(model, "Scaled").attribute[:]


def _call_attribute(model: onnx.ModelProto) -> None:
    _node(model, "call").attribute.append(helper.make_attribute("strange", 1))


def functions() -> Iterator[tuple[str, Write]]:
    changes = {
        "function that calls itself": _calls_itself,
        "functions that call each other": _call_each_other,
        "functions nested 12 deep, 4 calls each": _bomb(12, 4),
        "functions nested 40 deep, 2 calls each": _bomb(40, 2),
        "functions nested 300 deep": _bomb(300, 2),
        "functions nested 150 deep, one call each": _bomb(150, 1),
        "function given twice": _function_twice,
        "call with too many inputs": _edit("call", input=["x", "x", "x"]),
        "call with too many outputs": _edit("call", output=["t", "u", "v"]),
        "call without inputs": _edit("call", input=[]),
        "function that reads nothing known": _function_node("Scaled", 1, input=["a", "nowhere"]),
        "function whose output nothing makes": _function_outputs,
        "function with two equal outputs of nodes": _function_node("Scaled", 1, output=["factor"]),
        "function with opset 999": _function_opset,
        "function without opset": _function_without_opset,
        "function whose attribute is not declared": _function_attribute,
    }
    for name, change in changes.items():
        yield name, changed("functions", change)


# Our own nodes


def _ours(model: onnx.ModelProto) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.domain == OURS)


def _set_ours(**attributes: object) -> Change:
    def change(model: onnx.ModelProto) -> None:
        node = _ours(model)
        kept = [item for item in node.attribute if item.name not in attributes]
        del node.attribute[:]
        node.attribute.extend(kept)
        node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items() if value is not None)

    return change


def _ours_inputs(edit: Callable[[list[str]], list[str]]) -> Change:
    def change(model: onnx.ModelProto) -> None:
        node = _ours(model)
        inputs = edit(list(node.input))
        del node.input[:]
        node.input.extend(inputs)

    return change


def _ours_without(index: int) -> Change:
    return _ours_inputs(lambda inputs: [*inputs[:index], "", *inputs[index + 1 :]])


def _ours_with(index: int, name: str) -> Change:
    return _ours_inputs(lambda inputs: [*inputs, *[""] * (index - len(inputs)), name])


def _ours_with_new(index: int, array: np.ndarray) -> Change:
    def change(model: onnx.ModelProto) -> None:
        model.graph.initializer.append(numpy_helper.from_array(array, "new"))
        _ours_inputs(lambda inputs: [*inputs[:index], *[""] * (index - len(inputs)), "new", *inputs[index + 1 :]])(model)

    return change


def _ours_outputs(count: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        _ours(model).output.extend(f"more{i}" for i in range(count - len(_ours(model).output)))

    return change


def _ours_named(op_type: str) -> Change:
    def change(model: onnx.ModelProto) -> None:
        _ours(model).op_type = op_type

    return change


def _recursive_body(model: onnx.ModelProto) -> None:
    function = next(item for item in model.functions if item.domain == OURS)
    call = onnx.NodeProto()
    call.CopyFrom(_ours(model))
    del call.input[:]
    call.input.extend(function.input)
    del call.output[:]
    call.output.append("again")
    function.node.append(call)
    function.opset_import.append(helper.make_opsetid(OURS, 1))


def _bias(*shape: int, kind: type = np.float32) -> np.ndarray:
    return np.ones(shape, kind)


def own_nodes() -> Iterator[tuple[str, Write]]:
    changes = {
        "our node without tables": _ours_inputs(lambda inputs: inputs[:8]),
        "our node without one table": _ours_without(8),
        "our node with an attribute of bytes": _set_ours(rotary_order=b"\xff\xfe"),
        "our node with an unknown attribute": _set_ours(strange=1),
        "our node with an unknown choice": _set_ours(q_norm="batch"),
        "our node with a text for a number": _set_ours(scale="half"),
        "our node with a list for a number": _set_ours(q_num_heads=[6]),
        "our node with a number for a text": _set_ours(q_norm=3),
        "our node with a tensor for a number": _set_ours(scale=numpy_helper.from_array(np.ones(2, np.float32))),
        "our node without its heads": _set_ours(q_num_heads=None),
        "our node with no heads": _set_ours(q_num_heads=0),
        "our node with negative heads": _set_ours(kv_num_heads=-2),
        "our node with heads that do not divide": _set_ours(q_num_heads=5),
        "our node with heads that do not divide the width": _set_ours(q_num_heads=10, kv_num_heads=5),
        "our node with 2^62 heads": _set_ours(q_num_heads=1 << 62),
        "our node with a window of -2": _set_ours(left_window_size=-2),
        "our node with a window of 2^62": _set_ours(left_window_size=1 << 62),
        "our node with a window of 2^63 - 1": _set_ours(right_window_size=(1 << 63) - 1),
        "our node with an infinite scale": _set_ours(scale=float("inf")),
        "our node with a scale that is no number": _set_ours(scale=float("nan")),
        "our node with a negative epsilon": _set_ours(q_epsilon=-1.0),
        "our node with a negative cap": _set_ours(softcap=-1.0),
        "our node with a bool of 2": _set_ours(is_causal=2),
        "our node with groups that do not divide": _set_ours(norm_groups=3),
        "our node with no groups": _set_ours(norm_groups=0),
        "our node with too many rotated values": _set_ours(rotary_embedding_dim=64),
        "our node with an odd number of rotated values": _set_ours(rotary_embedding_dim=3),
        "our node with a rotary offset alone": _set_ours(rotary_offset=4),
        "our node without inputs": _ours_inputs(lambda _inputs: []),
        "our node without keys": _ours_without(1),
        "our node with too many inputs": _ours_inputs(lambda inputs: [*inputs, *inputs, *inputs]),
        "our node with too many outputs": _ours_outputs(5),
        "our node with a gain of another size": _ours_with_new(3, _bias(7)),
        "our node with a gain of another type": _ours_with_new(3, _bias(8, kind=np.float64)),
        "our node with an integer bias": _ours_with_new(10, _bias(1, kind=np.int64)),
        "our node with a bias of five axes": _ours_with_new(10, _bias(1, 1, 1, 1, 1)),
        "our node with sinks of another number": _ours_with_new(11, _bias(5)),
        "our node with a past of keys alone": _ours_with_new(12, _bias(1, 2, 3, 8)),
        "our node with a length but no past": _ours_with_new(14, _bias(1, kind=np.int64)),
        "our node with a float offset": _ours_with_new(15, _bias(1)),
        "our node with a bias of q but no norm of q": _set_ours(q_norm="none"),
        "our node without a rotary but tables": _set_ours(rotary_order="none"),
        "our domain in version 99": _opset(99, OURS),
        "our domain in version 0": _opset(0, OURS),
        "an unknown operator of our domain": _ours_named("QKNormSomething"),
        "a body of our node that calls it": _recursive_body,
    }
    for name, change in changes.items():
        yield name, changed("canonical", change)


# Unusual, and right


def _control_characters(model: onnx.ModelProto) -> None:
    _node(model, "o" if any(node.name == "o" for node in model.graph.node) else "relu").name = "\x1b[31mred\x07\r\nname"


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
    _operator("relu", "Relu", "com.vendor")(model)
    model.opset_import.append(helper.make_opsetid("com.vendor", 7))


def _linked_in_the_folder(folder: Path, model: onnx.ModelProto) -> None:
    (folder / "link.data").symlink_to(folder / "weights.data")
    _entries(model, location="link.data")


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


def odd() -> Iterator[tuple[str, Write]]:
    changes = {
        "control characters in a name": _control_characters,
        "nodes in another order": _shuffled,
        "stated inner shapes that are wrong": _wrong_inner_shapes,
        "a stated output shape that is wrong": _wrong_output_shape,
        "a graph without a name": _unnamed_graph,
        "weights that are inputs too": _weights_as_inputs,
        "tensors without elements": _empty_tensors,
        "weights in typed fields": _typed_data,
        "weights of four bits": _four_bits,
        "texts": _texts,
        "sparse initializer": _sparse(),
        "sparse initializer with an index for each axis": _sparse(indices=((0, 1), (3, 5))),
        "sparse initializer without values": _sparse(values=(), indices=()),
    }
    for name, change in changes.items():
        yield name, changed("plain", change)
    yield "control characters in the name of our node", changed("canonical", _control_characters)
    yield "our nodes in another order", changed("canonical", _shuffled)
    yield "bodies 20 deep", changed("branching", _deep(20))
    yield "an unused function", changed("functions", _unused_function)
    yield "functions nested 12 deep, one call each", changed("functions", _bomb(12, 1))
    yield "weights through a link in the folder", _external(_linked_in_the_folder)
    yield "weights and model through links of a download cache", _download_cache


def foreign() -> Iterator[tuple[str, Write]]:
    yield "an operator of another runtime in ONNX's domain", changed("plain", _operator("relu", "EfficientNMS_TRT"))
    yield "an operator of a vendor", changed("plain", _vendor_operator)
    yield "an operator beside functions of its domain", changed("functions", _operator("call", "Thrice", "other.functions"))
    yield "a call with an attribute that its function ignores", changed("functions", _call_attribute)


KINDS: dict[str, Callable[[], Iterator[tuple[str, Write]]]] = {
    "loading": loading,
    "tensors": tensors,
    "external data": external_data,
    "structure": structure,
    "functions": functions,
    "our nodes": own_nodes,
}

HOSTILE: dict[str, Write] = {f"{kind}: {name}": write for kind, files in KINDS.items() for name, write in files()}
ODD: dict[str, Write] = dict(odd())  # every door takes them
FOREIGN: dict[str, Write] = dict(foreign())  # read and kept; a session needs the runtime that knows them
