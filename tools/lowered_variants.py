"""Which target serves which variant: every variant as a model of one node with symbolic sizes, lowered to every target."""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from qknorm_onnx.graph.canonical.qk_norm_node import AttentionInputs, make_attention_node
from qknorm_onnx.lowering.registry import TARGETS, LoweringOutcome, lower
from qknorm_onnx.spec.signature import DOMAIN, VERSION
from qknorm_onnx.spec.variants import Variant

OPSET: Final = 23
SYMBOLS: Final = {"B": "batch", "S": "sequence", "N": "sequence", "T": "sequence"}


def outcomes(variant: Variant) -> dict[str, LoweringOutcome]:
    """What becomes of the variant's node, by the name of the target that was asked for (float32, CPU, without a cache)."""
    return {target: lower(one_node_model(variant), target=target, provider="cpu")[0] for target in TARGETS}


def ort_on_cuda(variant: Variant) -> LoweringOutcome:
    """What becomes of the variant's node under target `ort` for CUDA, in float16, without a cache."""
    return lower(one_node_model(variant, dtype=ir.DataType.FLOAT16), target="ort", provider="cuda")[0]


def one_node_model(variant: Variant, *, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Model:
    """A model of one canonical node; batch and sequence are symbols."""
    attention, size = variant.spec.attention, variant.head_size
    shapes: dict[str, list[int | str]] = {"query": ["batch", "sequence", attention.q_num_heads * size]}
    shapes["key"] = shapes["value"] = ["batch", "sequence", attention.kv_num_heads * size]
    shapes |= {tensor.name: _shape(variant, tensor.shape) for tensor in variant.inputs}
    masks = {tensor.name for tensor in variant.inputs if tensor.values == "bool mask"}
    values = {
        name: ir.Value(name=name, type=ir.TensorType(ir.DataType.BOOL if name in masks else dtype), shape=ir.Shape(shape))
        for name, shape in shapes.items()
    }
    node = make_attention_node(variant.spec, AttentionInputs(**values), name=variant.name)
    graph = ir.Graph(
        list(values.values()), [node.outputs[0]], nodes=[node], opset_imports={"": OPSET, DOMAIN: VERSION}, name=variant.name
    )
    return ir.Model(graph, ir_version=10)


def _shape(variant: Variant, letters: str) -> list[int | str]:
    attention, size = variant.spec.attention, variant.head_size
    rotated = variant.spec.rotary.rotated_size(size) if variant.spec.rotary.order != "none" else 0
    numbers = {"1": 1, "Hq": attention.q_num_heads, "Hkv": attention.kv_num_heads, "D": size, "R": rotated, "R/2": rotated // 2}
    numbers |= {"Hq*D": attention.q_num_heads * size, "Hkv*D": attention.kv_num_heads * size}
    names = [letter.strip() for letter in letters.strip("()").split(",") if letter.strip()]
    return [SYMBOLS[name] if name in SYMBOLS else numbers[name] for name in names]
