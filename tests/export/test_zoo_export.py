"""Models that are not ours: exported as they stand, the plain graph computes what PyTorch computes, at every size."""

from __future__ import annotations

import pytest
import torch

MODELS = ["qwen3", "gemma3_text", "olmo2", "cohere_qk", "llama4_text"]
SIZES = [(1, 5), (3, 17), (2, 1), (1, 1)]


@pytest.mark.parametrize("name", MODELS)
def test_plain_graph_equals_torch_at_other_sizes(plain_export, run_model, assert_as_torch, name):
    export = plain_export(name)
    for batch, length in SIZES:
        input_ids = torch.randint(5, 100, (batch, length), generator=torch.Generator().manual_seed(batch * 100 + length))
        (found,) = run_model(export.model, {"input_ids": input_ids})
        assert_as_torch(found, export.module(input_ids=input_ids))


@pytest.mark.parametrize("name", MODELS)
def test_inputs_keep_their_names_and_dimensions(plain_export, name):
    export = plain_export(name)
    (graph_input,) = export.model.graph.inputs
    assert graph_input.name == "input_ids"
    assert [dim.value for dim in graph_input.shape] == ["batch", "seq"]
    (output,) = export.model.graph.outputs
    assert output.name == "output"
    assert [getattr(dim, "value", dim) for dim in output.shape] == ["batch", "seq", 128]


def test_names_are_those_of_the_users_module(plain_export):
    model = plain_export("qwen3").model
    assert "model.model.layers.0.self_attn.q_norm.weight" in model.graph.initializers
    scopes = [node.metadata_props["pkg.torch.onnx.name_scopes"] for node in model.graph]
    assert any("'model.model.layers.1.self_attn'" in scope for scope in scopes)
    assert not any("wrapped" in text for node in model.graph for text in node.metadata_props.values())


def test_no_paths_of_the_exporting_machine_in_the_file(plain_export):
    model = plain_export("qwen3").model
    texts = [text for node in model.graph for text in node.metadata_props.values()]
    texts += [text for value in model.graph.initializers.values() for text in value.metadata_props.values()]
    assert not any("site-packages" in text or ".py" in text for text in texts)


@pytest.mark.parametrize("opset", [18, 20, 23])
@pytest.mark.parametrize("name", ["h_rms_interleaved_sdpa", "h_cosine_tau_causal"])
def test_opsets(plain_export, run_model, assert_as_torch, name, opset):
    export = plain_export(name, opset)
    assert export.model.opset_imports[""] == opset
    x = torch.randn(3, 7, 64)
    (found,) = run_model(export.model, {"x": x})
    assert_as_torch(found, export.module(x=x))


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, 23])
def test_opsets_of_a_language_model(plain_export, run_model, assert_as_torch, opset):
    export = plain_export("qwen3", opset)
    assert export.model.opset_imports[""] == opset
    # One row: at opset 23 torch writes RotaryEmbedding with a table of batch 1, which onnxruntime takes only for one row.
    input_ids = torch.randint(5, 100, (1, 7))
    (found,) = run_model(export.model, {"input_ids": input_ids})
    assert_as_torch(found, export.module(input_ids=input_ids))


def test_llama4_says_what_was_done_to_its_complex_numbers(plain_export):
    assert any("complex" in note for note in plain_export("llama4_text").notes)
    assert plain_export("qwen3").notes == ()
