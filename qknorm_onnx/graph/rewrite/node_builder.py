"""New nodes that are not in a graph yet: a rewrite is built, proven, and only then inserted or dropped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.match.located import Array, Dim


class NodeBuilder:
    """Collects nodes and initializers; all names start with `prefix`, so that two rewrites never meet."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.nodes: list[ir.Node] = []
        self.initializers: list[ir.Value] = []
        self._count = 0

    def name(self, label: str) -> str:
        """A name that no other value of this rewrite has."""
        self._count += 1
        return f"{self.prefix}/{label}_{self._count}"

    def constant(self, array: Array, label: str) -> ir.Value:
        """An initializer."""
        name = self.name(label)
        tensor = ir.tensor(np.ascontiguousarray(array).reshape(array.shape), name=name)  # NumPy makes a scalar a vector here
        value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.initializers.append(value)
        return value

    def in_graph(self, value: ir.Value) -> ir.Value:
        """`value`, or where a recogniser put it together and no graph has it, an initializer with its contents."""
        if value.const_value is None or value.producer() is not None or value.graph is not None:
            return value
        return self.constant(np.asarray(value.const_value.numpy()), "weight")

    def integers(self, items: Sequence[int], label: str) -> ir.Value:
        """An initializer of int64."""
        return self.constant(np.asarray(items, dtype=np.int64), label)

    def apply(
        self,
        op_type: str,
        inputs: Sequence[ir.Value],
        *,
        dims: Sequence[Dim],
        attributes: Sequence[ir.Attr] = (),
        dtype: ir.DataType | None = None,
    ) -> ir.Value:
        """A standard node with one output of size `dims`, of the first input's type unless `dtype` is given."""
        kind = dtype if dtype is not None else inputs[0].dtype
        output = ir.Value(
            name=self.name(op_type.lower()), shape=ir.Shape(list(dims)), type=ir.TensorType(kind) if kind is not None else None
        )
        node = ir.Node("", op_type, list(inputs), list(attributes), outputs=[output], name=self.name(f"node_{op_type.lower()}"))
        self.nodes.append(node)
        return output

    def add(self, node: ir.Node) -> ir.Node:
        """A node that was made elsewhere."""
        self.nodes.append(node)
        return node

    def transpose(self, value: ir.Value, perm: Sequence[int]) -> ir.Value:
        """`value` with its axes in another order; itself where the order is the same."""
        if list(perm) == list(range(len(perm))):
            return value
        assert value.shape is not None
        dims = [value.shape[axis] for axis in perm]
        return self.apply("Transpose", [value], dims=dims, attributes=[ir.AttrInt64s("perm", list(perm))])

    def reshape(self, value: ir.Value, target: Sequence[int], dims: Sequence[Dim]) -> ir.Value:
        """Reshape to `target`, in which 0 keeps an axis and -1 takes what is left; `dims` are the sizes that come out."""
        return self.apply("Reshape", [value, self.integers(target, "shape")], dims=dims)

    def insert_before(self, anchor: ir.Node) -> None:
        """Put everything into the graph of `anchor`, in front of it."""
        graph = anchor.graph
        assert isinstance(graph, ir.Graph), "rewrites happen in graphs; functions are inlined before"
        for value in self.initializers:
            graph.register_initializer(value)
        graph.insert_before(anchor, self.nodes)

    def drop(self) -> None:
        """Let go of all inputs, so that the graph is as it was before."""
        for node in self.nodes:
            for index in range(len(node.inputs)):
                node.replace_input_with(index, None)


def replace_value(old: ir.Value, new: ir.Value) -> None:
    """Let everybody who read `old` read `new`; a graph output keeps its name."""
    name = old.name
    is_output = old.is_graph_output()
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    if is_output:
        old.name = f"{name}/replaced"
        new.name = name
