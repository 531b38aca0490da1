"""The torch operator in the user's own `torch.onnx.export`: one bare node, which `qk.fuse` makes runnable."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

import qknorm_onnx as qk
from qknorm_onnx.spec import reference
from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormSpec, RotarySpec
from qknorm_onnx.torch_export.operators.torch_op import qk_norm_attention, qk_norm_attention_with_present, qk_norm_rotary

SPEC = QKNormSpec(
    attention=AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=0.3, is_causal=True, left_window_size=2, softcap=5.0),
    norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-5, weight_order="after_cast"),
    rotary=RotarySpec(order="after_norm", interleaved=True, embedding_dim=4),
)
DTYPES = {torch.float32: ir.DataType.FLOAT, torch.float16: ir.DataType.FLOAT16, torch.bfloat16: ir.DataType.BFLOAT16}
BATCH, LENGTH = {0: "batch"}, {0: "batch", 1: "sequence"}


class UsersModule(nn.Module):
    """Projections outside, the operator inside; weights in float32 whatever the activations are."""

    def __init__(self):
        super().__init__()
        self.q_weight = nn.Parameter(torch.rand(8) + 0.5)
        self.k_weight = nn.Parameter(torch.rand(2, 8) + 0.5)

    def forward(self, query, key, value, cos, sin):
        weights = {"q_norm_weight": self.q_weight, "k_norm_weight": self.k_weight}
        return qk_norm_attention(SPEC, query, key, value, cos=cos, sin=sin, **weights)


def users_export(module, inputs, shapes, opset=20):
    program = torch.onnx.export(
        module.eval(),
        kwargs=inputs,
        dynamic_shapes=shapes,
        opset_version=opset,
        dynamo=True,
        custom_translation_table=qk.translation_table(),
        verbose=False,
    )
    return program.model


def inputs_of(dtype, batch=2, length=5):
    sizes = {"query": 32, "key": 16, "value": 16}
    inputs = {name: torch.randn(batch, length, size).to(dtype) for name, size in sizes.items()}
    return inputs | {name: torch.randn(length, 2) for name in ("cos", "sin")}


SHAPES = {"query": LENGTH, "key": LENGTH, "value": LENGTH, "cos": {0: "sequence"}, "sin": {0: "sequence"}}


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bare_node(dtype):
    model = users_export(UsersModule(), inputs_of(dtype), SHAPES)
    (node,) = list(model.graph)
    assert (node.domain, node.op_type, node.overload) == ("ai.qknorm", "QKNormAttention", "")
    assert model.opset_imports["ai.qknorm"] == 1
    assert not model.functions
    (output,) = node.outputs
    assert output.dtype == DTYPES[dtype]
    assert [getattr(dim, "value", dim) for dim in output.shape] == ["batch", "sequence", 32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("opset", [18, 23])
def test_fuse_attaches_the_body_and_counts_the_node(dtype, opset):
    model = users_export(UsersModule(), inputs_of(dtype), SHAPES, opset)
    program = qk.fuse(model)
    (fused,) = program.report.fused
    assert fused.spec == SPEC
    assert program.report.complete
    assert len(program.model.functions) == 1


@pytest.mark.parametrize(("batch", "length"), [(2, 5), (1, 1), (3, 9), (1, 0)])
def test_the_fused_model_computes_the_reference(run_model, batch, length):
    module = UsersModule()
    program = qk.fuse(users_export(module, inputs_of(torch.float32), SHAPES))
    inputs = inputs_of(torch.float32, batch, length)
    (found,) = run_model(program.model, inputs)
    weights = {"q_norm_weight": module.q_weight, "k_norm_weight": module.k_weight}
    expected = reference.qk_norm_attention(SPEC, {n: t.detach().numpy() for n, t in (inputs | weights).items()})["Y"]
    assert found.shape == expected.shape
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=2e-6 * max(np.abs(expected).max(initial=0), 1))


def test_present_outputs_and_rotary_node():
    class Both(nn.Module):
        def forward(self, x, past_key, past_value, cos, sin):
            prepared = qk_norm_rotary(SPEC.query_preparation, x, cos=cos, sin=sin)
            half = x[..., :16]
            return qk_norm_attention_with_present(
                SPEC, prepared, half, half, cos=cos, sin=sin, past_key=past_key, past_value=past_value
            )

    inputs = {"x": torch.randn(2, 3, 32), "past_key": torch.randn(2, 2, 4, 8), "past_value": torch.randn(2, 2, 4, 8)}
    inputs |= {name: torch.randn(3, 2) for name in ("cos", "sin")}
    past = {0: "batch", 2: "past"}
    shapes = {"x": LENGTH, "past_key": past, "past_value": past, "cos": {0: "sequence"}, "sin": {0: "sequence"}}
    model = users_export(Both(), inputs, shapes)
    ours = [node.op_type for node in model.graph if node.domain == "ai.qknorm"]
    assert ours == ["QKNormRotary", "QKNormAttention"]
    assert [getattr(dim, "value", dim) for dim in model.graph.outputs[1].shape] == ["batch", 2, "past + sequence", 8]
