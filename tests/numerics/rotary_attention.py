"""A handwritten PyTorch attention with QK-Norm, and the graph that a right exporter makes of it, with room for mistakes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from qknorm_onnx.graph.canonical.qk_norm_node import AttentionInputs, make_attention_node
from qknorm_onnx.graph.passes.attach_bodies import AttachBodiesPass
from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormSpec, RotarySpec

HEADS, KV_HEADS, HEAD_SIZE, WIDTH, WINDOW, EPSILON = 4, 2, 16, 24, 4, 1e-5


class RotaryAttention(torch.nn.Module):
    """x + attention(x): projections, RMSNorm per head with a weight per head and value, half rotary, window of 4 tokens, GQA."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.q_proj = torch.nn.Linear(WIDTH, HEADS * HEAD_SIZE, bias=False)
        self.k_proj = torch.nn.Linear(WIDTH, KV_HEADS * HEAD_SIZE, bias=False)
        self.v_proj = torch.nn.Linear(WIDTH, KV_HEADS * HEAD_SIZE, bias=False)
        self.o_proj = torch.nn.Linear(HEADS * HEAD_SIZE, WIDTH, bias=False)
        self.q_weight = torch.nn.Parameter(0.5 + 2 * torch.rand(HEADS, HEAD_SIZE))
        self.k_weight = torch.nn.Parameter(0.5 + 2 * torch.rand(KV_HEADS, HEAD_SIZE))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q = self._prepared(self.q_proj(x), self.q_weight, cos, sin)
        k = self._prepared(self.k_proj(x), self.k_weight, cos, sin).repeat_interleave(HEADS // KV_HEADS, 1)
        v = self.v_proj(x).unflatten(-1, (KV_HEADS, HEAD_SIZE)).transpose(1, 2).repeat_interleave(HEADS // KV_HEADS, 1)
        positions = torch.arange(x.shape[1])
        distance = positions[:, None] - positions[None]
        seen = (distance >= 0) & (distance < WINDOW)
        logits = (q @ k.transpose(-1, -2) * HEAD_SIZE**-0.5).masked_fill(~seen, -torch.inf)
        y = torch.softmax(logits, -1, dtype=torch.float32).to(v.dtype) @ v
        return x + self.o_proj(y.transpose(1, 2).flatten(2))

    def _prepared(self, x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (-1, HEAD_SIZE)).float()
        heads = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + EPSILON)
        heads = (heads * weight).to(x.dtype).transpose(1, 2)
        first, second = heads.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def example(batch: int = 2, length: int = 9, seed: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(HEAD_SIZE // 2) / (HEAD_SIZE // 2))
    return {"x": torch.randn(batch, length, WIDTH, generator=generator), "cos": angles.cos(), "sin": angles.sin()}


def right_spec() -> QKNormSpec:
    return QKNormSpec(
        attention=AttentionSpec(
            q_num_heads=HEADS, kv_num_heads=KV_HEADS, scale=HEAD_SIZE**-0.5, is_causal=True, left_window_size=WINDOW - 1
        ),
        norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=EPSILON, k_epsilon=EPSILON),
        rotary=RotarySpec(order="after_norm"),
    )


def changed(spec: QKNormSpec, **parts: dict[str, Any]) -> QKNormSpec:
    """`spec` with fields replaced: changed(spec, norm={"q_kind": "l2"})."""
    new = {part: dataclasses.replace(getattr(spec, part), **fields) for part, fields in parts.items()}
    return dataclasses.replace(spec, **new)


def graph_of(module: RotaryAttention, spec: QKNormSpec | None = None, **weights: np.ndarray[Any, Any] | None) -> ir.Model:
    """The module with one canonical node. `spec` and the weights named replace the right ones; a weight of None is left out."""
    spec = right_spec() if spec is None else spec
    arrays = {name: tensor.detach().numpy() for name, tensor in module.named_parameters()} | weights
    inputs = {
        "x": ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", "length", WIDTH])),
        "cos": ir.Value(name="cos", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["length", HEAD_SIZE // 2])),
        "sin": ir.Value(name="sin", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["length", HEAD_SIZE // 2])),
    }
    graph = ir.Graph(list(inputs.values()), [], nodes=[], opset_imports={"": 20}, name="rotary_attention")

    def constant(name: str, array: np.ndarray[Any, Any]) -> ir.Value:
        value = ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape(array.shape),
            const_value=ir.tensor(np.ascontiguousarray(array), name=name),
        )
        graph.register_initializer(value)
        return value

    def operator(op_type: str, name: str, width: int, *values: ir.Value) -> ir.Value:
        out = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", "length", width]))
        graph.append(ir.Node("", op_type, list(values), outputs=[out], name=f"{op_type}_{name}"))
        return out

    def projected(name: str, x: ir.Value) -> ir.Value:
        matrix = arrays[f"{name}.weight"]
        assert matrix is not None
        return operator("MatMul", name, matrix.shape[0], x, constant(f"{name}.weight", matrix.T))

    norm_weights = {
        f"{side}_norm_weight": constant(f"{side}_weight", arrays[f"{side}_weight"])
        for side in ("q", "k")
        if arrays[f"{side}_weight"] is not None
    }
    node = make_attention_node(
        spec,
        AttentionInputs(
            query=projected("q_proj", inputs["x"]),
            key=projected("k_proj", inputs["x"]),
            value=projected("v_proj", inputs["x"]),
            cos=inputs["cos"] if spec.rotary.order != "none" else None,
            sin=inputs["sin"] if spec.rotary.order != "none" else None,
            **norm_weights,
        ),
        name="attention",
    )
    graph.append(node)
    graph.outputs.append(operator("Add", "y", WIDTH, inputs["x"], projected("o_proj", node.outputs[0])))
    model = ir.Model(graph, ir_version=10)
    AttachBodiesPass()(model)
    return model
