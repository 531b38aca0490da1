"""Reads values of a graph as functions of their index: a small abstract interpreter over the ops that masks are made of.

A value that no rule understands becomes a leaf: its elements are `Read` terms, which are equal only where the same tensor is read
at the same index.  So a wrong conclusion is impossible from an unknown op; the worst is that nothing is concluded.
"""

from __future__ import annotations

import ast

import onnx_ir as ir

from qknorm_onnx.graph.recognise.index_arithmetic import ARITHMETIC
from qknorm_onnx.graph.recognise.index_gather import GATHERS
from qknorm_onnx.graph.recognise.index_layout import LAYOUTS
from qknorm_onnx.graph.recognise.index_sizes import SIZES
from qknorm_onnx.graph.recognise.index_tensor import LARGEST_TABLE, IndexTensor, constant_tensor, stack, tensor
from qknorm_onnx.graph.recognise.index_terms import Dimension, Element, Extents, Flag, Linear, Read, form_of, index

RULES = {**LAYOUTS, **GATHERS, **ARITHMETIC, **SIZES}
_INTEGERS = {
    getattr(ir.DataType, name) for name in ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "BOOL")
}


class IndexReader:
    """Interprets the values of one graph and remembers each: a value is interpreted once, however many masks share it."""

    def __init__(self) -> None:
        self._known: dict[ir.Value, IndexTensor | None] = {}

    def read(self, value: ir.Value) -> IndexTensor | None:
        """`value` as a function of its index; None where not even its rank is known."""
        pending = [value]
        while pending:
            current = pending[-1]
            missing = [source for source in self._sources(current) if source not in self._known]
            if current in self._known or not missing:
                pending.pop()
                if current not in self._known:
                    self._known[current] = self._interpret(current)
            else:
                pending.extend(missing)
        return self._known[value]

    def extents(self, value: ir.Value) -> Extents | None:
        """The sizes of `value` as forms in the graph's dimensions; None where its rank is unknown."""
        declared = declared_extents(value)
        if declared is not None and not _has_unknown(declared):
            return declared
        known = self.read(value)
        return known.extents if known is not None else declared

    def _sources(self, value: ir.Value) -> list[ir.Value]:
        """The values that must be interpreted before `value`."""
        node = value.producer()
        if node is None or value in self._known or constant_of(value) is not None or not _has_rule(node, value):
            return []
        if node.op_type in SIZES or node.op_type == "Shape":
            measured = value if node.op_type in SIZES else node.inputs[0]
            declared = declared_extents(measured) if measured is not None else None
            if declared is not None and not _has_unknown(declared):
                return []
        return [source for source in node.inputs if source is not None]

    def _interpret(self, value: ir.Value) -> IndexTensor | None:
        array = constant_of(value)
        if array is not None:
            found = constant_tensor(array.numpy(), array.dtype) if array.size <= LARGEST_TABLE else None
            return found or _leaf(value, tuple(map(Linear, array.shape.numpy())))
        node = value.producer()
        if node is None or not _has_rule(node, value):
            return _leaf(value, None)
        if node.op_type == "Shape":
            return self._shape(node) or _leaf(value, None)
        sources = [self._known.get(source) if source is not None else None for source in node.inputs]
        found_or_extents = RULES[node.op_type](node, sources)
        if isinstance(found_or_extents, IndexTensor):
            return found_or_extents
        return _leaf(value, found_or_extents)

    def _shape(self, node: ir.Node) -> IndexTensor | None:
        extents = self.extents(node.inputs[0]) if node.inputs[0] is not None else None
        if extents is None:
            return None
        start = node.attributes.get_int("start", 0)
        end = node.attributes.get_int("end", len(extents))
        return stack((), extents[start:end], ir.DataType.INT64)


def constant_of(value: ir.Value) -> ir.TensorProtocol | None:
    """The tensor that `value` always is; an initializer that is also a graph input can be overridden and is none."""
    if value.is_graph_input():
        return None
    if value.const_value is not None:
        return value.const_value
    node = value.producer()
    if node is None or node.op_type != "Constant" or node.domain != "" or any(a.is_ref() for a in node.attributes.values()):
        return None
    return ir.convenience.get_const_tensor(value) if "sparse_value" not in node.attributes else None


def declared_extents(value: ir.Value) -> Extents | None:
    """The sizes that the graph declares; a dimension without a name is a `Dimension` of its own."""
    if value.shape is None:
        return None
    return tuple(_declared(value, axis, dim) for axis, dim in enumerate(value.shape.dims))


def _declared(value: ir.Value, axis: int, dim: int | ir.SymbolicDim) -> Linear:
    if isinstance(dim, int):
        return Linear(dim)
    if dim.value is None:
        return form_of(Dimension(f"{value.name}.shape[{axis}]", value, axis))
    text = str(dim.value)
    return parsed_dimension(text) or form_of(Dimension(text))


def parsed_dimension(text: str) -> Linear | None:
    """A dimension's name as a form: exporters write sums such as `s58 + s70`; None for anything but sums and multiples."""
    try:
        return _parsed(ast.parse(text, mode="eval").body)
    except SyntaxError:
        return None


def _parsed(tree: ast.expr) -> Linear | None:
    if isinstance(tree, ast.Name):
        return form_of(Dimension(tree.id))
    if isinstance(tree, ast.Constant) and type(tree.value) is int:
        return Linear(tree.value)
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        operand = _parsed(tree.operand)
        return -operand if operand is not None else None
    if not isinstance(tree, ast.BinOp):
        return None
    left, right = _parsed(tree.left), _parsed(tree.right)
    if left is None or right is None:
        return None
    if isinstance(tree.op, ast.Add):
        return left + right
    if isinstance(tree.op, ast.Sub):
        return left - right
    if isinstance(tree.op, ast.Mult) and left.number is not None:
        return right.times(left.number)
    return left.times(right.number) if isinstance(tree.op, ast.Mult) and right.number is not None else None


def _has_rule(node: ir.Node, value: ir.Value) -> bool:
    return node.domain in ("", "ai.onnx") and value is node.outputs[0] and (node.op_type in RULES or node.op_type == "Shape")


def _has_unknown(extents: Extents) -> bool:
    return any(isinstance(atom, Dimension) and atom.owner is not None for extent in extents for atom, _ in extent.terms)


def _leaf(value: ir.Value, extents: Extents | None) -> IndexTensor | None:
    """The tensor nobody can look into, of sizes `extents` or else those declared."""
    extents = declared_extents(value) if extents is None else extents
    if extents is None:
        return None
    read = Read(value, tuple(index(axis) for axis in range(len(extents))), value.dtype in _INTEGERS)
    element: Element = Flag(read) if value.dtype == ir.DataType.BOOL else form_of(read)
    return tensor(extents, element, value.dtype)
