"""One-token decode with a cache: the cache goes in and out of the canonical node, and graph outputs keep their names."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qknorm_onnx.graph.canonical.qk_norm_node import is_attention_node
from qknorm_onnx.torch_export.exporter import export_graph
from tests.graph.zoo_export import fused, run
from tools.zoo_facts import facts

AXES = ({0: "batch"}, {0: "batch"}, {0: "batch", 1: "past+1"})
PAST = {0: "batch", 2: "past"}
LONGEST_PAST = {"doge": 2047}  # behind its window it takes another path, which the graph would not have


def decode_axes(name, *, caches):
    if name not in LONGEST_PAST:
        return (*AXES, *([PAST] * caches))
    batch, past = torch.export.Dim("batch"), torch.export.Dim("past", max=LONGEST_PAST[name])
    return ({0: batch}, {0: batch}, {0: batch, 1: past + 1}, *([{0: batch, 2: past}] * caches))


def check_decode(zoo, name, *, opset=20):
    module, example, _ = zoo.build_with_cache(name)
    module.eval()
    model, _ = export_graph(module, example, dynamic_shapes=decode_axes(name, caches=len(example) - 3), opset=opset)
    outputs = [value.name for value in model.graph.outputs]
    result, report = fused(model)
    assert not report.declined and not report.refused
    assert [item.note for item in report.fused] == [""] * facts(name).fusable
    assert [value.name for value in result.graph.outputs] == outputs
    nodes = [node for node in result.graph if is_attention_node(node)]
    assert all(node.inputs[12] is not None and len(node.outputs) == 3 for node in nodes)
    for batch, past in ((3, 5), (1, 17)):
        compare(module, result, resized(example, batch=batch, past=past))


def resized(example, *, batch, past):
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(5, 100, (batch, 1), generator=generator)
    caches = [torch.randn(batch, item.shape[1], past, item.shape[3], generator=generator) for item in example[3:]]
    return (ids, torch.full((batch, 1), past), torch.ones(batch, past + 1, dtype=torch.long), *caches)


def compare(module, model, inputs):
    names = [value.name for value in model.graph.inputs]
    outputs = run(model, {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)})
    with torch.no_grad():
        own = [tensor.numpy() for tensor in module(*inputs)]
    assert len(outputs) == len(own)
    for given, expected in zip(outputs, own, strict=True):
        assert given.shape == expected.shape
        assert np.abs(given - expected).max() <= 2e-6 + 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("opset", [20, 23])
def test_decode_of_qwen3(zoo, opset):
    check_decode(zoo, "qwen3", opset=opset)


class MaskedByItsValues(torch.nn.Module):
    """Attention whose mask is computed from all values, the cached ones among them, as Doge's."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(32, 32) for _ in range(3))
        self.norm = torch.nn.RMSNorm(8, eps=1e-6)
        torch.nn.init.uniform_(self.norm.weight, 0.5, 1.5)

    def forward(self, x, past_key, past_value):
        query, key, value = (layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        key, value = torch.cat([past_key, self.norm(key)], 2), torch.cat([past_value, value], 2)
        mask = torch.tanh(value.sum(-1))[:, :, None]
        y = torch.nn.functional.scaled_dot_product_attention(self.norm(query), key, value, attn_mask=mask)
        return y.transpose(1, 2).flatten(2), key, value


def test_a_mask_made_of_cached_values_is_computed_before_the_node():
    torch.manual_seed(0)
    module = MaskedByItsValues().eval()
    example = (torch.randn(2, 1, 32), torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8))
    model, _ = export_graph(module, example, dynamic_shapes=({0: "batch"}, PAST, PAST))
    result, report = fused(model)
    assert len(report.fused) == 1 and report.fused[0].note == ""
    for batch, past in ((3, 5), (1, 0)):
        compare(module, result, (torch.randn(batch, 1, 32), *(torch.randn(batch, 4, past, 8) for _ in range(2))))


@pytest.mark.slow
def test_decode_of_every_entry_with_a_cache(zoo, subtests):
    for name, build in zoo.ZOO.items():
        if build()[3].get("cache") == "dynamic" and facts(name).fusable:
            with subtests.test(name):
                check_decode(zoo, name)
