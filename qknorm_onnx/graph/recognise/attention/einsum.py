"""The two products of an attention as Einsum, with the axes of its operands in any order and under any letters."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from qknorm_onnx.graph.match.located import Dim, Layout, Located, Unreadable
from qknorm_onnx.graph.recognise.attention.products import (
    AXES_HINT,
    ScoreProduct,
    of_no_size,
    scores_of,
    values_of,
)
from qknorm_onnx.graph.walk.head_groups import head_axes
from qknorm_onnx.graph.walk.layout import dims_of


def read_einsum_scores(node: ir.Node, first: ir.Value, second: ir.Value) -> ScoreProduct | Unreadable:
    """Einsum to (B, H, S, T), or with two axes of heads to (B, K, G, S, T): the letters say which operand is which."""
    terms = _terms(node)
    unread = Unreadable("its scores are an Einsum that is no product of queries and keys per head", node, AXES_HINT)
    if terms is None:
        return unread
    a, b, out = terms
    summed = set(a) & set(b) - set(out)
    if len(out) not in (4, 5) or len(summed) != 1:
        return unread
    lead, row, column = out[:-2], out[-2], out[-1]
    if row in b and column in a:
        (a, first), (b, second) = (b, second), (a, first)
    value = summed.pop()
    if set(a) != {*lead, row, value} or not {lead[0], column, value} <= set(b) <= {*lead, column, value}:
        return unread
    sizes, key_sizes = _sizes(first, a), _sizes(second, b)
    if sizes is None or key_sizes is None:
        return unread
    names = {lead[0]: "B", row: "S", value: "D"}
    heads = [size for letter in lead[1:] if isinstance(size := sizes[letter], int)]
    if len(heads) != len(lead) - 1 or not isinstance(sizes[value], int):
        return of_no_size(node)
    own = ("H",) if len(heads) == 1 else head_axes((heads[0], heads[1]), (key_sizes.get(lead[1]), key_sizes.get(lead[2])), second)
    names |= dict(zip(lead[1:], own, strict=True))
    known: dict[str, Dim] = {names[letter]: size for letter, size in sizes.items()}
    known["H"] = heads[0] if len(heads) == 1 else heads[0] * heads[1]
    query = Located(first, tuple(names[letter] for letter in a), known)
    layout = (*(names[letter] for letter in (*lead, row)), "T")
    return scores_of(node, query, second, _layout(b, {**names, column: "S"}), layout)


def read_einsum_values(
    node: ir.Node, probabilities: ir.Value, p_layout: Layout, scores: ScoreProduct
) -> tuple[Located, Located] | Unreadable:
    """The values that an Einsum weighs with `probabilities`, and its output."""
    unread = Unreadable("its values are weighed by an Einsum that is no product per head", node, AXES_HINT)
    terms = _terms(node)
    if terms is None:
        return unread
    a, b, out = terms
    value = node.inputs[1]
    if value is probabilities:
        a, b, value = b, a, node.inputs[0]
    if len(a) != len(p_layout) or value is None or dims_of(value) is None:
        return unread
    names = dict(zip(a, p_layout, strict=True))
    summed, own = set(a) & set(b) - set(out), set(b) - set(a)
    rows = {letter for letter, name in names.items() if "S" in name}
    if summed != {a[p_layout.index("T")]} or len(own) != 1 or set(out) != set(a) - summed | own or rows & set(b):
        return unread
    if not any("B" in names[letter] for letter in b if letter in names):
        return unread
    names |= {summed.pop(): "S", own.pop(): "D"}
    return values_of(node, value, _layout(b, names), _layout(out, names), scores)


def _layout(term: str, names: Mapping[str, str]) -> Layout:
    return tuple(names[letter] for letter in term)


def _sizes(value: ir.Value, term: str) -> dict[str, Dim] | None:
    dims = dims_of(value)
    return dict(zip(term, dims, strict=True)) if dims is not None and len(dims) == len(term) else None


def _terms(node: ir.Node) -> tuple[str, str, str] | None:
    """Both operands and the result of an explicit equation without repeated letters."""
    equation = node.attributes["equation"].as_string().replace(" ", "") if "equation" in node.attributes else ""
    left, arrow, out = equation.partition("->")
    operands = left.split(",")
    terms = (*operands, out)
    if not arrow or len(operands) != 2 or not all(term.isalpha() and len(set(term)) == len(term) for term in terms):
        return None
    return operands[0], operands[1], out
