"""The two products of an attention: queries with keys, probabilities with values.

MatMul of (B, H, S, D); of (B*H, S, D), where the heads were folded into the batch; of (B, K, G, S, D), where keys (B, K, 1, T, D)
serve G query heads each; of (B, K, G*S, D), where these are rows of one matrix. Einsum is read beside this module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import onnx_ir as ir

from qknorm_onnx.graph.match.located import HEADS_SECOND, Dim, Layout, Located, Unreadable
from qknorm_onnx.graph.walk.constants import constant, input_of, producer, rank_of
from qknorm_onnx.graph.walk.head_groups import beside_queries, head_axes
from qknorm_onnx.graph.walk.layout import dims_of, is_sized, regroup
from qknorm_onnx.graph.walk.limits import FOLDED_HEAD_STEPS

PRODUCTS = ("MatMul", "Einsum")
FOLDED: Layout = ("BH", "S", "D")
SHAPES_HINT = "run shape inference, or export with shapes, so that the sizes of its operands are known"
CHANNELS_HINT = "if these are heads, export with a fixed number of heads of a fixed size; else it is not QK-Norm attention"
AXES_HINT = "give the products operands of four axes (batch, heads, positions, values), or fold the heads into the batch"


@dataclasses.dataclass(frozen=True)
class ScoreProduct:
    """q . k: the operands, the node that multiplies them, and the axes of its result: those of the queries, "T" for the keys."""

    node: ir.Node
    query: Located
    key: Located
    layout: Layout

    @property
    def sizes(self) -> Mapping[str, Dim]:
        """The size of each letter of the result."""
        return {**self.query.sizes, "T": self.key.sizes["S"]}


def is_product(node: ir.Node) -> bool:
    """Whether `node` multiplies two computed tensors."""
    if node.op_type not in PRODUCTS or node.domain not in ("", "ai.onnx") or len(node.inputs) != 2:
        return False
    return all(operand is not None and constant(operand) is None for operand in node.inputs)


def read_matrix_scores(node: ir.Node, query: ir.Value, key: ir.Value) -> ScoreProduct | Unreadable:
    """The queries and keys of a MatMul."""
    rank = rank_of(query)
    if rank != rank_of(key) or rank not in (3, 4, 5):
        return Unreadable("its operands do not have four axes (batch, heads, positions, values)", node, AXES_HINT)
    if rank == 3:
        return _folded_scores(node, query, key)
    q_dims, k_dims = dims_of(query) or (), dims_of(key) or ()
    head_size = q_dims[-1] if isinstance(q_dims[-1], int) else k_dims[-2]
    heads = [dim for dim in q_dims[1:-2] if isinstance(dim, int)]
    if not isinstance(head_size, int) or len(heads) != rank - 3:
        return of_no_size(node)
    sizes: dict[str, Dim] = {"B": q_dims[0], "S": q_dims[-2], "D": head_size}
    lead: Layout = ("B", "H")
    if rank == 4:
        rows = _rows_of_groups(query, heads[0], head_size)
        if rows is not None:
            return scores_of(node, rows, key, ("B", "K", "D", "S"), ("B", "K", "GS", "T"))
        sizes["H"] = heads[0]
    else:
        names = head_axes((heads[0], heads[1]), (k_dims[1], k_dims[2]), key)
        lead = ("B", *names)
        sizes |= {"H": heads[0] * heads[1], **{name: size for name, size in zip(names, heads, strict=True) if name in ("K", "G")}}
    return scores_of(node, Located(query, (*lead, "S", "D"), sizes), key, (*lead, "D", "S"), (*lead, "S", "T"))


def scores_of(node: ir.Node, query: Located, key: ir.Value, key_layout: Layout, layout: Layout) -> ScoreProduct | Unreadable:
    """The product of `query` with `key`, whose axes `key_layout` names; `layout` is that of the result."""
    located = beside_queries(key, key_layout, query.sizes)
    if located is None:
        reason = "its keys are the same for all of its key heads, but not for the query heads of each"
        return Unreadable(reason, node, AXES_HINT)
    return ScoreProduct(node, query, located, layout)


def of_no_size(node: ir.Node) -> Unreadable:
    """A refusal for operands whose heads have no fixed size."""
    if not all(operand is not None and is_sized(operand) for operand in node.inputs):
        return Unreadable("the shapes of its operands are unknown", node, SHAPES_HINT)
    reason = "the axis of its dot products has no fixed size, as in attention between channels"
    return Unreadable(reason, node, CHANNELS_HINT)


def _rows_of_groups(query: ir.Value, heads: int, head_size: int) -> Located | None:
    """The queries (B, H, S, D) or (B, K, G, S, D) that were made (B, K, G*S, D) for the product with the keys of K heads."""
    node = producer(query, "Reshape")
    source = node.inputs[0] if node is not None else None
    dims, after = dims_of(source) if source is not None else None, dims_of(query)
    if source is None or dims is None or after is None or len(dims) not in (4, 5) or dims[-1] != head_size:
        return None
    if len(dims) == 4:
        count = dims[1] // heads if isinstance(dims[1], int) and dims[1] % heads == 0 else 1
    else:
        count = dims[2] if isinstance(dims[2], int) and dims[1] == heads else 1
    if count == 1 or heads == 1:
        return None
    sizes: dict[str, Dim] = {"B": dims[0], "K": heads, "G": count, "H": heads * count, "S": dims[-2], "D": head_size}
    if regroup("BKGSD", after, sizes) != ("B", "K", "GS", "D"):
        return None
    return Located(source, HEADS_SECOND if len(dims) == 4 else ("B", "K", "G", "S", "D"), sizes)


def _folded_scores(node: ir.Node, query: ir.Value, key: ir.Value) -> ScoreProduct | Unreadable:
    """(B*H, S, D) x (B*H, D, T)."""
    q_dims, k_dims = dims_of(query) or (), dims_of(key) or ()
    head_size = q_dims[2] if isinstance(q_dims[2], int) else k_dims[1]
    if not isinstance(head_size, int):
        return of_no_size(node)
    edges = _before_folding(query, head_size)
    if edges is None:
        reason = "its operands have three axes, and no Reshape that says how many heads are in the first one"
        return Unreadable(reason, node, AXES_HINT)
    batch, heads = edges
    sizes: dict[str, Dim] = {"B": batch, "H": heads, "S": q_dims[1], "D": head_size}
    keys = Located(key, ("BH", "D", "S"), {**sizes, "S": k_dims[2]})
    return ScoreProduct(node, Located(query, FOLDED, sizes), keys, ("BH", "S", "T"))


def _before_folding(value: ir.Value, head_size: int) -> tuple[Dim, int] | None:
    """Batch and number of heads of a tensor (B*H, S, D), read off the Reshape that made it."""
    for _ in range(FOLDED_HEAD_STEPS):
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


def read_matrix_values(node: ir.Node, layout: Layout, scores: ScoreProduct) -> tuple[Located, Located] | Unreadable:
    """The values that a MatMul weighs with probabilities of `layout`, and its output."""
    value = input_of(node, 1)
    dims = dims_of(value) if value is not None else None
    if value is None or dims is None:
        return Unreadable("the shapes of its operands are unknown", node, SHAPES_HINT)
    if len(dims) != len(layout):
        return Unreadable("its operands do not have four axes (batch, heads, positions, values)", node, AXES_HINT)
    return values_of(node, value, (*layout[:-2], "S", "D"), (*layout[:-1], "D"), scores)


def values_of(
    node: ir.Node, value: ir.Value, value_layout: Layout, layout: Layout, scores: ScoreProduct
) -> tuple[Located, Located] | Unreadable:
    """Values whose axes `value_layout` names, and the output of `node` with those of `layout`."""
    located = beside_queries(value, value_layout, scores.query.sizes)
    if located is None or "S" not in located.layout:
        return Unreadable("its values have axes that are not those of its keys", node, AXES_HINT)
    return located, Located(node.outputs[0], layout, {**scores.query.sizes, "D": located.sizes["D"]})
