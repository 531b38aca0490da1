"""Cuts a model into parts that run one after the other, where some operators need another runtime."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from qknorm_onnx.runtime.value_types import subgraphs


def split_at(model: ir.Model, operators: frozenset[str]) -> Iterator[tuple[ir.Model, bool]]:
    """Parts of a flattened `model` in running order, each with whether it consists of `operators`.

    Inputs and outputs of a part keep the model's value names, so that a dictionary of values can go through all parts.
    """
    groups: list[tuple[bool, list[ir.Node]]] = []
    for node in model.graph:
        separated = _uses(node, operators)
        if not groups or groups[-1][0] != separated:
            groups.append((separated, []))
        groups[-1][1].append(node)
    for separated, nodes in groups:
        yield _part(model, nodes), separated


def _uses(node: ir.Node, operators: frozenset[str]) -> bool:
    inner = (inner_node for graph in subgraphs(node) for inner_node in graph)
    return node.op_type in operators or any(_uses(inner_node, operators) for inner_node in inner)


def _part(model: ir.Model, nodes: list[ir.Node]) -> ir.Model:
    made = {output for node in nodes for output in node.outputs}
    read = dict.fromkeys(value for node in nodes for value in _read_values(node) if value not in made)
    inputs = [value for value in read if not value.is_initializer()]
    outputs = [value for value in made if _is_read_elsewhere(value, nodes)]
    graph = ir.convenience.extract(model.graph, inputs=inputs, outputs=outputs)
    return ir.Model(graph, ir_version=model.ir_version)


def _read_values(node: ir.Node) -> Iterator[ir.Value]:
    yield from (value for value in node.inputs if value is not None)
    for graph in subgraphs(node):
        inner_values = {output for inner in graph for output in inner.outputs} | set(graph.inputs)
        for inner in graph:
            yield from (value for value in _read_values(inner) if value not in inner_values and value.graph is not graph)


def _is_read_elsewhere(value: ir.Value, nodes: list[ir.Node]) -> bool:
    own = set(nodes)
    return value.is_graph_output() or any(use.node not in own for use in value.uses())
