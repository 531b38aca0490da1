"""One-token decode with a cache: the cache goes in and out of the canonical node, and graph outputs keep their names."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qknorm_onnx.torch_export.exporter import export_graph
from tests.graph.zoo_export import fused, run

AXES = ({0: "batch"}, {0: "batch"}, {0: "batch", 1: "past+1"})
PAST = {0: "batch", 2: "past"}


def check_decode(zoo, name, *, opset=20):
    module, example, _ = zoo.build_with_cache(name)
    module.eval()
    dynamic = (*AXES, *([PAST] * (len(example) - 3)))
    model, _ = export_graph(module, example, dynamic_shapes=dynamic, opset=opset)
    outputs = [value.name for value in model.graph.outputs]
    result, report = fused(model)
    assert not report.declined and not report.refused
    assert report.fused and all(item.note == "" for item in report.fused)
    assert [value.name for value in result.graph.outputs] == outputs
    nodes = [node for node in result.graph if node.op_type == "QKNormAttention"]
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


@pytest.mark.slow
def test_decode_of_every_entry_with_a_cache(zoo, subtests):
    for name, build in zoo.ZOO.items():
        if build()[3].get("cache") == "dynamic":
            with subtests.test(name):
                check_decode(zoo, name)
