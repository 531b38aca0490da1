"""Window attention: masks that differ between the windows of an image, added while the logits have an axis for the windows."""

from __future__ import annotations

import onnx_ir as ir

from qknorm_onnx.graph.match.attention_core import Bias
from qknorm_onnx.graph.walk.constants import producer
from qknorm_onnx.graph.walk.layout import dims_of, same_size
from qknorm_onnx.graph.walk.limits import WINDOW_MASKS


def read_window_masks(node: ir.Node) -> tuple[ir.Value, tuple[Bias, ...]] | None:
    """(B*W, H, S, T) > Reshape (B, W, H, S, T) > Add masks (1, W, 1, S, T) > Reshape back: the logits before, and the masks."""
    inner = node.inputs[0] if node.op_type == "Reshape" else None
    after = dims_of(node.outputs[0])
    dims = dims_of(inner) if inner is not None else None
    if inner is None or after is None or dims is None or len(after) != 4 or len(dims) != 5 or not isinstance(dims[1], int):
        return None
    biases: list[Bias] = []
    for _ in range(WINDOW_MASKS):
        add = producer(inner, "Add")
        split = next((index for index in (0, 1) if add is not None and _is_mask(add.inputs[index], dims[1])), None)
        if add is None or split is None:
            break
        mask, inner = add.inputs[split], add.inputs[1 - split]
        assert mask is not None
        biases.append(Bias(mask, windows=dims[1]))
    reshape = producer(inner, "Reshape")
    source = reshape.inputs[0] if reshape is not None else None
    before = dims_of(source) if source is not None else None
    if source is None or before is None or not biases or len(before) != 4 or not all(map(same_size, before, after)):
        return None
    return source, tuple(biases)


def _is_mask(value: ir.Value | None, windows: int) -> bool:
    dims = dims_of(value) if value is not None else None
    if dims is None or len(dims) != 5 or not all(isinstance(dim, int) for dim in dims):
        return False
    return dims[0] == dims[2] == 1 and dims[1] == windows
