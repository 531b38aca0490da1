"""Attention with a long chain of one operator put into one of its values: what a recogniser that calls itself cannot walk."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.hostile import seeds

# Each maps a value (name, element type, rank) to the next one, without changing what it computes.
OPERATORS = ("Cast", "Neg", "Add", "Mul", "Transpose", "Unsqueeze", "Reshape", "Slice", "Concat", "Where", "Clip", "Expand")


def places() -> tuple[str, ...]:
    """The values of the attention into which a chain can be put: all that nodes read, weights and inputs included."""
    graph = seeds.spelled().graph
    return tuple(dict.fromkeys(name for node in graph.node for name in node.input if name))


def with_chain(place: str, operator: str, length: int) -> onnx.ModelProto:
    """The attention whose readers of `place` read it through `length` nodes of `operator`."""
    model = seeds.spelled()
    kinds = _types(model)
    kind, rank = kinds[place]
    nodes = list(_chain(place, operator, length, kind, rank))
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name == place:
                node.input[index] = nodes[-1].output[0]
    maker = next((index for index, node in enumerate(model.graph.node) if place in node.output), -1)
    rest = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*rest[: maker + 1], *nodes, *rest[maker + 1 :]])
    model.graph.initializer.extend(_constants(kind, rank))
    return model


def _types(model: onnx.ModelProto) -> dict[str, tuple[int, int]]:
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    kinds = {
        value.name: (value.type.tensor_type.elem_type, len(value.type.tensor_type.shape.dim))
        for value in (*inferred.input, *inferred.value_info, *inferred.output)
    }
    return kinds | {tensor.name: (tensor.data_type, len(tensor.dims)) for tensor in inferred.initializer}


def _constants(kind: int, rank: int) -> Iterator[onnx.TensorProto]:
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    for name, value in (("chain_zero", 0), ("chain_one", 1)):
        yield numpy_helper.from_array(np.array(value, dtype), name)
    for name, numbers in (("chain_first", [0]), ("chain_last", [2**62]), ("chain_axis", [0]), ("chain_keep", [0] * max(rank, 1))):
        yield numpy_helper.from_array(np.array(numbers, np.int64), name)
    yield numpy_helper.from_array(np.array(True), "chain_true")
    yield numpy_helper.from_array(np.ones(max(rank, 1), np.int64), "chain_ones")


def _chain(place: str, operator: str, length: int, kind: int, rank: int) -> Iterator[onnx.NodeProto]:
    value = place
    for number in range(length):
        made = f"chain_{number}"
        yield _node(operator, value, made, kind, rank, number)
        value = made


def _node(operator: str, value: str, made: str, kind: int, rank: int, number: int) -> onnx.NodeProto:
    if kind == TensorProto.BOOL and operator in ("Neg", "Add", "Mul", "Clip"):
        operator = "Not"
    match operator:
        case "Cast":
            return helper.make_node("Cast", [value], [made], to=kind)
        case "Neg" | "Not":
            return helper.make_node(operator, [value], [made])
        case "Add":
            return helper.make_node("Add", [value, "chain_zero"], [made])
        case "Mul":
            return helper.make_node("Mul", [value, "chain_one"], [made])
        case "Transpose" if rank > 1:
            return helper.make_node("Transpose", [value], [made], perm=[*range(rank - 2), *list(range(rank))[-2:][::-1]])
        case "Unsqueeze":
            back = number % 2
            return helper.make_node("Squeeze" if back else "Unsqueeze", [value, "chain_axis"], [made])
        case "Reshape" if rank:
            return helper.make_node("Reshape", [value, "chain_keep"], [made])
        case "Slice" if rank:
            return helper.make_node("Slice", [value, "chain_first", "chain_last", "chain_axis"], [made])
        case "Concat" if rank:
            return helper.make_node("Concat", [value], [made], axis=0)
        case "Where":
            return helper.make_node("Where", ["chain_true", value, "chain_zero"], [made])
        case "Clip" if kind != TensorProto.BOOL:
            return helper.make_node("Clip", [value], [made])
        case "Expand":
            return helper.make_node("Expand", [value, "chain_ones"], [made])
        case _:
            return helper.make_node("Identity", [value], [made])
