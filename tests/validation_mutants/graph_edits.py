"""Edits of an exported graph: each changes the model that it is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.canonical.qk_norm_node import AttentionInputs, is_attention_node, make_attention_node, read_attention_node
from qknorm_onnx.graph.passes.attach_bodies import AttachBodiesPass
from qknorm_onnx.spec.qk_norm_spec import QKNormSpec

Edit = Callable[[ir.Model], None]
Array = np.ndarray[Any, Any]


class NotApplicable(Exception):  # noqa: N818
    """The model has nothing that the edit changes."""


def attention_nodes(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if is_attention_node(node)]


def with_spec(
    change: Callable[[QKNormSpec], QKNormSpec],
    inputs: Callable[[AttentionInputs], AttentionInputs] = lambda x: x,
    *,
    nodes: slice = slice(None),
) -> Edit:
    """Every attention, or those of `nodes`, with another spec, or other inputs."""

    def edit(model: ir.Model) -> None:
        for node in attention_nodes(model)[nodes]:
            spec, given = read_attention_node(node)
            new_spec, new_inputs = change(spec), inputs(given)
            if new_spec == spec and new_inputs == given:
                raise NotApplicable
            outputs = list(node.outputs)
            made = make_attention_node(new_spec, new_inputs, name=str(node.name), num_outputs=len(outputs))
            for old, new in zip(outputs, made.outputs, strict=True):
                new.name = old.name
            ir.convenience.replace_nodes_and_values(model.graph, node, [node], [made], outputs, made.outputs)
            for index, value in enumerate(model.graph.outputs):
                if value in outputs:
                    model.graph.outputs[index] = made.outputs[outputs.index(value)]
        AttachBodiesPass()(model)

    return edit


def spec_fields(part: str, *, nodes: slice = slice(None), **fields: Any) -> Edit:
    """`spec.part` with fields replaced, in every attention or those of `nodes`; a function is given the old value."""

    def change(spec: QKNormSpec) -> QKNormSpec:
        old = getattr(spec, part)
        new = {name: value(getattr(old, name)) if callable(value) else value for name, value in fields.items()}
        return dataclasses.replace(spec, **{part: dataclasses.replace(old, **new)})

    return with_spec(change, nodes=nodes)


def without_input(*names: str) -> Edit:
    """Optional inputs of every attention dropped."""

    def drop(given: AttentionInputs) -> AttentionInputs:
        return dataclasses.replace(given, **dict.fromkeys(names))

    return with_spec(lambda spec: spec, drop)


def constant(model: ir.Model, array: Any, name: str) -> ir.Value:
    array = np.asarray(array)
    value = ir.Value(
        name=name,
        type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
        shape=ir.Shape(array.shape),
        const_value=ir.tensor(array, name=name),
    )
    model.graph.register_initializer(value)
    return value


def text_edit(text: str, *, input: str = "", output: str = "", constants: Mapping[str, Any] | None = None) -> Edit:  # noqa: A002
    """Put a piece of graph, in ONNX's text form, behind an input (`x` becomes `y` for all who read it) or before an output.

    Other inputs of the graph may be read by name; `constants` are added as initializers.
    """

    def edit(model: ir.Model) -> None:
        inputs = {str(value.name): value for value in model.graph.inputs}
        outputs = {str(value.name): value for value in model.graph.outputs}
        if (input and input not in inputs) or (output and output not in outputs):
            raise NotApplicable
        users = list(inputs[input].uses()) if input else []
        made = {name: constant(model, array, f"mutant_{name}") for name, array in (constants or {}).items()}
        tape = _Lines(text, {**inputs, **made, "x": inputs[input] if input else outputs[output]})
        if input:
            _insert_first(model, tape.nodes)
            for node, index in users:
                node.replace_input_with(index, tape.values["y"])
            if inputs[input] in model.graph.outputs:
                model.graph.outputs[model.graph.outputs.index(inputs[input])] = tape.values["y"]
        else:
            old = outputs[output]
            new = tape.values["y"]
            new.type, new.shape = old.type, old.shape
            model.graph.extend(tape.nodes)
            model.graph.outputs[model.graph.outputs.index(old)] = new
            old.name, new.name = f"{output}_before", output

    return edit


def _insert_first(model: ir.Model, nodes: list[ir.Node]) -> None:
    first = model.graph[0]
    model.graph.insert_before(first, nodes)


class _Lines:
    """Lines `y = Op(a, b, attribute=1)`, with values of the graph by name."""

    def __init__(self, text: str, values: dict[str, ir.Value]) -> None:
        self.values = values
        self.nodes: list[ir.Node] = []
        for line in filter(None, map(str.strip, text.replace(";", "\n").splitlines())):
            target, call = (part.strip() for part in line.split("=", 1))
            op, arguments = call[:-1].split("(", 1)
            names, attributes = [], {}
            for part in (piece.strip() for piece in arguments.split(",")):
                if "=" in part:
                    key, value = part.split("=")
                    attributes[key] = int(value)
                else:
                    names.append(part)
            node = ir.node(
                op,
                [values[name] if name else None for name in names],
                attributes or None,
                name=f"mutant_{target}_{len(self.nodes)}",
            )
            node.outputs[0].name = f"mutant_{target}_{len(self.nodes)}"
            values[target] = node.outputs[0]
            self.nodes.append(node)


def initializer_edit(change: Callable[[Array], Array], choose: Callable[[str, Array], bool]) -> Edit:
    """Every chosen initializer with other values of the same shape."""

    def edit(model: ir.Model) -> None:
        found = False
        for name, value in list(model.graph.initializers.items()):
            assert value.const_value is not None
            array = value.const_value.numpy()
            if choose(name, array):
                changed = np.ascontiguousarray(change(array.copy())).astype(array.dtype)
                assert changed.shape == array.shape
                if not np.array_equal(changed, array):
                    found = True
                    value.const_value = ir.tensor(changed, name=name)
        if not found:
            raise NotApplicable

    return edit
