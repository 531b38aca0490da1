"""Rules that know the sizes of a result and nothing of its elements: what dimensions of activations hang on."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from qknorm_onnx.graph.symbolic.layout import Outcome, Rule
from qknorm_onnx.graph.symbolic.tensor import IndexTensor, broadcast_extents


def _like_first(_node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    return sources[0].extents if sources[0] is not None else None


def _matrix_product(_node: ir.Node, sources: Sequence[IndexTensor | None]) -> Outcome:
    left, right = sources
    if left is None or right is None or left.rank < 2 or right.rank < 2:
        return None
    leading = broadcast_extents([left.extents[:-2], right.extents[:-2]])
    return (*leading, left.extents[-2], right.extents[-1]) if leading is not None else None


_SAME_SIZE = (
    "Sqrt Reciprocal Exp Log Tanh Sigmoid Erf Softmax Clip Relu Gelu Sin Cos LayerNormalization RMSNormalization "
    "RotaryEmbedding ScatterND"
)
SIZES: dict[str, Rule] = {"MatMul": _matrix_product, **dict.fromkeys(_SAME_SIZE.split(), _like_first)}
