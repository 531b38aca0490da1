"""Opens writes at constant places (`out[..., 0::2] = a`, `x[:, 7:] = b`), so that recognisers see parts that are joined."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir.passes import common

from qknorm_onnx.graph.match.located import Dim
from qknorm_onnx.graph.rewrite.node_builder import NodeBuilder, replace_value
from qknorm_onnx.graph.walk.constants import constant

END = (1 << 63) - 1
# (piece, index in it) of each place along the written axis
Owners = tuple[tuple[int, int], ...]


class OpenWritesPass(ir.passes.InPlacePass):
    """A chain of ScatterND with constant indices along one axis becomes a Concat of its parts, in their order.

    The tensor that is written into must be computed, or be overwritten altogether: what the caller gives may be a cache.
    Transposes around the writes become one behind them. Shapes must have been derived.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run on `model` in place."""
        graphs = (model.graph, *model.graph.subgraphs())
        opened = [_open(node) for graph in graphs for node in reversed(list(graph)) if _is_last_write(node)]
        if any(opened):
            common.RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, any(opened))


@dataclasses.dataclass(frozen=True)
class Piece:
    """A tensor, and the order of its axes in which it is written."""

    value: ir.Value
    perm: tuple[int, ...]


def _is_write(node: ir.Node | None) -> bool:
    if node is None or (node.domain, node.op_type) != ("", "ScatterND") or len(node.inputs) != 3 or node.graph is None:
        return False
    reduction = node.attributes["reduction"].as_string() if "reduction" in node.attributes else "none"
    indices = constant(node.inputs[1]) if node.inputs[1] is not None else None
    return reduction == "none" and indices is not None and indices.ndim == 2 and indices.shape[1] == 1


def _is_last_write(node: ir.Node) -> bool:
    return _is_write(node) and not any(
        _is_write(user) and user.inputs[0] is node.outputs[0] for user, _ in node.outputs[0].uses()
    )


def _open(last: ir.Node) -> bool:
    end = _behind(last.outputs[0])
    chain = _chain(last)
    shape = last.outputs[0].shape
    values = [chain[0].inputs[0], *(node.inputs[2] for node in chain)]
    owners = _owners(chain, shape[0]) if shape is not None and isinstance(shape[0], int) else None
    if shape is None or owners is None or any(value is None for value in values):
        return False
    pieces = [_before_transpose(value, len(shape)) for value in values if value is not None]
    used = sorted({piece for piece, _ in owners})
    if used[0] == 0 and not _is_computed(pieces[0].value):
        return False
    orders = {tuple(pieces[index].perm[axis] for axis in end.perm or tuple(range(len(shape)))) for index in used}
    if len(orders) != 1:
        return False
    order = orders.pop()
    builder = NodeBuilder(f"{end.value.name}/joined")
    axis = pieces[used[0]].perm[0]
    joined = _joined(builder, {index: pieces[index].value for index in used}, owners, axis)
    if joined is None:
        return False
    builder_end = builder.transpose(joined, order)
    builder.insert_before(last)
    replace_value(end.value, builder_end)
    return True


def _chain(last: ir.Node) -> list[ir.Node]:
    """The writes into one tensor, first to last; between them it may be transposed and transposed back."""
    chain = [last]
    while (data := chain[0].inputs[0]) is not None and _is_write(before := _untransposed(data).producer()):
        assert before is not None
        chain.insert(0, before)
    return chain


def _untransposed(value: ir.Value) -> ir.Value:
    """The value of which `value` is transposed twice, to and fro; `value` itself where it is not."""
    outer = value.producer()
    inner = outer.inputs[0].producer() if outer is not None and outer.op_type == "Transpose" and outer.inputs[0] else None
    if outer is None or inner is None or inner.op_type != "Transpose" or inner.inputs[0] is None:
        return value
    perms = [tuple(node.attributes["perm"].as_ints()) if "perm" in node.attributes else () for node in (inner, outer)]
    composed = tuple(perms[0][axis] for axis in perms[1]) if all(perms) else ()
    return inner.inputs[0] if composed and composed == tuple(range(len(composed))) else value


def _behind(value: ir.Value) -> Piece:
    """The transposition of `value`, if that is all that is read of it, else itself; its `perm` is empty then."""
    users = [node for node, _ in value.uses()]
    if len(users) == 1 and not value.is_graph_output() and users[0].op_type == "Transpose" and "perm" in users[0].attributes:
        return Piece(users[0].outputs[0], tuple(users[0].attributes["perm"].as_ints()))
    return Piece(value, ())


def _before_transpose(value: ir.Value, rank: int) -> Piece:
    node = value.producer()
    if node is not None and node.op_type == "Transpose" and "perm" in node.attributes and node.inputs[0] is not None:
        return Piece(node.inputs[0], tuple(node.attributes["perm"].as_ints()))
    return Piece(value, tuple(range(rank)))


def _is_computed(value: ir.Value) -> bool:
    return value.producer() is not None and value.const_value is None and constant(value) is None


def _owners(chain: Sequence[ir.Node], size: int) -> Owners | None:
    """Which piece each place comes from in the end; piece 0 is the tensor that was written into."""
    owners = [(0, place) for place in range(size)]
    for piece, node in enumerate(chain, start=1):
        indices = constant(node.inputs[1])
        assert indices is not None, "checked by _is_write"
        places = [int(index) for index in indices[:, 0]]
        if len({place % size for place in places if -size <= place < size}) != len(places):
            return None
        for index, place in enumerate(places):
            owners[place] = (piece, index)
    return tuple(owners)


def _joined(builder: NodeBuilder, pieces: dict[int, ir.Value], owners: Owners, axis: int) -> ir.Value | None:
    """The pieces joined along `axis`: runs of them one behind the other, or value by value where they alternate."""
    if any(value.shape is None or not isinstance(value.shape[axis], int) for value in pieces.values()):
        return None
    runs = _runs(owners)
    if len(runs) <= len(pieces) + 1:
        return _concat(builder, [_run(builder, pieces[piece], axis, run) for piece, run in runs], axis)
    return _alternating(builder, pieces, owners, axis)


def _alternating(builder: NodeBuilder, pieces: dict[int, ir.Value], owners: Owners, axis: int) -> ir.Value | None:
    """Pieces of which places take one value each in turn: neighbours on a new axis, which is merged with the written one."""
    turn = [piece for piece, _ in owners[: len(pieces)]]
    if any(owner != (turn[place % len(turn)], place // len(turn)) for place, owner in enumerate(owners)):
        return None
    shape = pieces[turn[0]].shape
    behind = list(shape)[axis + 1 :] if shape is not None else []
    free = [dim for dim in behind if not isinstance(dim, int)]
    if len(set(turn)) != len(pieces) or len(free) > 1:
        return None
    axes = builder.integers([axis + 1], "axes")
    rows = [builder.apply("Unsqueeze", [pieces[piece], axes], dims=_with_axis(pieces[piece], axis + 1, 1)) for piece in turn]
    side_by_side = builder.apply(
        "Concat", rows, dims=_with_axis(pieces[turn[0]], axis + 1, len(turn)), attributes=[ir.AttrInt64("axis", axis + 1)]
    )
    target = [*[0] * axis, len(owners), *(dim if isinstance(dim, int) else -1 for dim in behind)]
    return builder.reshape(side_by_side, target, _with_size(pieces[turn[0]], axis, len(owners)))


def _runs(owners: Owners) -> list[tuple[int, range]]:
    """(piece, indices) of stretches that lie side by side in one piece."""
    runs: list[tuple[int, range]] = []
    for piece, index in owners:
        if runs and runs[-1][0] == piece and runs[-1][1].stop == index:
            runs[-1] = (piece, range(runs[-1][1].start, index + 1))
        else:
            runs.append((piece, range(index, index + 1)))
    return runs


def _run(builder: NodeBuilder, value: ir.Value, axis: int, run: range) -> ir.Value:
    size = _size(value, axis)
    if len(run) == size:
        return value
    bounds = [[run.start], [END if run.stop == size else run.stop], [axis]]
    given = [builder.integers(item, name) for item, name in zip(bounds, ("starts", "ends", "axes"), strict=True)]
    return builder.apply("Slice", [value, *given], dims=_with_size(value, axis, len(run)))


def _concat(builder: NodeBuilder, values: Sequence[ir.Value], axis: int) -> ir.Value:
    if len(values) == 1:
        return values[0]
    total = sum(_size(value, axis) for value in values)
    return builder.apply("Concat", list(values), dims=_with_size(values[0], axis, total), attributes=[ir.AttrInt64("axis", axis)])


def _with_axis(value: ir.Value, axis: int, size: int) -> list[Dim]:
    assert value.shape is not None
    return [*value.shape[:axis], size, *value.shape[axis:]]


def _with_size(value: ir.Value, axis: int, size: int) -> list[Dim]:
    assert value.shape is not None
    return [size if place == axis else dim for place, dim in enumerate(value.shape)]


def _size(value: ir.Value, axis: int) -> int:
    size = value.shape[axis] if value.shape is not None else None
    assert isinstance(size, int), "checked by _joined"
    return size
