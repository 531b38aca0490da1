"""Models without fusable attention, of any number of nodes: what time and memory are measured on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT = TensorProto.FLOAT
FUNCTIONS = "many.functions"


def chain(count: int) -> onnx.ModelProto:
    """One node behind the other."""
    kinds = ("Relu", "Neg", "Abs", "Sigmoid")
    return _model([helper.make_node(kinds[i % 4], [_at(i)], [_next(i, count)], name=f"n{i}") for i in range(count)])


def reversed_chain(count: int) -> onnx.ModelProto:
    """The same, the last node first."""
    model = chain(count)
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def outputs(count: int) -> onnx.ModelProto:
    """As many outputs as nodes."""
    nodes = [helper.make_node("Elu", ["x"], [f"y{i}"], alpha=float(i)) for i in range(count)]
    return _model(nodes, outputs=[f"y{i}" for i in range(count)])


def weights(count: int) -> onnx.ModelProto:
    """A weight for each node."""
    tensors = [numpy_helper.from_array(np.full(16, i, np.float32), f"w{i}") for i in range(count)]
    nodes = [helper.make_node("Add", [_at(i), f"w{i}"], [_next(i, count)], name=f"n{i}") for i in range(count)]
    return _model(nodes, weights=tensors)


def sizes(count: int) -> onnx.ModelProto:
    """Arithmetic with the size of an input."""
    one = numpy_helper.from_array(np.array([1], np.int64), "one")
    nodes = [helper.make_node("Shape", ["x"], ["v0"])]
    nodes += [helper.make_node("Add", [f"v{i}", "one"], [f"v{i + 1}"]) for i in range(count - 2)]
    return _model([*nodes, helper.make_node("Cast", [f"v{count - 2}"], ["y"], to=FLOAT)], weights=[one])


def layers(count: int) -> onnx.ModelProto:
    """What transformers have besides attention: products, layouts, softmax, norms and residuals, twelve nodes a layer."""
    tensors = [
        numpy_helper.from_array(np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32), "w"),
        numpy_helper.from_array(np.array([0, 0, 4, 4], np.int64), "heads"),
    ]
    nodes, value = [], "x"
    for i in range(max(1, count // 12)):
        p = f"layer{i}/"
        nodes += [
            helper.make_node("MatMul", [value, "w"], [f"{p}a"]),
            helper.make_node("Shape", [f"{p}a"], [f"{p}shape"]),
            helper.make_node("Reshape", [f"{p}a", "heads"], [f"{p}r"]),
            helper.make_node("Transpose", [f"{p}r"], [f"{p}t"], perm=[0, 2, 1, 3]),
            helper.make_node("Softmax", [f"{p}t"], [f"{p}s"]),
            helper.make_node("Transpose", [f"{p}s"], [f"{p}b"], perm=[0, 2, 1, 3]),
            helper.make_node("Reshape", [f"{p}b", f"{p}shape"], [f"{p}c"]),
            helper.make_node("Mul", [f"{p}c", f"{p}c"], [f"{p}square"]),
            helper.make_node("ReduceMean", [f"{p}square"], [f"{p}mean"], keepdims=1),
            helper.make_node("Sqrt", [f"{p}mean"], [f"{p}root"]),
            helper.make_node("Div", [f"{p}c", f"{p}root"], [f"{p}d"]),
            helper.make_node("Add", [f"{p}d", value], [f"{p}o"]),
        ]
        value = f"{p}o"
    return _model([*nodes, helper.make_node("Identity", [value], ["y"])], weights=tensors)


def calls(count: int) -> onnx.ModelProto:
    """Calls of one function of two nodes: `count` nodes written out."""
    count //= 2
    body = [helper.make_node("Neg", ["a"], ["c"]), helper.make_node("Relu", ["c"], ["b"])]
    nodes = [helper.make_node("F0", [_at(i)], [_next(i, count)], domain=FUNCTIONS) for i in range(count)]
    return _model(nodes, functions=[_function(0, body)])


def nested_functions(count: int) -> onnx.ModelProto:
    """Functions 12 deep, each of which calls the next one twice: 8190 nodes written out, more with more calls of the first."""
    functions = []
    for level in range(12):
        domain, op_type = (FUNCTIONS, f"F{level - 1}") if level else ("", "Neg")
        body = [helper.make_node(op_type, [source], [result], domain=domain) for source, result in (("a", "c"), ("c", "b"))]
        functions.append(_function(level, body))
    times = max(1, count // 8190)
    nodes = [helper.make_node("F11", [_at(i)], [_next(i, times)], domain=FUNCTIONS) for i in range(times)]
    return _model(nodes, functions=functions)


def branches(count: int) -> onnx.ModelProto:
    """An If for every three nodes."""
    count //= 3
    nodes = []
    for i in range(count):
        bodies = {}
        for place, op_type in (("then", "Neg"), ("else", "Abs")):
            name = f"{place}{i}"
            body = [helper.make_node(op_type, [_at(i)], [name])]
            bodies[f"{place}_branch"] = helper.make_graph(body, place, [], [helper.make_tensor_value_info(name, FLOAT, None)])
        nodes.append(helper.make_node("If", ["flag"], [_next(i, count)], **bodies))
    model = _model(nodes)
    model.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    return model


KINDS: dict[str, Callable[[int], onnx.ModelProto]] = {
    kind.__name__: kind for kind in (chain, reversed_chain, outputs, weights, sizes, layers, calls, nested_functions, branches)
}


def one_weight(megabytes: int, rank: int) -> onnx.ModelProto:
    """One float32 weight of one or two axes, in the file."""
    array = np.random.default_rng(0).standard_normal(megabytes * 250_000).astype(np.float32)
    array = array if rank == 1 else array.reshape(250, -1)
    node = helper.make_node("Add" if rank == 1 else "MatMul", ["x", "w"], ["y"])
    model = _model([node], weights=[numpy_helper.from_array(array, "w")])
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", FLOAT, [1] if rank == 1 else ["n", 250]))
    return model


def _at(place: int) -> str:
    return f"v{place}" if place else "x"


def _next(place: int, count: int) -> str:
    return f"v{place + 1}" if place + 1 < count else "y"


def _function(number: int, body: list[onnx.NodeProto]) -> onnx.FunctionProto:
    imports = [helper.make_opsetid("", 20), helper.make_opsetid(FUNCTIONS, 1)]
    return helper.make_function(FUNCTIONS, f"F{number}", ["a"], ["b"], body, imports)


def _model(nodes, *, weights=(), outputs=("y",), functions=()) -> onnx.ModelProto:
    results = [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", FLOAT, ["b", "s", 16])], results, list(weights))
    imports = [helper.make_opsetid("", 20), *([helper.make_opsetid(FUNCTIONS, 1)] if functions else [])]
    return helper.make_model(graph, opset_imports=imports, ir_version=10, functions=list(functions))
