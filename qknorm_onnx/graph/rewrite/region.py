"""The old and the new nodes of one rewrite as two small models with the same inputs and outputs, so that they can be run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from qknorm_onnx.graph.rewrite.replacement import Replacement
from qknorm_onnx.spec.signature import DOMAIN, VERSION


class RegionError(Exception):
    """A region that cannot be cut out of its graph; the message says why."""


def region_models(replacement: Replacement, model: ir.Model) -> tuple[ir.Model, ir.Model]:
    """Both sides of a rewrite that is not inserted yet. Inputs are those of the old side, in the order of their use.

    Raises:
        RegionError: a node of the region has a graph of its own.
    """
    olds = [old for old, _ in replacement.outputs]
    news = [new for _, new in replacement.outputs]
    boundary = set(replacement.boundary)
    old_slice, new_slice = _Slice(boundary, olds), _Slice(boundary, news)
    inputs = list(dict.fromkeys([*old_slice.inputs, *new_slice.inputs]))
    return (
        _model(old_slice, inputs, olds, names=[value.name for value in olds], model=model),
        _model(new_slice, inputs, news, names=[value.name for value in olds], model=model),
    )


class _Slice:
    """Nodes between the boundary and some outputs, in topological order, and the inputs that they start from."""

    def __init__(self, boundary: set[ir.Value], outputs: Sequence[ir.Value]) -> None:
        self.boundary = boundary
        self.nodes: list[ir.Node] = []
        self.inputs: list[ir.Value] = []
        self.initializers: list[ir.Value] = []
        self._done: set[ir.Value | ir.Node] = set()
        self._inside: dict[ir.Value, bool] = {}
        self._read = _values_read(outputs, boundary)
        dims = [dim for value in boundary for dim in value.shape or ()]
        self._symbols = {dim.value for dim in dims if isinstance(dim, ir.SymbolicDim) and dim.value is not None}
        for value in outputs:
            self._collect(value)

    def _collect(self, output: ir.Value) -> None:
        """Add what `output` is computed from."""
        waiting: list[ir.Value | ir.Node] = [output]
        while waiting:
            item = waiting.pop()
            if isinstance(item, ir.Node):
                if item not in self._done:
                    self._done.add(item)
                    self.nodes.append(item)
                continue
            if item not in self._done:
                self._done.add(item)
                waiting += self._behind(item)

    def _behind(self, value: ir.Value) -> list[ir.Value | ir.Node]:
        """What must be collected for `value`: its node last, so that it comes behind its inputs."""
        node = value.producer()
        if value.is_graph_input() or (value.const_value is None and (node is None or value in self.boundary)):
            self.inputs.append(value)
            return []
        if node is None:
            self.initializers.append(value)
            return []
        if any(attribute.type in GRAPH_ATTRIBUTES for attribute in node.attributes.values()):
            raise RegionError(f"its region contains {node.op_type}, a node with a graph of its own")
        inputs = [item for item in reversed(node.inputs) if item is not None]
        if node.op_type == "Shape" and self._is_only_a_size(inputs[0]):
            # It becomes an input, whatever computes it: a layer's region must not reach back to the layers before it.
            if inputs[0] not in self._done:
                self._done.add(inputs[0])
                (self.inputs if inputs[0].const_value is None else self.initializers).append(inputs[0])
            return [node]
        return [node, *inputs]

    def _is_only_a_size(self, value: ir.Value) -> bool:
        """Whether the region reads no number of `value`, and its size is known without computing it."""
        if value in self._read:
            return False
        dims = value.shape
        known = dims is not None and all(isinstance(dim, int) or dim.value in self._symbols for dim in dims)
        return known or not self._is_inside(value)

    def _is_inside(self, value: ir.Value) -> bool:
        """Whether `value` depends on the boundary."""
        waiting, order = [value], list[ir.Value]()
        seen: set[ir.Value] = set()
        while waiting:
            item = waiting.pop()
            if item in seen or item in self._inside:
                continue
            seen.add(item)
            order.append(item)
            node = item.producer()
            if node is not None and item not in self.boundary:
                waiting += [operand for operand in node.inputs if operand is not None]
        for item in reversed(order):
            self._inside[item] = False
        changed = True
        while changed:
            changed = False
            for item in reversed(order):
                node = item.producer()
                inside = item in self.boundary or (
                    node is not None and any(self._inside[operand] for operand in node.inputs if operand is not None)
                )
                changed = changed or inside != self._inside[item]
                self._inside[item] = inside
        return self._inside[value]


def _values_read(outputs: Sequence[ir.Value], boundary: set[ir.Value]) -> set[ir.Value]:
    """Values whose numbers the outputs depend on, and not merely their shapes, up to and with the boundary."""
    waiting, found = list(outputs), set[ir.Value]()
    while waiting:
        value = waiting.pop()
        node = value.producer()
        if value in found:
            continue
        found.add(value)
        if node is not None and node.op_type != "Shape" and value not in boundary:
            waiting += [operand for operand in node.inputs if operand is not None]
    return found


GRAPH_ATTRIBUTES = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def _model(
    side: _Slice, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], *, names: Iterable[str | None], model: ir.Model
) -> ir.Model:
    copies: dict[ir.Value, ir.Value] = {value: _copy(value) for value in inputs}
    copies.update({value: _copy(value, constant=True) for value in side.initializers})
    nodes = []
    for node in side.nodes:
        made = [_copy(value) for value in node.outputs]
        copies.update(zip(node.outputs, made, strict=True))
        nodes.append(
            ir.Node(
                node.domain,
                node.op_type,
                [copies[value] if value is not None else None for value in node.inputs],
                list(node.attributes.values()),
                overload=node.overload,
                outputs=made,
                name=node.name,
            )
        )
    for value, name in zip(outputs, names, strict=True):
        copies[value].name = name
    graph = ir.Graph(
        [copies[value] for value in inputs],
        [copies[value] for value in outputs],
        nodes=nodes,
        initializers=[copies[value] for value in side.initializers],
        opset_imports={**model.opset_imports, DOMAIN: VERSION},
        name="region",
    )
    return ir.Model(graph, ir_version=model.ir_version)


def _copy(value: ir.Value, *, constant: bool = False) -> ir.Value:
    return ir.Value(name=value.name, shape=value.shape, type=value.type, const_value=value.const_value if constant else None)
