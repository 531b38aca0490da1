"""Ways to change a sound model, and to write it: what the kinds of hostile files are made of."""

from __future__ import annotations

from collections.abc import Callable
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


def first_weight(model: onnx.ModelProto) -> onnx.TensorProto:
    return model.graph.initializer[0]


def sparse_weight(
    *, values: object = (1.0, 2.0), indices: object = (0, 5), dims: tuple[int, ...] = (4, 6), kind: type = np.float32
) -> Change:
    def change(model: onnx.ModelProto) -> None:
        name = first_weight(model).name
        sparse = onnx.SparseTensorProto(dims=dims)
        sparse.values.CopyFrom(numpy_helper.from_array(np.array(values, kind), name))
        sparse.indices.CopyFrom(numpy_helper.from_array(np.array(indices, np.int64), f"{name}_indices"))
        del model.graph.initializer[0]
        model.graph.sparse_initializer.append(sparse)

    return change


def external_entries(model: onnx.ModelProto, **wanted: str | None) -> None:
    tensor = first_weight(model)
    kept = {entry.key: entry.value for entry in tensor.external_data}
    for key, value in wanted.items():
        kept.pop(key, None)
        if value is not None:
            kept[key] = value
    del tensor.external_data[:]
    for key, value in kept.items():
        tensor.external_data.add(key=key, value=value)


def with_external(prepare: Callable[[Path, onnx.ModelProto], None]) -> Write:
    def write(folder: Path) -> Path:
        inside = folder / "inside"
        inside.mkdir()
        path = inside / "model.onnx"
        model = seeds.with_external_weights(path)
        prepare(inside, model)
        return written(inside, model)

    return write


def node_of(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.name == name)


def edit(name: str, **lists: list[str]) -> Change:
    def change(model: onnx.ModelProto) -> None:
        node = node_of(model, name)
        for field, values in lists.items():
            del getattr(node, field)[:]
            getattr(node, field).extend(values)

    return change


def operator(name: str, op_type: str, domain: str = "") -> Change:
    def change(model: onnx.ModelProto) -> None:
        node_of(model, name).op_type = op_type
        node_of(model, name).domain = domain

    return change


def attribute(name: str, **attributes: object) -> Change:
    def change(model: onnx.ModelProto) -> None:
        node_of(model, name).attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())

    return change


def opset(version: int, domain: str = "") -> Change:
    def change(model: onnx.ModelProto) -> None:
        for entry in model.opset_import:
            if entry.domain == domain:
                entry.version = version

    return change


def float_value(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, FLOAT, None)


def bomb(levels: int, width: int) -> Change:
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


def call_attribute(model: onnx.ModelProto) -> None:
    node_of(model, "call").attribute.append(helper.make_attribute("strange", 1))


def deep_bodies(levels: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        graph = helper.make_graph([helper.make_node("Neg", ["x"], ["deep0"])], "g", [], [float_value("deep0")])
        for level in range(1, levels + 1):
            name = f"deep{level}"
            shallow = helper.make_graph(
                [helper.make_node("Abs", ["x"], [f"flat{level}"])], "g", [], [float_value(f"flat{level}")]
            )
            node = helper.make_node("If", ["flag"], [name], then_branch=graph, else_branch=shallow)
            graph = helper.make_graph([node], "g", [], [float_value(name)])
        model.graph.node.insert(0, graph.node[0])

    return change
