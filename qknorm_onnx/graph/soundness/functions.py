"""Functions of a model: they end, their calls fit, and written out they stay small enough to work with."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from typing import Final

import onnx

from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.soundness.scopes import bodies, describe

MOST_INLINED_NODES: Final = 200_000

# ONNX's inference copies, for each body of an If, Loop or Scan, the types of all that is around it: 20 million a second.
MOST_COPIES: Final = 100_000_000

_SPLIT: Final = "write their branches with Where, or split the model"

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


def check_bodies(model: onnx.ModelProto, label: str) -> None:
    """Raises InputError where bodies inside bodies or functions, whose calls are sound, are too many for ONNX's inference.

    Those of the main graph itself may be any number: it is inferred in pieces.
    """
    functions = {(function.domain, function.name, function.overload): function for function in model.functions}
    copies = {key: _copies(function.node, 0) for key, function in functions.items()}
    for node in model.graph.node:
        if sum(_copies(body.node, 0) for _, body in bodies(node)) > MOST_COPIES:
            raise InputError(f"{label}: {describe(node)} holds too many bodies inside its own; {_SPLIT}")
    for key, times in _times_called(model.graph, functions).items():
        if times * copies[key] > MOST_COPIES:
            raise InputError(f"{label}: the function {_text(key)} holds too many bodies, called {times:,} times; {_SPLIT}")


def _copies(nodes: Iterable[onnx.NodeProto], around: int) -> int:
    total = 0
    for node in nodes:
        total += sum(around + _copies(body.node, around) for _, body in bodies(node))
        around += len(node.output)
    return total


def _times_called(graph: onnx.GraphProto, functions: dict[_Key, onnx.FunctionProto]) -> dict[_Key, int]:
    """How often each function runs through in all, callers before what they call."""
    calls = {key: collections.Counter(filter(functions.__contains__, map(_called, all_nodes(f)))) for key, f in functions.items()}
    times = collections.Counter(filter(functions.__contains__, map(_called, all_nodes(graph))))
    callers = collections.Counter(key for called in calls.values() for key in called)
    ready = [key for key in functions if not callers[key]]
    while ready:
        caller = ready.pop()
        for key, count in calls[caller].items():
            times[key] += times[caller] * count
            callers[key] -= 1
            if not callers[key]:
                ready.append(key)
    return times


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
