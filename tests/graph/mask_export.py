"""Exports by torch.onnx: their masked softmaxes, and what a fragment describes compared with what onnxruntime computes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from onnx_ir.passes.common import unused_removal as remove_unused

from qknorm_onnx.graph.recognise.masks.mask import MaskContext, MaskFragment, recognise_mask
from qknorm_onnx.graph.symbolic.terms import Apply, Dimension, Linear

INFINITY = float("-inf")
Inputs: TypeAlias = tuple[torch.Tensor, ...]
MaskedCore: TypeAlias = tuple[ir.Value, bool, float | None, ir.Value | None]


def export(
    module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], axes: tuple[dict[int, object], ...], opset: int
) -> ir.Model:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(module.eval(), inputs, dynamic_shapes=axes, dynamo=True, verbose=False, opset_version=opset)
    return program.model


def cores(model: ir.Model) -> Iterator[MaskedCore]:
    """Mask, whether it hides, fill, and the scores (or None), of every masked softmax, Attention op or result."""
    for node in model.graph:
        if node.op_type == "Attention" and len(node.inputs) > 3 and node.inputs[3] is not None:
            yield node.inputs[3], False, None, None
        if node.op_type == "Softmax":
            assert node.inputs[0] is not None
            found = masked(node.inputs[0].producer())
            if found is not None:
                yield found


def masked(node: ir.Node | None) -> MaskedCore | None:
    if node is not None and node.op_type == "Concat":  # attention sinks
        assert node.inputs[0] is not None
        node = node.inputs[0].producer()
    if node is None or node.op_type not in ("Where", "Add"):
        return None
    if node.op_type == "Add":
        return node.inputs[1], False, None, node.inputs[0]  # type: ignore[return-value]
    hidden_first = node.inputs[1] is not None and node.inputs[1].shape is not None and node.inputs[1].shape.rank() == 0
    return node.inputs[0], hidden_first, INFINITY, node.inputs[2 if hidden_first else 1]  # type: ignore[return-value]


def read(model: ir.Model, core: MaskedCore, context: MaskContext) -> MaskFragment:
    mask, negated, fill, scores = core
    lengths = [context.extent(scores, axis) if scores is not None else None for axis in (-2, -1)]
    lengths = [None if length is not None and unnamed(length) else length for length in lengths]
    return recognise_mask(mask, context=context, negated=negated, fill_value=fill, query_length=lengths[0], key_length=lengths[1])


def unnamed(length: Linear) -> bool:
    return any(isinstance(atom, Dimension) and atom.owner is not None for atom, _ in length.terms)


def size(form: Linear, sizes: dict[str, int]) -> int:
    total = form.constant
    for atom, factor in form.terms:
        if isinstance(atom, Dimension):
            total += factor * sizes[atom.name]
        else:
            assert isinstance(atom, Apply)
            assert atom.function == "quotient"
            total += factor * (size(atom.arguments[0], sizes) // size(atom.arguments[1], sizes))
    return total


def check(model: ir.Model, core: MaskedCore, fragment: MaskFragment, feeds: dict[str, np.ndarray]) -> None:
    """Run the graph's own mask and residual terms and compare them with the description."""
    wanted = list(dict.fromkeys([str(core[0].name), *(str(term.value.name) for term in fragment.residual)]))
    part = ir.from_proto(ir.to_proto(model))
    values = {output.name: output for node in part.graph for output in node.outputs}
    part.graph.outputs[:] = [values[name] for name in wanted]
    remove_unused.RemoveUnusedNodesPass()(part)
    session = onnxruntime.InferenceSession(ir.to_proto(part).SerializeToString(), providers=["CPUExecutionProvider"])
    needed = {entry.name for entry in session.get_inputs()}
    arrays = dict(zip(wanted, session.run(wanted, {k: v for k, v in feeds.items() if k in needed}), strict=True))
    sizes = {
        str(dim.value): feeds[str(entry.name)].shape[axis]
        for entry in model.graph.inputs
        for axis, dim in enumerate(entry.shape or [])
        if not isinstance(dim, int)
    }
    compare(fragment, arrays, str(core[0].name), core[1], sizes)


def compare(fragment: MaskFragment, arrays: dict[str, np.ndarray], name: str, negated: bool, sizes: dict[str, int]) -> None:
    p = np.arange(size(fragment.query_length, sizes))[:, None] + size(fragment.query_offset, sizes)
    j = np.arange(size(fragment.key_length, sizes))[None]
    visible = np.ones((p.size, j.size), bool)
    if fragment.is_causal:
        visible &= j <= p
    if fragment.left_window_size >= 0:
        visible &= p - fragment.left_window_size <= j
    if fragment.right_window_size >= 0:
        visible &= j <= p + fragment.right_window_size
    rest = np.zeros(())
    for term in fragment.residual:
        array = arrays[str(term.value.name)]
        array = array.transpose([axis for axis in term.axes if axis is not None])
        array = array.reshape([1 if axis is None else array.shape[axis] for axis in term.axes])
        if term.kind == "keep":
            visible = visible & (array != term.negated)
        else:
            rest = rest + array
    mask = arrays[name]
    if mask.dtype == bool:
        assert (np.broadcast_to(visible, mask.shape) == (mask != negated)).all()
    else:
        described = np.where(visible, 0.0, -math.inf) + rest
        np.testing.assert_array_equal(np.broadcast_to(described, mask.shape) <= -1e9, mask <= -1e9)


def summary(fragment: MaskFragment) -> tuple[bool, int, int, str]:
    return fragment.is_causal, fragment.left_window_size, fragment.right_window_size, fragment.alignment
