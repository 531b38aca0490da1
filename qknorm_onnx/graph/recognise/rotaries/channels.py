"""What a stretch of a graph does to the last axis of a tensor, value by value.

A rotary embedding has many spellings (halves or neighbours, cat, stack, chunk, slices, sums of products of complex
parts, fused operators), but one meaning: each output is x_i * cos + x_j * sin. So the graph between x and a candidate
output is evaluated on names instead of numbers: each channel is a list of terms sign * x[source] * table[column].
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.recognise.rotaries.factors import einsum, matrix, product, rotary_operator
from qknorm_onnx.graph.recognise.rotaries.terms import Channels, NotLinearError, Rule, Term, Visit, negated
from qknorm_onnx.graph.walk.constants import attribute_int, attribute_or_input, constant, input_of, integers
from qknorm_onnx.graph.walk.layout import dims_of, same_size
from qknorm_onnx.graph.walk.limits import CHANNEL_STEPS


class ChannelReader:
    """Evaluates values behind `x`, a tensor whose last axis is the one that is followed."""

    def __init__(self, x: ir.Value) -> None:
        dims = dims_of(x)
        if dims is None or not dims or not isinstance(dims[-1], int):
            raise NotLinearError("what it would rotate has no last axis of fixed size")
        self.lead_dims = dims[:-1]
        first = np.empty(dims[-1], dtype=object)
        first[:] = [(Term(1, index),) for index in range(dims[-1])]
        self._known: dict[ir.Value, Channels | None] = {x: first}

    def read(self, value: ir.Value | None, depth: int = CHANNEL_STEPS) -> Channels | None:
        """The channels of `value`; None if it does not depend on x. Raises NotLinearError."""
        if value is None:
            return None
        if value not in self._known:
            self._known[value] = self._evaluate(value, depth)
        return self._known[value]

    def _evaluate(self, value: ir.Value, depth: int) -> Channels | None:
        node = value.producer()
        if node is None or depth == 0:
            return None
        data = node.inputs if (node.domain, node.op_type) in OF_ALL_OPERANDS else node.inputs[:1]
        operands = [self.read(operand, depth - 1) for operand in data]
        if all(operand is None for operand in operands):
            return None
        rule = CHANNEL_RULES.get((node.domain, node.op_type))
        try:
            if rule is None:
                raise NotLinearError("an operator that no rotary embedding has")
            return rule(Visit(node, value, operands, self.lead_dims))
        except NotLinearError as error:
            error.node = error.node or node
            raise


def _same(visit: Visit) -> Channels:
    return visit.only


def _neg(visit: Visit) -> Channels:
    return negated(visit.only)


def _sum(visit: Visit) -> Channels:
    first, second = visit.operands
    if first is None or second is None or first.shape != second.shape:
        raise NotLinearError("it adds what is not computed from what it would rotate")
    if visit.node.op_type == "Sub":
        second = negated(second)
    out = np.empty(first.shape, dtype=object)
    for index in np.ndindex(first.shape):
        out[index] = first[index] + second[index]
    return out


def _concat(visit: Visit) -> Channels:
    parts = [operand for operand in visit.operands if operand is not None]
    if len(parts) != len(visit.operands):
        raise NotLinearError("it joins what is not computed from what it would rotate")
    return np.concatenate(parts, axis=visit.axis(visit.lead + parts[0].ndim))


def _slice(visit: Visit) -> Channels:
    data = visit.only
    starts, ends = integers(input_of(visit.node, 1)), integers(input_of(visit.node, 2))
    if starts is None or ends is None:
        raise NotLinearError("it cuts at places that are no constants")
    axes = integers(input_of(visit.node, 3)) or tuple(range(len(starts)))
    steps = integers(input_of(visit.node, 4)) or (1,) * len(starts)
    cut = [slice(None)] * data.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        place = axis % (visit.lead + data.ndim) - visit.lead
        if place < 0:
            if start == 0 and step == 1 and end >= 1 << 31:
                continue
            raise NotLinearError("it cuts along other axes than the last one")
        cut[place] = slice(start, end if abs(end) < 1 << 31 else None, step)
    return data[tuple(cut)]


def _split(visit: Visit) -> Channels:
    data = visit.only
    axis = visit.axis(visit.lead + data.ndim)
    sizes = attribute_or_input(visit.node, "split", 1)
    if sizes is None:
        share = -(-data.shape[axis] // len(visit.node.outputs))
        sizes = tuple(min(share, data.shape[axis] - share * index) for index in range(len(visit.node.outputs)))
    first = sum(sizes[: visit.value.index() or 0])
    return np.take(data, range(first, first + sizes[visit.value.index() or 0]), axis=axis)


def _gather(visit: Visit) -> Channels:
    data = visit.only
    indices = constant(input_of(visit.node, 1))
    if indices is None or not np.issubdtype(indices.dtype, np.integer):
        raise NotLinearError("it picks values by indices that are no constants")
    return np.take(data, indices.astype(np.int64), axis=visit.axis(visit.lead + data.ndim))


def _reshape(visit: Visit) -> Channels:
    data = visit.only
    dims = dims_of(visit.value)
    if dims is None or len(dims) < visit.lead + 1:
        raise NotLinearError("the shape that it is given is unknown")
    kept, cut = dims[: visit.lead], dims[visit.lead :]
    sizes = [dim for dim in cut if isinstance(dim, int)]
    if not all(map(same_size, kept, visit.lead_dims)) or len(sizes) < len(cut):
        raise NotLinearError("it merges the last axis with others")
    if np.prod(sizes) != data.size:
        raise NotLinearError("it changes the number of values")
    return data.reshape(sizes)


def _unsqueeze(visit: Visit) -> Channels:
    data = visit.only
    axes = attribute_or_input(visit.node, "axes", 1)
    if axes is None:
        raise NotLinearError("the axes that it adds are no constants")
    places = [axis % (visit.lead + data.ndim + len(axes)) - visit.lead for axis in axes]
    if min(places) < 0:
        raise NotLinearError("it adds axes before the last one")
    return np.expand_dims(data, places)


def _squeeze(visit: Visit) -> Channels:
    data = visit.only
    axes = attribute_or_input(visit.node, "axes", 1)
    places = [axis % (visit.lead + data.ndim) - visit.lead for axis in axes or ()]
    if not places or min(places) < 0:
        raise NotLinearError("it drops axes before the last one")
    return np.squeeze(data, tuple(places))


def _transpose(visit: Visit) -> Channels:
    data = visit.only
    perm = tuple(visit.node.attributes["perm"].as_ints()) if "perm" in visit.node.attributes else ()
    if perm[: visit.lead] != tuple(range(visit.lead)):
        raise NotLinearError("it moves other axes than the last one")
    return data.transpose([axis - visit.lead for axis in perm[visit.lead :]])


def _reduce_sum(visit: Visit) -> Channels:
    data = visit.only
    axes = attribute_or_input(visit.node, "axes", 1)
    places = [axis % (visit.lead + data.ndim) - visit.lead for axis in axes or ()]
    if len(places) != 1 or places[0] < 0:
        raise NotLinearError("it sums over more than one axis, or another than the last one")
    parts = np.moveaxis(data, places[0], 0)
    out = np.empty(parts.shape[1:], dtype=object)
    for index in np.ndindex(out.shape):
        column = (slice(None), *index)
        out[index] = tuple(term for terms in parts[column] for term in terms)
    return np.expand_dims(out, places[0]) if attribute_int(visit.node, "keepdims", 1) else out


# Any operand of these may be computed from x. A rule in the wrong table would not see the others, and leave them out.
OF_ALL_OPERANDS: dict[tuple[str, str], Rule] = {
    ("", "Add"): _sum,
    ("", "Sub"): _sum,
    ("", "Mul"): product,
    ("", "Concat"): _concat,
    ("", "MatMul"): matrix,
    ("", "Einsum"): einsum,
}
# Only the first is data; the others are shapes, indices and tables, which may well depend on x's shape.
OF_FIRST_OPERAND: dict[tuple[str, str], Rule] = {
    ("", "Identity"): _same,
    ("", "Cast"): _same,
    ("", "Neg"): _neg,
    ("", "Slice"): _slice,
    ("", "Split"): _split,
    ("", "Gather"): _gather,
    ("", "Reshape"): _reshape,
    ("", "Unsqueeze"): _unsqueeze,
    ("", "Squeeze"): _squeeze,
    ("", "Transpose"): _transpose,
    ("", "ReduceSum"): _reduce_sum,
    ("", "RotaryEmbedding"): rotary_operator,
}
CHANNEL_RULES = OF_ALL_OPERANDS | OF_FIRST_OPERAND
