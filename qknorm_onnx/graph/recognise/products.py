"""The two products of an attention: queries with keys, probabilities with values. One function per spelling.

MatMul of (B, H, S, D); MatMul of (B*H, S, D), where the heads were folded into the batch; Einsum with any order of axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import onnx_ir as ir

from qknorm_onnx.graph.match import HEADS_SECOND, Declined, Dim, Layout, Located
from qknorm_onnx.graph.recognise.constants import constant, input_of, rank_of
from qknorm_onnx.graph.recognise.layout import dims_of, is_sized, same_size

PRODUCTS = ("MatMul", "Einsum")
FOLDED: Layout = ("BH", "S", "D")
MAX_STEPS = 12
SHAPES_HINT = "run shape inference, or export with shapes, so that the sizes of its operands are known"
CHANNELS_HINT = "if these are heads, export with a fixed number of heads of a fixed size; else it is not QK-Norm attention"
AXES_HINT = "give the products operands of four axes (batch, heads, positions, values), or fold the heads into the batch"


@dataclasses.dataclass(frozen=True)
class ScoreProduct:
    """q . k: the operands, and the node that multiplies them."""

    node: ir.Node
    query: Located
    key: Located

    @property
    def folded(self) -> bool:
        """Whether batch and heads are one axis."""
        return self.query.layout == FOLDED


def is_product(node: ir.Node) -> bool:
    """Whether `node` multiplies two computed tensors."""
    if node.op_type not in PRODUCTS or node.domain not in ("", "ai.onnx") or len(node.inputs) != 2:
        return False
    return all(operand is not None and constant(operand) is None for operand in node.inputs)


def read_score_product(node: ir.Node) -> ScoreProduct | Declined:
    """The queries and keys of the product behind a softmax."""
    first, second = input_of(node, 0), input_of(node, 1)
    if first is None or second is None or dims_of(first) is None or dims_of(second) is None:
        return Declined("the shapes of its operands are unknown", node, SHAPES_HINT)
    if node.op_type == "Einsum":
        return _scores_of_einsum(node, first, second)
    if rank_of(first) == rank_of(second) == 3:
        return _folded_scores(node, first, second)
    q_dims, k_dims = dims_of(first) or (), dims_of(second) or ()
    if len(q_dims) != 4 or len(k_dims) != 4:
        return Declined("its operands do not have four axes (batch, heads, positions, values)", node, AXES_HINT)
    head_size = q_dims[3] if isinstance(q_dims[3], int) else k_dims[2]
    if not isinstance(head_size, int) or not isinstance(q_dims[1], int):
        return _of_no_size(node)
    sizes = dict(zip("BHSD", q_dims, strict=True)) | {"D": head_size}
    k_sizes = {"B": q_dims[0], "H": q_dims[1], "S": k_dims[3], "D": head_size}
    return ScoreProduct(node, Located(first, HEADS_SECOND, sizes), Located(second, ("B", "H", "D", "S"), k_sizes))


def _of_no_size(node: ir.Node) -> Declined:
    if not all(operand is not None and is_sized(operand) for operand in node.inputs):
        return Declined("the shapes of its operands are unknown", node, SHAPES_HINT)
    reason = "the axis of its dot products has no fixed size, as in attention between channels"
    return Declined(reason, node, CHANNELS_HINT)


def _folded_scores(node: ir.Node, query: ir.Value, key: ir.Value) -> ScoreProduct | Declined:
    """(B*H, S, D) x (B*H, D, T)."""
    q_dims, k_dims = dims_of(query) or (), dims_of(key) or ()
    head_size = q_dims[2] if isinstance(q_dims[2], int) else k_dims[1]
    if not isinstance(head_size, int):
        return _of_no_size(node)
    edges = _before_folding(query, head_size)
    if edges is None:
        reason = "its operands have three axes, and no Reshape that says how many heads are in the first one"
        return Declined(reason, node, AXES_HINT)
    batch, heads = edges
    sizes: dict[str, Dim] = {"B": batch, "H": heads, "S": q_dims[1], "D": head_size}
    return ScoreProduct(node, Located(query, FOLDED, sizes), Located(key, ("BH", "D", "S"), {**sizes, "S": k_dims[2]}))


def _before_folding(value: ir.Value, head_size: int) -> tuple[Dim, int] | None:
    """Batch and number of heads of a tensor (B*H, S, D), read off the Reshape that made it."""
    for _ in range(MAX_STEPS):
        node = value.producer()
        if node is None:
            return None
        sources = [operand for operand in node.inputs if operand is not None and (rank_of(operand) or 0) >= 3]
        if not sources or constant(sources[0]) is not None:
            return None
        dims = dims_of(sources[0]) or ()
        if node.op_type == "Reshape" and len(dims) == 4 and isinstance(dims[1], int) and dims[3] == head_size:
            return dims[0], dims[1]
        width = dims[-1]
        if (
            node.op_type == "Reshape"
            and len(dims) == 3
            and isinstance(width, int)
            and width > head_size
            and not width % head_size
        ):
            return dims[1], width // head_size  # (S, B, H*D) > (S, B*H, D)
        value = sources[0]
    return None


def _scores_of_einsum(node: ir.Node, first: ir.Value, second: ir.Value) -> ScoreProduct | Declined:
    """Einsum to (B, H, S, T): the letters say which operand is which, and what its axes are."""
    terms = _terms(node)
    unread = Declined("its scores are an Einsum that is no product of queries and keys per head", node, AXES_HINT)
    if terms is None:
        return unread
    a, b, out = terms
    summed = set(a) & set(b) - set(out)
    if len(out) != 4 or len(summed) != 1:
        return unread
    batch, heads, row, column = (out[axis] for axis in range(4))
    if row in b and column in a:
        (a, first), (b, second) = (b, second), (a, first)
    names = {batch: "B", heads: "H", row: "S", summed.pop(): "D"}
    k_names = {**{letter: name for letter, name in names.items() if name != "S"}, column: "S"}
    query, key = _located(first, a, names), _located(second, b, k_names)
    if query is None or key is None or query.static("H") is None or len(a) != 4 or batch not in b:
        return unread
    if query.static("D") is None:
        return _of_no_size(node)
    return ScoreProduct(node, query, key)


def read_value_product(node: ir.Node, probabilities: ir.Value, scores: ScoreProduct) -> tuple[Located, Located] | Declined:
    """The values that `node` weighs, and its output."""
    query = scores.query
    if node.op_type == "Einsum":
        found = _values_of_einsum(node, probabilities)
        unread = Declined("its values are weighed by an Einsum that is no product per head", node, AXES_HINT)
        return found if found is not None else unread
    value = input_of(node, 1)
    dims = dims_of(value) if value is not None else None
    layout = FOLDED if rank_of(probabilities) == 3 else HEADS_SECOND
    if value is None or dims is None:
        return Declined("the shapes of its operands are unknown", node, SHAPES_HINT)
    if len(dims) != len(layout) or (layout == FOLDED and not scores.folded):
        return Declined("its operands do not have four axes (batch, heads, positions, values)", node, AXES_HINT)
    sizes = {"B": query.sizes["B"], "H": query.sizes["H"], "S": dims[-2], "D": dims[-1]}
    return Located(value, layout, sizes), Located(node.outputs[0], layout, {**query.sizes, "D": dims[-1]})


def _values_of_einsum(node: ir.Node, probabilities: ir.Value) -> tuple[Located, Located] | None:
    terms = _terms(node)
    if terms is None:
        return None
    a, b, out = terms
    value = node.inputs[1]
    if node.inputs[1] is probabilities:
        a, b, value = b, a, node.inputs[0]
    summed, own = set(a) & set(b) - set(out), set(b) - set(a)
    if len(a) != 4 or summed != {a[3]} or len(own) != 1 or set(out) != (set(a[:3]) | own) or value is None or a[0] not in b:
        return None
    names = {a[0]: "B", a[1]: "H", a[2]: "S", own.pop(): "D"}
    v_names = {**{letter: name for letter, name in names.items() if name != "S"}, a[3]: "S"}
    located, result = _located(value, b, v_names), _located(node.outputs[0], out, names)
    return (located, result) if located is not None and result is not None else None


def _terms(node: ir.Node) -> tuple[str, str, str] | None:
    """Both operands and the result of an explicit equation without repeated letters."""
    equation = node.attributes["equation"].as_string().replace(" ", "") if "equation" in node.attributes else ""
    left, arrow, out = equation.partition("->")
    operands = left.split(",")
    terms = (*operands, out)
    if not arrow or len(operands) != 2 or not all(term.isalpha() and len(set(term)) == len(term) for term in terms):
        return None
    return operands[0], operands[1], out


def _located(value: ir.Value, term: str, names: Mapping[str, str]) -> Located | None:
    """`value` with the axes that `term` names; a head axis that it lacks has size 1."""
    dims = dims_of(value)
    if dims is None or len(dims) != len(term) or not set(term) <= set(names):
        return None
    layout = tuple(names[letter] for letter in term)
    sizes: dict[str, Dim] = {"H": 1, **dict(zip(layout, dims, strict=True))}
    return Located(value, layout, sizes)


def folds_only(node: ir.Node) -> bool:
    """Whether a Reshape of scores or probabilities only merges or splits batch and heads."""
    source = input_of(node, 0)
    before, after = (dims_of(value) if value is not None else None for value in (source, node.outputs[0]))
    if node.op_type != "Reshape" or before is None or after is None or {len(before), len(after)} - {3, 4}:
        return False
    return all(map(same_size, before[-2:], after[-2:]))
