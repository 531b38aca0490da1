"""Types and shapes of the results of ONNX Runtime's own operators, which ONNX's inference does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import onnx_ir as ir

from qknorm_onnx.graph.shapes.nchwc import NCHWC, convolved, nchwc_results
from qknorm_onnx.graph.symbolic.dimensions import Dim, Dims, dim_of_form, form_of_dim, plain_dims
from qknorm_onnx.graph.symbolic.tensor import broadcast_sizes
from qknorm_onnx.graph.symbolic.terms import Dimension, Linear, form_of
from qknorm_onnx.graph.walk.constants import attribute_int, input_of

Results = list[tuple[ir.DataType | None, Dims | None]]

CONTRIB: Final = "com.microsoft"


def contrib_results(node: ir.Node) -> Results | None:
    """Type and dimensions of each output of `node`; None where it is no operator that is known here."""
    if node.domain == NCHWC:
        return nchwc_results(node)
    rule = RULES.get(node.op_type) if node.domain == CONTRIB or node.op_type == "SimplifiedLayerNormalization" else None
    return rule(node) if rule is not None else None


def _dims(node: ir.Node, position: int) -> Dims | None:
    value = input_of(node, position)
    return plain_dims(value.shape) if value is not None else None


def _dtype(node: ir.Node, position: int) -> ir.DataType | None:
    value = input_of(node, position)
    return value.dtype if value is not None else None


def _like_first(node: ir.Node) -> Results:
    return [(_dtype(node, 0), _dims(node, 0))]


def _broadcast(node: ir.Node) -> Results:
    shapes = [_dims(node, 0), _dims(node, 1)]
    return [(_dtype(node, 0), _broadcast_dims(*shapes))]


def _broadcast_dims(first: Dims | None, second: Dims | None) -> Dims | None:
    if first is None or second is None:
        return None
    shapes = [tuple(_form(dim, place) for place, dim in enumerate(dims, -len(dims))) for dims in (first, second)]
    return [dim_of_form(size) if size is not None else None for size in broadcast_sizes(shapes)]


def _form(dim: Dim, place: int) -> Linear:
    found = form_of_dim(dim)
    return found if found is not None else form_of(Dimension("", ir.Value(name=f"unknown{place}")))


def _fused_product(node: ir.Node) -> Results:
    left, right = _dims(node, 0), _dims(node, 1)
    if left is None or right is None or len(left) < 2 or len(right) < 2:
        return [(_dtype(node, 0), None)]
    for dims, side in ((left, "A"), (right, "B")):
        if attribute_int(node, f"transBatch{side}", 0):  # the leading axes turn: (b, i, j) stands for (i, b, j)
            dims.insert(len(dims) - 2, dims.pop(0))
        if attribute_int(node, f"trans{side}", 0):
            dims[-2:] = dims[:-3:-1]
    leading = _broadcast_dims(left[:-2], right[:-2])
    return [(_dtype(node, 0), [*leading, left[-2], right[-1]] if leading is not None else None)]


def _product(dtype_from: int | None) -> Callable[[ir.Node], Results]:
    def rule(node: ir.Node) -> Results:
        dtype = ir.DataType.FLOAT if dtype_from is None else _dtype(node, dtype_from)
        return [(dtype, _fused_product(node)[0][1])]

    return rule


def _narrow_product(node: ir.Node) -> Results:
    dims = _dims(node, 0)
    return [(_dtype(node, 0), [*dims[:-1], attribute_int(node, "N", 0)] if dims else None)]


def _skip_norm(node: ir.Node) -> Results:
    own, dims = _dtype(node, 0), _dims(node, 0)
    statistic: Dims | None = [*dims[:-1], 1] if dims else None
    return [(own, dims), (ir.DataType.FLOAT, statistic), (ir.DataType.FLOAT, statistic), (own, dims)]


def _simplified_norm(node: ir.Node) -> Results:
    scale = input_of(node, 1)
    dims = _dims(node, 0)
    statistic: Dims | None = [*dims[:-1], 1] if dims else None
    return [(scale.dtype if scale is not None else _dtype(node, 0), dims), (ir.DataType.FLOAT, statistic)]


def _dequantized(node: ir.Node) -> Results:
    return [(_dtype(node, 1), _dims(node, 0))]


def _quantized(node: ir.Node) -> Results:
    return [(_dtype(node, 2) or ir.DataType.UINT8, _dims(node, 0))]


def _attention(node: ir.Node) -> Results:
    """MultiHeadAttention, GroupQueryAttention: (B, S, H*D), and caches (B, H, ?, D) like the past."""
    query, value, past = _dims(node, 0), _dims(node, 2), _dims(node, 3 if node.op_type == "GroupQueryAttention" else 6)
    heads = attribute_int(node, "num_heads", 0)
    width: Dim = None
    if query is not None and len(query) == 3:
        packed = value is None
        width = query[2] if not packed else None
        if node.op_type == "MultiHeadAttention" and value is not None:
            width = value[2] if len(value) == 3 else value[3] * heads if isinstance(value[3], int) else None
    output: Dims | None = [*query[:2], width] if query is not None and len(query) == 3 else None
    cache: Dims | None = [past[0], past[1], None, past[3]] if past is not None and len(past) == 4 else None
    return [(_dtype(node, 0), output), (_dtype(node, 0), cache), (_dtype(node, 0), cache)]


def _convolution(node: ir.Node) -> Results:
    dims = _dims(node, 0)
    return [(_dtype(node, 0), convolved(node, dims) if dims is not None and len(dims) > 2 else None)]


_SAME: Final = (
    "FastGelu Gelu QuickGelu BiasGelu BiasAdd BiasDropout RotaryEmbedding QLinearSoftmax QLinearSigmoid QLinearLeakyRelu Inverse"
)
RULES: Final[dict[str, Callable[[ir.Node], Results]]] = {
    **dict.fromkeys(_SAME.split(), _like_first),
    "MultiHeadAttention": _attention,
    "GroupQueryAttention": _attention,
    "FusedConv": _convolution,
    "FusedMatMul": _fused_product,
    "TransposeMatMul": _fused_product,
    "MatMulIntegerToFloat": _product(2),
    "DynamicQuantizeMatMul": _product(None),
    "MatMulNBits": _narrow_product,
    "MatMulBnb4": _narrow_product,
    "SkipLayerNormalization": _skip_norm,
    "SkipSimplifiedLayerNormalization": _skip_norm,
    "SimplifiedLayerNormalization": _simplified_norm,
    "DequantizeLinear": _dequantized,
    "QuantizeLinear": _quantized,
}
