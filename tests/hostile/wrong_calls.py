"""Functions that do not end or fit, and nodes of our own that contradict themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tests.hostile.changes import (
    OURS,
    Change,
    Write,
    bomb,
    changed,
    edit,
    opset,
)


def _function(model: onnx.ModelProto, name: str) -> onnx.FunctionProto:
    return next(item for item in model.functions if item.name == name)


def _calls_itself(model: onnx.ModelProto) -> None:
    _function(model, "Twice").node[0].op_type = "Twice"
    del _function(model, "Twice").node[0].attribute[:]


def _call_each_other(model: onnx.ModelProto) -> None:
    scaled = _function(model, "Scaled")
    scaled.node[1].CopyFrom(helper.make_node("Twice", ["a"], ["b"], domain="other.functions"))
    scaled.opset_import.append(helper.make_opsetid("other.functions", 1))


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


def functions() -> Iterator[tuple[str, Write]]:
    changes = {
        "function that calls itself": _calls_itself,
        "functions that call each other": _call_each_other,
        "functions nested 12 deep, 4 calls each": bomb(12, 4),
        "functions nested 40 deep, 2 calls each": bomb(40, 2),
        "functions nested 300 deep": bomb(300, 2),
        "functions nested 150 deep, one call each": bomb(150, 1),
        "function given twice": _function_twice,
        "call with too many inputs": edit("call", input=["x", "x", "x"]),
        "call with too many outputs": edit("call", output=["t", "u", "v"]),
        "call without inputs": edit("call", input=[]),
        "function that reads nothing known": _function_node("Scaled", 1, input=["a", "nowhere"]),
        "function whose output nothing makes": _function_outputs,
        "function with two equal outputs of nodes": _function_node("Scaled", 1, output=["factor"]),
        "function with opset 999": _function_opset,
        "function without opset": _function_without_opset,
        "function whose attribute is not declared": _function_attribute,
    }
    for name, change in changes.items():
        yield name, changed("functions", change)


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
        "our domain in version 99": opset(99, OURS),
        "our domain in version 0": opset(0, OURS),
        "an unknown operator of our domain": _ours_named("QKNormSomething"),
        "a body of our node that calls it": _recursive_body,
    }
    for name, change in changes.items():
        yield name, changed("canonical", change)
