"""What a proof runs: one layer's nodes, however many layers are before it."""

from __future__ import annotations

import pytest
import torch

from qknorm_onnx.graph.passes.fuse import FuseQKNormPass
from qknorm_onnx.graph.passes.prepare import PreparePass
from qknorm_onnx.proof.region_prover import RegionProver
from tests.graph.zoo_export import export

LAYERS = 5


class Recorder(RegionProver):
    """Proves, and keeps for each region its number of nodes and the size of its largest weight."""

    def __init__(self):
        super().__init__()
        self.nodes, self.largest_weight = [], 0

    def prove(self, old, new):
        self.nodes.append((len(old.graph), len(new.graph)))
        weights = [value.const_value.size for side in (old, new) for value in side.graph.initializers.values()]
        self.largest_weight = max([self.largest_weight, *weights])
        return super().prove(old, new)


@pytest.mark.parametrize("opset", [20, 23])
def test_regions_do_not_grow_with_the_depth(opset):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, use_cache=False,
    )  # fmt: skip
    module = Qwen3ForCausalLM(config).eval()
    ids = torch.randint(0, 100, (2, 7))
    model = export(module, {"input_ids": ids}, {"input_ids": {0: "batch", 1: "seq"}}, opset=opset)
    PreparePass()(model)
    recorder = Recorder()
    fuse = FuseQKNormPass(recorder)
    fuse(model)
    assert [item.note for item in fuse.report.fused] == [""] * LAYERS
    assert len(recorder.nodes) == LAYERS and len(set(recorder.nodes[1:])) == 1, recorder.nodes
    assert recorder.largest_weight <= 64  # norm weights, inverse frequencies, shapes: no embedding, no projection
