"""Writes functions out where they are called, as far as a model of its own operator sets can say what they mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import onnx
import onnx_ir as ir

from qknorm_onnx.graph.walk.constants import ONNX_DOMAINS

_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


@dataclasses.dataclass(frozen=True)
class Inlined:
    """`calls`: how many were written out. `kept`: for each called function that stays one, why, in words."""

    calls: int
    kept: tuple[str, ...]


def _all(_function: ir.Function) -> bool:
    return True


def inline_functions(model: ir.Model, wanted: Callable[[ir.Function], bool] = _all) -> Inlined:
    """Write out, in place, each call of a function that is `wanted`, in the main graph and in the bodies in it.

    A function stays one, with all that it calls, where it imports another version of an operator set and an operator in it
    means another thing in the model's; and where a call gives it a graph. What is no longer called is removed. Time and names
    grow with the nodes that are written, not with their square: `v`, `v_2`, `v_3`, ...
    """
    inliner = _Inliner(model, wanted)
    inliner.run()
    return Inlined(inliner.calls, tuple(inliner.kept.values()))


class _Names:
    """Names of one kind that are taken; a number behind one that is taken already makes it another."""

    def __init__(self, taken: Iterator[str | None]) -> None:
        self._taken = set(taken)
        self._last: dict[str, int] = {}

    def unique(self, name: str) -> str:
        found, number = name, self._last.get(name, 1)
        while found in self._taken:
            number += 1
            found = f"{name}_{number}"
        self._last[name] = number
        self._taken.add(found)
        return found


class _Inliner:
    def __init__(self, model: ir.Model, wanted: Callable[[ir.Function], bool]) -> None:
        self.calls = 0
        self.kept: dict[ir.OperatorIdentifier, str] = {}
        self._model = model
        self._wanted = wanted
        self._values = _Names(value.name for graph in model.graphs() for value in _values(graph))
        self._nodes = _Names(node.name for node in model.graph.all_nodes())
        self._problems: dict[ir.OperatorIdentifier, str | None] = {}
        self._inlined: set[ir.OperatorIdentifier] = set()

    def run(self) -> None:
        waiting = list(model_calls(self._model))[::-1]
        while waiting:
            call = waiting.pop()
            function = self._model.functions[call.op_identifier()]
            if not self._wanted(function) or not self._fits(call, function):
                continue
            nodes = self._write_out(call, function)
            waiting.extend(node for node in reversed(nodes) if node.op_identifier() in self._model.functions)
        self._remove_uncalled()

    def _fits(self, call: ir.Node, function: ir.Function) -> bool:
        key = function.identifier()
        if key not in self._problems:
            self._problems[key] = self._difference(function)
        problem = self._problems[key]
        given = (*call.attributes.values(), *function.attributes.values())
        if problem is None and any(attribute.type in _GRAPHS for attribute in given):
            problem = "a graph is given to it as an attribute"
        if problem is not None:
            self.kept[key] = f"the function {key[0]}::{key[1]} stays a function, and nothing in it is read: {problem}"
        return problem is None

    def _difference(self, function: ir.Function) -> str | None:
        """What in the function would mean another thing under the imports of the model, which get those that they lack."""
        imports = self._model.opset_imports
        for domain, version in function.opset_imports.items():
            own = imports.setdefault(_imported_as(domain, imports), version)
            changed = (node for node in function.all_nodes() if own != version and self._differs(node, domain, version, own))
            other = next(changed, None)
            if other is not None:
                name = domain or "ai.onnx"
                return f"it imports {name} in version {version}, the model {own}, and {other.op_type} may not be the same in both"
        return None

    def _differs(self, node: ir.Node, domain: str, version: int, own: int) -> bool:
        """Whether a node of `domain` in one version is not known to mean the same in another."""
        onnx_own = domain in ONNX_DOMAINS
        if node.domain != domain and not (onnx_own and node.domain in ONNX_DOMAINS):
            return False
        if node.op_identifier() in self._model.functions:
            return False
        try:
            schemas = [onnx.defs.get_schema(node.op_type, number, "" if onnx_own else domain) for number in (version, own)]
        except (onnx.defs.SchemaError, RuntimeError, TypeError):
            return True
        return schemas[0].since_version != schemas[1].since_version

    def _write_out(self, call: ir.Node, function: ir.Function) -> list[ir.Node]:
        """Put the nodes of `function` in place of `call`; they, and what is in their bodies."""
        body = function.clone()
        nodes = list(body)
        outputs = list(body.outputs)[: len(call.outputs)]
        body.outputs.clear()
        _give_attributes(nodes, {**_defaults(function), **call.attributes})
        outputs = _made_once(outputs, set(body.inputs), nodes)
        for place, value in enumerate(body.inputs):
            given = call.inputs[place] if place < len(call.inputs) else None
            for node, index in list(value.uses()):
                node.replace_input_with(index, given)
        self._rename(nodes, call)
        body.graph.remove([node for node in nodes if node.graph is body.graph])
        graph = call.graph
        assert isinstance(graph, ir.Graph), "calls of the main graph and of bodies in it"
        ir.convenience.replace_nodes_and_values(graph, call, [call], nodes, call.outputs[: len(outputs)], outputs)
        self.calls += 1
        self._inlined.add(function.identifier())
        return [inner for node in nodes for inner in _with_bodies(node)]

    def _rename(self, nodes: list[ir.Node], call: ir.Node) -> None:
        for node in (inner for outer in nodes for inner in _with_bodies(outer)):
            node.name = self._nodes.unique(node.name or "node")
            node.metadata_props.update({**call.metadata_props, **node.metadata_props})
            for value in node.outputs:
                if value.name != "":
                    value.name = self._values.unique(value.name or "val")
            for body in _bodies(node):
                for value in (*body.inputs, *list(body.initializers.values())):
                    value.name = self._values.unique(value.name or "val")

    def _remove_uncalled(self) -> None:
        """Remove what was written out and is called by nothing that stays."""
        functions = self._model.functions
        waiting = {node.op_identifier() for node in model_calls(self._model)} | (set(functions) - self._inlined)
        called: set[ir.OperatorIdentifier] = set()
        while waiting:
            key = waiting.pop()
            called.add(key)
            inner = {node.op_identifier() for node in functions[key].all_nodes()} & set(functions)
            waiting |= inner - called
        for key in self._inlined - called:
            del functions[key]


def model_calls(model: ir.Model) -> Iterator[ir.Node]:
    """The nodes of the main graph, and of bodies in it, that call a function of the model."""
    return (node for node in model.graph.all_nodes() if node.op_identifier() in model.functions)


def _defaults(function: ir.Function) -> dict[str, ir.Attr]:
    return {name: attribute for name, attribute in function.attributes.items() if attribute.value is not None}


def _give_attributes(nodes: list[ir.Node], given: dict[str, ir.Attr]) -> None:
    """Put what a call gives in place of references to it; what it does not give is left out."""
    for node in (inner for outer in nodes for inner in _with_bodies(outer)):
        for name, attribute in list(node.attributes.items()):
            if not attribute.is_ref():
                continue
            value = given.get(str(attribute.ref_attr_name))
            if value is None:
                del node.attributes[name]
            else:
                node.attributes[name] = ir.Attr(name, value.type, value.value)


def _made_once(outputs: list[ir.Value], inputs: set[ir.Value], nodes: list[ir.Node]) -> list[ir.Value]:
    """`outputs`, each made by a node and in one place: an Identity behind `nodes` passes an input or a second mention on."""
    found: list[ir.Value] = []
    for value in outputs:
        if value in inputs or value in found:
            nodes.append(ir.Node("", "Identity", [value], num_outputs=1, name="passed_on"))
            found.append(nodes[-1].outputs[0])
        else:
            found.append(value)
    return found


def _imported_as(domain: str, imports: Mapping[str, int]) -> str:
    """The name under which a model imports `domain`: ONNX's own has two."""
    return next((name for name in ONNX_DOMAINS if name in imports), domain) if domain in ONNX_DOMAINS else domain


def _with_bodies(node: ir.Node) -> Iterator[ir.Node]:
    yield node
    for body in _bodies(node):
        yield from body.all_nodes()


def _bodies(node: ir.Node) -> Iterator[ir.Graph]:
    """The graphs that a node holds itself."""
    for attribute in node.attributes.values():
        if attribute.is_ref() or attribute.type not in _GRAPHS:
            continue
        yield from [attribute.as_graph()] if attribute.type == ir.AttributeType.GRAPH else attribute.as_graphs()


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs
