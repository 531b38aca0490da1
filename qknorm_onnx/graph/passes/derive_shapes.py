"""Derives the shapes of all values from those of the graph's inputs, through the arithmetic that graphs do with sizes."""

from __future__ import annotations

import onnx_ir as ir

from qknorm_onnx.graph.passes.fold_sizes import fold_sizes
from qknorm_onnx.graph.shapes.control_flow import BODIES, Loosened, body_results, enter_body, loosen_all, loosened
from qknorm_onnx.graph.shapes.operator_results import node_results
from qknorm_onnx.graph.symbolic.dimensions import Dim, dim_of_form, form_of_dim, is_expression, names_in, plain_dims
from qknorm_onnx.graph.symbolic.expression import IndexReader, has_rule, result_type
from qknorm_onnx.graph.symbolic.terms import Dimension, Extents, Linear, form_of

# How ONNX's shape inference calls dimensions that it cannot tell.
INVENTED_NAMES = "unk__"
MOST_ROUNDS = 4


class DeriveShapesPass(ir.passes.InPlacePass):
    """Gives every value the type and the shape that follow from the inputs of the model.

    A size is a number, a name of the model's inputs, or an expression of such names: `batch*sequence`, `past + sequence`,
    `height//4`. What a file says about values in between is a hint: a name that no input has (the TorchScript exporter makes
    up one for every axis) gives way to what follows from the inputs, and so does a type that contradicts an operator.

    Integers that are the same for all inputs, such as half of a fixed head size, become constants.

    After a call, `settled` says whether another one would find no more in the graph as it then is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.settled = False

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run on `model` in place."""
        derivation = _Derivation(model)
        derivation.derive(model.graph)
        folded = fold_sizes(model.graph, derivation.reader)
        self.settled = derivation.in_one_walk and not folded
        return ir.passes.PassResult(model, derivation.changed or folded)


class _Derivation:
    def __init__(self, model: ir.Model) -> None:
        self.changed = False
        # Each node was derived once, from what stays known of its inputs: no loops, and no type that was stated otherwise.
        self.in_one_walk = True
        self._loosened: Loosened = {}
        self._sizes: dict[str | None, ir.SymbolicDim] = {}
        self._opsets = dict(model.opset_imports)
        self.reader = IndexReader(largest_table=LARGEST_TABLE, largest_weight=LARGEST_WEIGHT)
        names = _Names()
        for value in model.graph.inputs:
            self._set(value, names.of_input(value))
        for value in (value for node in model.graph.all_nodes() for value in node.outputs):
            self._set(value, names.of_hint(value))
        inputs = [dim for value in model.graph.inputs for dim in value.shape or ()]
        forms = [form for dim in inputs if (form := form_of_dim(dim)) is not None]
        self._own_names = {name for form in forms for name in names_in(form)}

    def derive(self, graph: ir.Graph) -> None:
        """Derive all values of `graph`, whose inputs and surroundings are done."""
        for value in graph.initializers.values():
            _describe(value)
        for node in graph:
            if node.op_type in BODIES and node.domain == "":
                self._derive_bodies(node)
            else:
                self._derive_node(node)

    def _derive_bodies(self, node: ir.Node) -> None:
        bodies = [attribute.as_graph() for attribute in node.attributes.values() if attribute.type == ir.AttributeType.GRAPH]
        for body in bodies:
            self.in_one_walk = self.in_one_walk and node.op_type == "If"
            self._derive_body(node, body)
        for value, (dtype, dims) in zip(node.outputs, body_results(node, bodies), strict=False):
            self._settle(value, dtype, None if dims is None else [form_of_dim(dim) for dim in dims])

    def _derive_body(self, node: ir.Node, body: ir.Graph) -> None:
        """Derive a body until what is carried through a loop has the same sizes behind it as before it."""
        enter_body(node, body, self._loosened)
        if node.op_type == "If":
            self.derive(body)
            return
        stated = [(value, value.shape) for value in _values_inside(body)]
        for turn in range(MOST_ROUNDS + 1):
            self.derive(body)
            found = loosened(node, body)
            if not found:
                return
            self._loosened |= found if turn + 1 < MOST_ROUNDS else loosen_all(node, body)
            for value, shape in stated:  # what was derived from the sizes that did not stay
                value.shape = shape
            self.reader.forget([*body.inputs, *(value for value, _ in stated)])

    def _derive_node(self, node: ir.Node) -> None:
        if node.op_type == "Constant" and node.domain == "":
            _describe(node.outputs[0])
            return
        results = None
        for place, value in enumerate(node.outputs):
            ruled = has_rule(node, value)
            found = self.reader.read(value) if ruled else None
            sizes = [self._following(extent) for extent in found.extents] if found is not None else None
            dtype = result_type(node) if ruled else None
            if sizes is None or None in sizes or dtype is None:
                results = node_results(node, self._opsets, self.reader) if results is None else results
                kind, dims = results[place] if place < len(results) else (None, None)
                dtype = kind or dtype
                sizes = _together(sizes, None if dims is None else [form_of_dim(dim) for dim in dims])
            self._settle(value, dtype, sizes)

    def _following(self, extent: Linear) -> Linear | None:
        """A size that follows from the inputs; None for one of a single tensor, and for a name that only the file says."""
        return extent if dim_of_form(extent) is not None and set(names_in(extent)) <= self._own_names else None

    def _settle(self, value: ir.Value, dtype: ir.DataType | None, sizes: list[Linear | None] | None) -> None:
        if dtype is not None and dtype != value.dtype:
            self.in_one_walk = self.in_one_walk and value.dtype is None
            value.type, self.changed = ir.TensorType(dtype), True
        declared = plain_dims(value.shape)
        if sizes is None:
            return
        if declared is None or len(declared) != len(sizes):
            declared = [None] * len(sizes)
        dims = [self._dim(size, said) for size, said in zip(sizes, declared, strict=True)]
        self._set(value, dims)
        self.reader.settle(value, self._extents(value, dims))

    def _dim(self, size: Linear | None, declared: Dim) -> Dim:
        """The better of a size that was derived and one that the file declares."""
        if size is not None and size.number is not None and size.number >= 0:
            return size.number
        if isinstance(declared, int):
            return declared
        said = form_of_dim(declared)
        if said is not None and set(names_in(said)) <= self._own_names:
            return declared
        derived = dim_of_form(size) if size is not None else None
        if derived is not None:
            return derived
        return declared

    def _extents(self, value: ir.Value, dims: list[Dim]) -> Extents:
        known = self.reader.known(value)
        extents = []
        for axis, dim in enumerate(dims):
            form = form_of_dim(dim)
            if form is None and known is not None and known.rank == len(dims):
                form = known.extents[axis]
            extents.append(form if form is not None else form_of(Dimension(f"{value.name}.shape[{axis}]", value, axis)))
        return tuple(extents)

    def _set(self, value: ir.Value, dims: list[Dim] | None) -> None:
        if dims is not None and dims != plain_dims(value.shape):
            value.shape, self.changed = ir.Shape(map(self._shared, dims)), True

    def _shared(self, dim: Dim) -> int | ir.SymbolicDim:
        """One object for each name: files name the same few sizes at every value."""
        return dim if isinstance(dim, int) else self._sizes.setdefault(dim, ir.SymbolicDim(dim))


class _Names:
    """Names of sizes that can be reckoned with. A text that is no expression of names is given another name."""

    def __init__(self) -> None:
        self._others: dict[str, str] = {}

    def of_input(self, value: ir.Value) -> list[Dim] | None:
        """The sizes of an input. One that has no name is named after it: it is unknown, but it is one size."""
        dims = plain_dims(value.shape)
        return dims and [
            self._other(f"axis {axis} of {value.name}") if dim is None else dim for axis, dim in enumerate(map(self._of, dims))
        ]

    def of_hint(self, value: ir.Value) -> list[Dim] | None:
        """The sizes that the file declares for a value in between, without names that say nothing."""
        dims = plain_dims(value.shape)
        return dims and [None if isinstance(dim, str) and INVENTED_NAMES in dim else self._of(dim) for dim in dims]

    def _of(self, dim: Dim) -> Dim:
        if not isinstance(dim, str) or is_expression(dim):
            return dim
        if not dim.strip():
            return None
        return self._other(dim)

    def _other(self, text: str) -> str:
        return self._others.setdefault(text, f"unnamed_size_{len(self._others)}")


def _values_inside(body: ir.Graph) -> list[ir.Value]:
    """What the nodes of a body make, those of the bodies in it included, and what goes into these."""
    made = [value for node in body.all_nodes() for value in node.outputs]
    return made + [value for inner in body.subgraphs() for value in inner.inputs]


LARGEST_TABLE = 1 << 12
# Sizes are computed with floats only as factors, one for each axis.
LARGEST_WEIGHT = 8


def _describe(value: ir.Value) -> None:
    """Type and shape of a constant are those of its tensor."""
    tensor = value.const_value or ir.convenience.get_const_tensor(value)
    if tensor is not None:
        value.shape, value.type = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)


def _together(first: list[Linear | None] | None, second: list[Linear | None] | None) -> list[Linear | None] | None:
    """Two findings about one shape: a number is better than a name, and a name better than nothing."""
    if first is None or second is None or len(first) != len(second):
        return first if first is not None else second
    return [
        other if size is None or (other is not None and other.number is not None) else size
        for size, other in zip(first, second, strict=True)
    ]
