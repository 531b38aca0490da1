"""Rules that know the sizes of a result and nothing of its elements: what dimensions of activations hang on."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from qknorm_onnx.graph.symbolic.layout import Outcome, Rule, argument
from qknorm_onnx.graph.symbolic.products import product_of
from qknorm_onnx.graph.symbolic.tensor import IndexTensor, broadcast_sizes, forms, tensor


def _like_first(_node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    return sources[0].extents if sources[0] is not None else None


def _matrix_product(_node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    left, right = sources
    if left is None or right is None or left.rank < 2 or right.rank < 2:
        return None
    return (*broadcast_sizes([left.extents[:-2], right.extents[:-2]]), left.extents[-2], right.extents[-1])


def _tile(_node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    source, repeats = sources[0], forms(argument(sources, 1))
    if source is None or repeats is None or len(repeats) != source.rank:
        return None
    return tuple(product_of(pair) for pair in zip(source.extents, repeats, strict=True))


def _number_of_elements(_node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    return tensor((), product_of(sources[0].extents), ir.DataType.INT64) if sources[0] is not None else None


_SAME_SIZE = (
    "Sqrt Reciprocal Exp Log Tanh Sigmoid Erf Softmax Clip Relu Gelu Sin Cos LayerNormalization RMSNormalization "
    "RotaryEmbedding ScatterND"
)
SIZES: dict[str, Rule] = {
    "MatMul": _matrix_product,
    "Tile": _tile,
    "Size": _number_of_elements,
    **dict.fromkeys(_SAME_SIZE.split(), _like_first),
}
