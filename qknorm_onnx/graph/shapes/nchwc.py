"""Shapes behind convolutions whose channels onnxruntime's optimizer put into blocks (levels layout and all)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import onnx_ir as ir

from qknorm_onnx.graph.symbolic.dimensions import Dim, Dims, plain_dims
from qknorm_onnx.graph.walk.constants import attribute_int, input_of

NCHWC: Final = "com.microsoft.nchwc"
Shaped = tuple[ir.DataType | None, Dims | None]


def nchwc_results(node: ir.Node) -> list[Shaped] | None:
    """Type and dimensions of the output, by its logical shape (N, C, spatial sizes); None where the operator is not known."""
    rule = RULES.get(node.op_type)
    source = input_of(node, 0)
    if rule is None or source is None:
        return None
    dims = plain_dims(source.shape)
    return [(source.dtype, rule(node, dims) if dims is not None and len(dims) > 2 else None)]


def convolved(node: ir.Node, dims: Dims) -> Dims | None:
    """A convolution with the weight (M, C / groups, kernel)."""
    weight = input_of(node, 1)
    weight_dims = plain_dims(weight.shape) if weight is not None else None
    if weight_dims is None or len(weight_dims) != len(dims):
        return None
    return [dims[0], weight_dims[0], *_windows(node, dims[2:], weight_dims[2:])]


def _pooled(node: ir.Node, dims: Dims) -> Dims | None:
    kernel: Dims = list(node.attributes.get_ints("kernel_shape", []))
    return [*dims[:2], *_windows(node, dims[2:], kernel)] if len(kernel) == len(dims) - 2 else None


def _pooled_whole(_node: ir.Node, dims: Dims) -> Dims:
    return [*dims[:2], *(1 for _ in dims[2:])]


def _from_blocks(node: ir.Node, dims: Dims) -> Dims:
    channels = attribute_int(node, "channels", 0) or dims[1]
    return [dims[0], *dims[2:], channels] if attribute_int(node, "channels_last", 0) else [dims[0], channels, *dims[2:]]


def _to_blocks(node: ir.Node, dims: Dims) -> Dims:
    return [dims[0], dims[-1], *dims[1:-1]] if attribute_int(node, "channels_last", 0) else dims


def _enlarged(node: ir.Node, dims: Dims) -> Dims | None:
    scales = node.attributes.get_ints("scales", [])
    if len(scales) != len(dims):
        return None
    return [dim * scale if isinstance(dim, int) else dim if scale == 1 else None for dim, scale in zip(dims, scales, strict=True)]


def _windows(node: ir.Node, sizes: Dims, kernel: Dims) -> Dims:
    """How often a window fits along each spatial axis; None where that depends on a size that is open."""
    axes = len(sizes)
    strides = node.attributes.get_ints("strides", [1] * axes)
    dilations = node.attributes.get_ints("dilations", [1] * axes)
    pads = node.attributes.get_ints("pads", [0] * (2 * axes))
    mode = node.attributes.get_string("auto_pad", "NOTSET")
    if attribute_int(node, "ceil_mode", 0) or not len(strides) == len(dilations) == len(pads) // 2 == axes:
        return [None] * axes
    found: list[Dim] = []
    for axis, (size, width) in enumerate(zip(sizes, kernel, strict=True)):
        if not isinstance(size, int) or not isinstance(width, int) or strides[axis] < 1:
            found.append(None)
        elif mode.startswith("SAME"):
            found.append(-(-size // strides[axis]))
        else:
            padded = size + (pads[axis] + pads[axis + axes] if mode == "NOTSET" else 0)
            found.append((padded - (width - 1) * dilations[axis] - 1) // strides[axis] + 1)
    return found


RULES: Final[dict[str, Callable[[ir.Node, Dims], Dims | None]]] = {
    "Conv": convolved,
    **dict.fromkeys(("MaxPool", "AveragePool"), _pooled),
    **dict.fromkeys(("GlobalMaxPool", "GlobalAveragePool"), _pooled_whole),
    "ReorderInput": _to_blocks,
    "ReorderOutput": _from_blocks,
    "Upsample": _enlarged,
}
