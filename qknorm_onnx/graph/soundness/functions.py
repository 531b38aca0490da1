"""Functions of a model: they end, their calls fit, and written out they stay small enough to work with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import onnx

from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.soundness.scopes import describe

MOST_INLINED_NODES: Final = 200_000

_Key = tuple[str, str, str]


def check_functions(model: onnx.ModelProto, label: str) -> None:
    """Raises InputError where a function is given twice, calls itself, is called wrongly, or grows without measure.

    Functions are written out where they are called: a few that call each other often can stand for 2^40 nodes.
    """
    functions: dict[_Key, onnx.FunctionProto] = {}
    for function in model.functions:
        key = (function.domain, function.name, function.overload)
        if not function.name or key in functions:
            raise InputError(f"{label}: {_text(key)} is given twice" if function.name else f"{label}: a function has no name")
        functions[key] = function
    if not functions:
        return
    sizes: dict[_Key, int] = {}
    for key in functions:
        _measure(key, functions, sizes, label)
    total = _size(all_nodes(model.graph), functions, sizes, label)
    if total > MOST_INLINED_NODES:
        raise InputError(
            f"{label}: with its functions written out it has {_magnitude(total)} nodes; "
            f"at most {MOST_INLINED_NODES:,} can be worked with"
        )


def all_nodes(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a graph or function, those of the bodies in it included."""
    waiting = [graph]
    while waiting:
        for node in waiting.pop().node:
            yield node
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    waiting.append(attribute.g)
                waiting.extend(attribute.graphs)


def _measure(start: _Key, functions: dict[_Key, onnx.FunctionProto], sizes: dict[_Key, int], label: str) -> None:
    """Sizes of `start` and of all functions that it needs; a stack of our own, since calls may be nested deeply."""
    path = [start]
    while path:
        key = path[-1]
        if key in sizes:
            path.pop()
            continue
        nodes = list(all_nodes(functions[key]))
        needed = [call for call in map(_called, nodes) if call in functions and call not in sizes]
        if not needed:
            sizes[key] = _size(iter(nodes), functions, sizes, label)
            path.pop()
            continue
        if needed[0] in path:
            raise InputError(f"{label}: {_text(needed[0])} calls itself, by itself or through others; functions cannot")
        path.append(needed[0])


def _size(nodes: Iterator[onnx.NodeProto], functions: dict[_Key, onnx.FunctionProto], sizes: dict[_Key, int], label: str) -> int:
    total = 0
    for node in nodes:
        key = _called(node)
        total += 1
        if key in functions:
            _check_call(node, functions[key], label)
            total += sizes[key]
    return total


def _check_call(node: onnx.NodeProto, function: onnx.FunctionProto, label: str) -> None:
    for kind, given, allowed in (("inputs", node.input, function.input), ("outputs", node.output, function.output)):
        if len(given) > len(allowed):
            raise InputError(
                f"{label}: {describe(node)} has {len(given)} {kind}; its function {_text(_called(node))} has {len(allowed)}"
            )


def _called(node: onnx.NodeProto) -> _Key:
    return node.domain, node.op_type, node.overload


def _text(key: _Key) -> str:
    domain, name, overload = key
    return f"{domain}::{name}" + (f":{overload}" if overload else "")


def _magnitude(number: int) -> str:
    return f"{number:,}" if number < 10**12 else f"about 10^{len(str(number)) - 1}"
