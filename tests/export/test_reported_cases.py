"""Cases that people reported against other exporters."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention

import qknorm_onnx as qk
from qknorm_onnx.torch_export.exporter import export_graph

FLOAT32_EPSILON = 2.0**-23


@pytest.mark.parametrize("opset", [20, 23])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_epsilon_of_none_is_what_torch_used(dtype, opset):
    """nn.RMSNorm without eps: which epsilon torch uses may depend on type and version; the graph must have the same."""
    x = (torch.randn(2, 3, 16) * 1e-3).to(dtype)
    module = nn.RMSNorm(16).to(dtype)
    wide = x.double()
    exact = {e: wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + e) for e in (2.0**-23, 2.0**-10, 2.0**-7)}
    used = min(exact, key=lambda epsilon: float((module(x).double() - exact[epsilon]).abs().max()))
    model, _ = export_graph(module, (x,), opset=opset)
    constants = [value.const_value.numpy().ravel() for value in model.graph.initializers.values() if value.const_value.size == 1]
    found = [float(value[0]) for value in constants]
    found += [node.attributes["epsilon"].as_float() for node in model.graph if "epsilon" in node.attributes]
    assert used in found
    assert used == FLOAT32_EPSILON  # measured with torch 2.13; another value is no error, but is worth knowing


class GroupedQueries(nn.Module):
    def forward(self, q, k, v):
        q, k = rms_norm(q, (8,), torch.linspace(0.5, 1.5, 8), 1e-6), rms_norm(k, (8,), torch.linspace(2, 1, 8), 1e-6)
        return scaled_dot_product_attention(q, k, v, enable_gqa=True)


@pytest.mark.parametrize("opset", [18, 20, 23])
def test_enable_gqa_exports_and_fuses(run_model, opset):
    sizes = {"q": (1, 4, 5, 8), "k": (1, 2, 5, 8), "v": (1, 2, 5, 8)}
    inputs = {name: torch.randn(size) for name, size in sizes.items()}
    shapes = {name: {0: "batch", 2: "length"} for name in "qkv"}
    model, _ = export_graph(GroupedQueries(), kwargs=inputs, dynamic_shapes=shapes, opset=opset)
    others = {name: torch.randn(3, size[1], 7, 8) for name, size in sizes.items()}
    others["v"][:, 1] += 1000  # which query head reads which value head is seen
    expected = GroupedQueries()(**others)
    (attention,) = qk.fuse(model).report.fused
    assert (attention.spec.attention.q_num_heads, attention.spec.attention.kv_num_heads) == (4, 2)
    assert torch.allclose(run_model(model, others)[0], expected, rtol=1e-5, atol=1e-5)
    assert torch.allclose(run_model(qk.fuse(model).model, others)[0], expected, rtol=1e-5, atol=1e-5)


def test_a_padding_mask_of_the_user_exports(zoo, run_model, assert_as_torch):
    module, *_ = zoo.ZOO["qwen3"]()
    kwargs = {"input_ids": torch.randint(5, 100, (2, 6)), "attention_mask": torch.ones(2, 6, dtype=torch.int64)}
    shapes = {name: {0: "batch", 1: "sequence"} for name in kwargs}
    model, _ = export_graph(module, kwargs=kwargs, dynamic_shapes=shapes)
    assert [value.name for value in model.graph.inputs] == ["input_ids", "attention_mask"]
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    inputs = {"input_ids": torch.randint(5, 100, (3, 5)), "attention_mask": mask}
    found, expected = run_model(model, inputs)[0], module(**inputs)
    assert_as_torch(found[mask.bool()], expected[mask.bool()])


class TwiceTheSame(nn.Module):
    def forward(self, x):
        y = x * 2
        return {"last": y, "all": (x + 1, y)}


def test_a_tensor_that_is_returned_twice_has_two_names(run_model):
    x = torch.randn(2, 3)
    model, _ = export_graph(TwiceTheSame(), x)  # one tensor instead of a tuple is taken as it is meant
    program = qk.fuse(model)
    assert [value.name for value in program.model.graph.outputs] == ["last", "all.0", "all.1"]
    found = run_model(program.model, {"x": x})
    assert all(torch.equal(a, b) for a, b in zip(found, (x * 2, x + 1, x * 2), strict=True))


@pytest.mark.parametrize("opset", [0, 17, 99])
def test_an_opset_that_cannot_be_written(opset):
    with pytest.raises(qk.QKNormError, match=f"no export to opset {opset}"):
        qk.export(TwiceTheSame(), (torch.ones(2, 3),), opset=opset)


def test_what_is_no_module():
    with pytest.raises(qk.QKNormError, match=r"give a torch\.nn\.Module"):
        qk.export(lambda x: x, (torch.ones(2, 3),))
    with pytest.raises(qk.InputError, match="model of type NoneType"):
        qk.fuse(None)


@pytest.mark.parametrize("name", ["my batch", "1", "a b + c", "größe"])
def test_names_of_dimensions_that_onnx_cannot_read(name):
    with pytest.raises(qk.QKNormError, match="cannot read this name"):
        qk.export(TwiceTheSame(), (torch.ones(2, 3),), dynamic_shapes={"x": {0: name}})


class MaskedAttention(nn.Module):
    def forward(self, q, k, v, mask):
        weight = torch.linspace(0.5, 1.5, 8)
        return scaled_dot_product_attention(rms_norm(q, (8,), weight, 1e-6), rms_norm(k, (8,), weight.flip(0), 1e-6), v, mask)


@pytest.mark.parametrize("target", ["custom-op", "primitive"])
@pytest.mark.parametrize("opset", [18, 20])
def test_a_query_that_may_see_no_key_gives_zeros(run_model, opset, target):
    """B13: the mean of the values instead would be recognisable, they count upwards."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 4, 8, 8, generator=generator) for _ in range(2))
    v = torch.arange(2 * 4 * 8 * 8, dtype=torch.float32).reshape(2, 4, 8, 8)
    mask = torch.ones(2, 4, 8, 8, dtype=torch.bool)
    mask[0, 0, 0] = False
    inputs = {"q": q, "k": k, "v": v, "mask": mask}
    program = qk.export(MaskedAttention(), kwargs=inputs, opset=opset, target=target, require_fusion=True)
    (found,) = run_model(program.model, inputs)
    assert torch.equal(found[0, 0, 0], torch.zeros(8))
    assert torch.allclose(found, MaskedAttention()(**inputs), rtol=1e-5)
    assert qk.validate(program, MaskedAttention(), kwargs=inputs, dtypes=("float32", "float16", "bfloat16")).passed
