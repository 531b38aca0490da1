"""Reads values of a graph as functions of their index: a small abstract interpreter over the ops that masks are made of.

A value that no rule understands becomes a leaf: its elements are `Read` terms, which are equal only where the same tensor is read
at the same index.  So a wrong conclusion is impossible from an unknown op; the worst is that nothing is concluded.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import onnx_ir as ir

from qknorm_onnx.graph.symbolic.arithmetic import (
    ARITHMETIC,
    LOGICAL,
    add,
    divide_integers,
    larger,
    multiply,
    remainder,
    smaller,
    subtract,
)
from qknorm_onnx.graph.symbolic.gather import GATHERS
from qknorm_onnx.graph.symbolic.layout import LAYOUTS, split
from qknorm_onnx.graph.symbolic.sizes import SIZES
from qknorm_onnx.graph.symbolic.tensor import LARGEST_TABLE, IndexTensor, constant_tensor, stack, tensor
from qknorm_onnx.graph.symbolic.term_size import MOST_PARTS_OF_A_SIZE, is_too_large
from qknorm_onnx.graph.symbolic.terms import (
    Apply,
    Dimension,
    Element,
    Extents,
    Flag,
    Linear,
    PartialExtents,
    Read,
    form_of,
    index,
)

RULES = {**LAYOUTS, **GATHERS, **ARITHMETIC, **SIZES}
_NAME = re.compile(r"[A-Za-z_][\w.]*(?:-[A-Za-z_][\w.]*)*")
_DIMENSION_RULES = {ast.Add: add, ast.Sub: subtract, ast.Mult: multiply, ast.FloorDiv: divide_integers, ast.Mod: remainder}
_DIMENSION_CALLS = {"Min": smaller, "Max": larger}
_INTEGERS = {
    getattr(ir.DataType, name) for name in ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "BOOL")
}


class IndexReader:
    """Interprets the values of one graph and remembers each: a value is interpreted once, however many masks share it.

    `nonempty`: dimensions that may be taken to be 1 at least. `largest_table`: constants of more values are not looked into,
    nor those of more than `largest_weight` values that are no integers.
    """

    def __init__(
        self,
        nonempty: frozenset[Dimension] = frozenset(),
        *,
        largest_table: int = LARGEST_TABLE,
        largest_weight: int = LARGEST_TABLE,
    ) -> None:
        self._nonempty = nonempty
        self._largest_table = largest_table
        self._largest_weight = largest_weight
        self._known: dict[ir.Value, IndexTensor | None] = {}
        self._sizes: dict[str, Linear] = {}  # one form for each name: files name the same few sizes at every value

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
        declared = self._declared_extents(value)
        if declared is not None and not _has_unknown(declared):
            return declared
        known = self.read(value)
        return known.extents if known is not None else declared

    def known(self, value: ir.Value) -> IndexTensor | None:
        """What was found for `value`, if it has been read."""
        return self._known.get(value)

    def settle(self, value: ir.Value, extents: Extents) -> None:
        """From now on `value` has the sizes `extents`, which it was found to have by other means."""
        known = self._known.get(value)
        if known is not None and known.extents != extents and known.rank == len(extents):
            self._known[value] = replace(known, extents=extents)

    def forget(self, values: Iterable[ir.Value]) -> None:
        """Interpret these values anew when they are asked for."""
        for value in values:
            self._known.pop(value, None)

    def _sources(self, value: ir.Value) -> list[ir.Value]:
        """The values that must be interpreted before `value`."""
        node = value.producer()
        if node is None or value in self._known or constant_of(value) is not None or not has_rule(node, value):
            return []
        if node.op_type in SIZES or node.op_type == "Shape":
            measured = value if node.op_type in SIZES else node.inputs[0]
            declared = self._declared_extents(measured) if measured is not None else None
            if declared is not None and not _has_unknown(declared):
                return []
        return [source for source in node.inputs if source is not None]

    def _interpret(self, value: ir.Value) -> IndexTensor | None:
        array = constant_of(value)
        if array is not None:
            largest = self._largest_table if array.dtype in _INTEGERS else self._largest_weight
            found = constant_tensor(array.numpy(), array.dtype) if array.size <= largest else None
            return found or self._leaf(value, tuple(map(Linear, array.shape.numpy())))
        node = value.producer()
        if node is None or not has_rule(node, value):
            return self._leaf(value, None)
        if node.op_type == "Shape":
            return self._shape(node) or self._leaf(value, None)
        sources = [self._known.get(source) if source is not None else None for source in node.inputs]
        found_or_extents = (
            split(node, sources, node.outputs.index(value)) if node.op_type == "Split" else RULES[node.op_type](node, sources)
        )
        if isinstance(found_or_extents, IndexTensor) and not _has_outgrown(found_or_extents):
            return self._with_declared_bounds(value, found_or_extents)
        sizes = found_or_extents.extents if isinstance(found_or_extents, IndexTensor) else found_or_extents
        return self._leaf(value, _followed(sizes), _result_type(node, sources))

    def _with_declared_bounds(self, value: ir.Value, found: IndexTensor) -> IndexTensor:
        """A slice of a table has size `min(table, size)`: where the graph declares a size, that says which of the two it is."""
        if not any(_is_clipped(extent) for extent in found.extents):
            return found
        declared = self._declared_extents(value)
        if declared is None or len(declared) != found.rank:
            return found
        pairs = zip(found.extents, declared, strict=True)
        extents = tuple(
            said if _is_clipped(extent) and not (_is_clipped(said) or _has_unknown((said,))) else extent for extent, said in pairs
        )
        return replace(found, extents=extents)

    def _shape(self, node: ir.Node) -> IndexTensor | None:
        extents = self.extents(node.inputs[0]) if node.inputs[0] is not None else None
        if extents is None:
            return None
        start = node.attributes.get_int("start", 0)
        end = node.attributes.get_int("end", len(extents))
        return stack((), extents[start:end], ir.DataType.INT64)

    def _leaf(self, value: ir.Value, found: PartialExtents | None, implied: ir.DataType | None = None) -> IndexTensor | None:
        """The tensor nobody can look into, of the sizes found or else those declared, and the type declared or else `implied`."""
        dtype = value.dtype or implied
        extents = self._declared_extents(value)
        if found is not None:
            same_rank = extents is not None and len(extents) == len(found)
            declared = extents if extents is not None and same_rank else self._unnamed(value, len(found))
            extents = tuple(said if size is None else size for size, said in zip(found, declared, strict=True))
        if extents is None:
            return None
        read = Read(value, tuple(index(axis) for axis in range(len(extents))), dtype in _INTEGERS)
        element: Element = Flag(read) if dtype == ir.DataType.BOOL else form_of(read)
        return tensor(extents, element, dtype)

    def _declared_extents(self, value: ir.Value) -> Extents | None:
        """The sizes that the graph declares; a dimension without a name is a `Dimension` of its own."""
        if value.shape is None:
            return None
        return tuple(
            Linear(dim) if isinstance(dim, int) else self._named(dim.value, value, axis)
            for axis, dim in enumerate(value.shape.dims)
        )

    def _unnamed(self, value: ir.Value, rank: int) -> Extents:
        return tuple(self._named(None, value, axis) for axis in range(rank))

    def _named(self, name: str | None, value: ir.Value, axis: int) -> Linear:
        if name is None:
            return self.dimension(f"{value.name}.shape[{axis}]", value, axis)
        text = str(name)
        if text not in self._sizes:
            self._sizes[text] = parsed_dimension(text, self.dimension) or self.dimension(text)
        return self._sizes[text]

    def dimension(self, name: str, owner: ir.Value | None = None, axis: int = 0) -> Linear:
        """A dimension as a form."""
        found = Dimension(name, owner, axis)
        return form_of(Dimension(name, owner, axis, least=1) if found in self._nonempty else found)


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


def parsed_dimension(text: str, named: Callable[[str], Linear]) -> Linear | None:
    """A dimension's name as a form, with `named` for the single names in it.

    Exporters write sums, multiples, quotients and bounds: `s58 + s70`, `(8*s14)//s41`, `Min(64, s69)`; None for anything else.
    A dot belongs to a name, and so does a dash between letters: `past.0.key_axis_2`, `batch-size`.
    """
    if text.isidentifier():
        return named(text)
    names: dict[str, str] = {}

    def placed(found: re.Match[str]) -> str:
        name = found.group()
        return name if name in _DIMENSION_CALLS else names.setdefault(name, f"name{len(names)}")

    names_only = _NAME.sub(placed, text)
    originals = {placeholder: name for name, placeholder in names.items()}
    try:
        # Names that the pattern does not take are names as they stand.
        return _parsed(
            ast.parse(names_only, mode="eval").body, lambda placeholder: named(originals.get(placeholder, placeholder))
        )
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # no expression, or one too deep for Python's parser
        return None


def _parsed(tree: ast.expr, named: Callable[[str], Linear]) -> Linear | None:
    if isinstance(tree, ast.Name) and tree.id not in _DIMENSION_CALLS:
        return named(tree.id)
    if isinstance(tree, ast.Constant) and type(tree.value) is int:
        return Linear(tree.value)
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        operand = _parsed(tree.operand, named)
        return -operand if operand is not None else None
    if isinstance(tree, ast.BinOp):
        operands, rule = [tree.left, tree.right], _DIMENSION_RULES.get(type(tree.op))
    elif isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and len(tree.args) == 2:
        operands, rule = tree.args, _DIMENSION_CALLS.get(tree.func.id)
    else:
        return None
    left, right = (_parsed(operand, named) for operand in operands)
    found = rule(left, right, ()) if left is not None and right is not None and rule is not None else None
    return found if isinstance(found, Linear) else None


def has_rule(node: ir.Node, value: ir.Value) -> bool:
    """Whether `value`, an output of `node`, is interpreted, and not a leaf."""
    if node.domain not in ("", "ai.onnx"):
        return False
    return node.op_type == "Split" or (value is node.outputs[0] and (node.op_type in RULES or node.op_type == "Shape"))


def result_type(node: ir.Node) -> ir.DataType | None:
    """The type that an op with a rule gives its result, by the types that the graph says its inputs have."""
    if node.op_type in LOGICAL:
        return ir.DataType.BOOL
    if node.op_type in ("Shape", "Size"):
        return ir.DataType.INT64
    if node.op_type == "Cast":
        return ir.DataType(node.attributes.get_int("to", 0))
    if node.op_type == "ConstantOfShape":
        fill = node.attributes.get_tensor("value")
        return fill.dtype if fill is not None else ir.DataType.FLOAT
    source = node.inputs[1 if node.op_type in ("Where", "CastLike", "RMSNormalization") else 0]
    return source.dtype if source is not None else None


def _result_type(node: ir.Node, sources: Sequence[IndexTensor | None]) -> ir.DataType | None:
    """The type that an op gives its result, where the graph does not declare it."""
    if node.op_type in LOGICAL:
        return ir.DataType.BOOL
    if node.op_type == "Cast":
        return ir.DataType(node.attributes.get_int("to", 0))
    source = sources[1] if node.op_type in ("Where", "CastLike") else sources[0]
    return source.dtype if source is not None and node.op_type != "ConstantOfShape" else None


def _followed(sizes: PartialExtents | None) -> PartialExtents | None:
    """The sizes, without those that have grown too large."""
    if sizes is None:
        return None
    return tuple(None if size is None or is_too_large(size, most=MOST_PARTS_OF_A_SIZE) else size for size in sizes)


def _has_outgrown(found: IndexTensor) -> bool:
    elements = found.components if found.element is None else (found.element,)
    return _followed(found.extents) != found.extents or is_too_large(*elements)


def _is_clipped(extent: Linear) -> bool:
    return any(isinstance(atom, Apply) and atom.function in ("minimum", "maximum") for atom, _ in extent.terms)


def _has_unknown(extents: Extents) -> bool:
    return any(isinstance(atom, Dimension) and atom.owner is not None for extent in extents for atom, _ in extent.terms)
