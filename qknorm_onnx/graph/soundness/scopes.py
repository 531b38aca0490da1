"""Graphs and their names: every value is made once and before it is read, bodies see what is around them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Final

import onnx

from qknorm_onnx.errors import InputError

_ATTRIBUTE_KINDS: Final = frozenset(onnx.AttributeProto.AttributeType.values()) - {onnx.AttributeProto.UNDEFINED}

# The maker of a name that a body may use for its own: what the node makes that holds the body.
_NOT_SEEN: Final = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scope:
    """A graph, body or function: its parts, and what it sees of the graphs around it."""

    label: str
    what: str  # "the graph", "body then_branch of node 'if'", "function f"
    inputs: tuple[str, ...]
    initializers: tuple[str, ...]
    nodes: tuple[onnx.NodeProto, ...]
    outputs: tuple[str, ...]
    around: collections.ChainMap[str, str]  # name -> what makes it, the nearest graph first
    parameters: frozenset[str] = frozenset()  # attributes of the function around
    is_main: bool = False

    def fail(self, problem: str) -> InputError:
        """The error that says `problem` of this scope."""
        return InputError(f"{self.label}: {problem} ({self.what})")


def check_graph(graph: onnx.GraphProto, label: str) -> bool:
    """Whether the nodes of the graph, and of all bodies in it, stand behind what they read.

    Raises:
        InputError: a name is used twice or not at all, or nodes wait for each other.
    """
    return _check(_graph_scope(graph, label, "the graph", collections.ChainMap(), is_main=True))


def check_function(function: onnx.FunctionProto, label: str) -> bool:
    """As `check_graph`, of the body of a function."""
    what = f"function {function.domain}::{function.name}"
    return _check(
        Scope(
            label=label,
            what=what,
            inputs=tuple(function.input),
            initializers=(),
            nodes=tuple(function.node),
            outputs=tuple(function.output),
            around=collections.ChainMap(),
            parameters=frozenset(function.attribute) | {attribute.name for attribute in function.attribute_proto},
        )
    )


def describe(node: onnx.NodeProto) -> str:
    """A node for people: its name and operator."""
    return f"node {node.name!r} ({node.op_type})" if node.name else f"a node {node.op_type} without a name"


def _graph_scope(
    graph: onnx.GraphProto, label: str, what: str, around: collections.ChainMap[str, str], *, is_main: bool = False
) -> Scope:
    return Scope(
        label=label,
        what=what,
        inputs=tuple(value.name for value in graph.input),
        initializers=tuple(tensor.name for tensor in graph.initializer),
        nodes=tuple(graph.node),
        outputs=tuple(value.name for value in graph.output),
        around=around,
        is_main=is_main,
    )


def _check(scope: Scope) -> bool:
    """Checks a scope and, with what they see, the bodies in it."""
    makers = _makers(scope)
    seen = collections.ChainMap(makers, *scope.around.maps)  # no copy: bodies may be many, and what is around them large
    needs: list[set[str]] = []
    in_order = True
    for node in scope.nodes:
        read = {name for name in node.input if name}
        _check_attributes(scope, node)
        for attribute, body in bodies(node):
            what = f"body {attribute} of {describe(node)}"
            around = collections.ChainMap(dict.fromkeys(node.output, _NOT_SEEN), *seen.maps)
            inner = dataclasses.replace(_graph_scope(body, scope.label, what, around), parameters=scope.parameters)
            in_order = _check(inner) and in_order
            read |= read_from_around(body)
        for name in read:
            if not seen.get(name):
                raise scope.fail(f"{describe(node)} reads {name!r}, which nothing makes")
        needs.append(read)
    _check_outputs(scope, seen)
    return _is_sorted(scope, needs) and in_order


def bodies(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    """The graphs that a node holds, each with the name of its attribute."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.name, attribute.g
        for body in attribute.graphs:
            yield attribute.name, body


def _check_attributes(scope: Scope, node: onnx.NodeProto) -> None:
    names: set[str] = set()
    for attribute in node.attribute:
        if attribute.name in names:
            raise scope.fail(f"{describe(node)} has the attribute {attribute.name!r} twice")
        names.add(attribute.name)
        if attribute.type not in _ATTRIBUTE_KINDS:
            raise scope.fail(f"attribute {attribute.name!r} of {describe(node)} is of the unknown kind {attribute.type}")
        if attribute.ref_attr_name and attribute.ref_attr_name not in scope.parameters:
            raise scope.fail(
                f"attribute {attribute.name!r} of {describe(node)} refers to {attribute.ref_attr_name!r}, "
                "which no function around it has"
            )


def _makers(scope: Scope) -> dict[str, str]:
    """What makes each value of this scope. Raises InputError where two things do, or a name is missing."""
    makers: dict[str, str] = {}
    for name in scope.inputs:
        _add(scope, makers, name, "an input")
    own_inputs = set(scope.inputs)
    initializers: set[str] = set()
    for name in scope.initializers:
        if name in initializers:
            raise scope.fail(f"two initializers are called {name!r}")
        initializers.add(name)
        if name not in own_inputs:  # an input with a default value is both
            _add(scope, makers, name, "an initializer")
    for node in scope.nodes:
        for name in node.output:
            if name:
                _add(scope, makers, name, describe(node))
    return makers


def _add(scope: Scope, makers: dict[str, str], name: str, maker: str) -> None:
    if not name:
        raise scope.fail(f"{maker} has no name")
    other = makers.get(name) or scope.around.get(name)
    if other:
        raise scope.fail(f"{name!r} is made twice: by {other} and by {maker}")
    makers[name] = maker


def _check_outputs(scope: Scope, seen: Mapping[str, str]) -> None:
    if scope.is_main and not scope.outputs:
        raise scope.fail("the model has no outputs")
    given: set[str] = set()
    for name in scope.outputs:
        if not seen.get(name):
            raise scope.fail(f"nothing makes the output {name!r}" if name else "an output has no name")
        if name in given:
            raise scope.fail(f"the output {name!r} is given twice; pass one of them through an Identity")
        given.add(name)


def read_from_around(graph: onnx.GraphProto) -> set[str]:
    """The names that a body, with the bodies in it, reads from around it."""
    own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    read = {value.name for value in graph.output}
    for node in graph.node:
        own.update(node.output)
        read.update(node.input)
        for _, body in bodies(node):
            read |= read_from_around(body)
    return read - own - {""}


def _is_sorted(scope: Scope, needs: list[set[str]]) -> bool:
    """Whether each node stands behind what it reads. Raises InputError where no order of the nodes is right."""
    place = {name: index for index, node in enumerate(scope.nodes) for name in node.output if name}
    waits_for = [{place[name] for name in read if name in place} for read in needs]
    if all(max(waiting, default=-1) < index for index, waiting in enumerate(waits_for)):
        return True
    readers: list[list[int]] = [[] for _ in waits_for]
    for index, waiting in enumerate(waits_for):
        for other in waiting:
            readers[other].append(index)
    open_ends = [len(waiting) for waiting in waits_for]
    ready = [index for index, count in enumerate(open_ends) if not count]
    done = 0
    while ready:
        done += 1
        for reader in readers[ready.pop()]:
            open_ends[reader] -= 1
            if not open_ends[reader]:
                ready.append(reader)
    if done < len(needs):
        stuck = next(index for index, count in enumerate(open_ends) if count)
        raise scope.fail(f"{describe(scope.nodes[stuck])} waits for its own result: the nodes form a cycle")
    return False
