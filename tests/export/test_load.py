"""What the command line takes as SOURCE: model folders whose weights are all there, and factories."""

from __future__ import annotations

import json
import textwrap

import numpy as np
import pytest
import torch

from qknorm_onnx.errors import ExportError
from qknorm_onnx.torch_export.exporter import export_graph
from qknorm_onnx.torch_export.load import load_source

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")


@pytest.fixture(scope="module")
def qwen3_folder(tmp_path_factory):
    """A tiny Qwen3 whose heads are not hidden_size / num_attention_heads wide, with random norm weights."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
    )
    model = transformers.Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.5) if "norm" in name else torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def changed_folder(qwen3_folder, tmp_path):
    """`changed_folder(change)`: a copy whose weights went through `change(dict)`."""

    def make(change=None, config=None):
        values = json.loads((qwen3_folder / "config.json").read_text()) | (config or {})
        (tmp_path / "config.json").write_text(json.dumps(values))
        weights = safetensors_torch.load_file(qwen3_folder / "model.safetensors")
        if change is not None:
            change(weights)
        safetensors_torch.save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return tmp_path

    return make


def refusal(source, **options):
    with pytest.raises(ExportError) as caught:
        load_source(str(source), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


NORM = "model.layers.1.self_attn.q_norm.weight"


def test_a_folder(qwen3_folder, run_model, assert_as_torch):
    source = load_source(str(qwen3_folder))
    assert source.kwargs["input_ids"].shape == (2, 12)
    assert not source.module.training
    model, _ = export_graph(source.module, source.args, source.kwargs, dynamic_shapes=source.dynamic_shapes)
    assert [value.name for value in model.graph.inputs] == ["input_ids"]
    assert [value.name for value in model.graph.outputs] == ["logits"]
    input_ids = torch.randint(0, 64, (3, 7))
    assert_as_torch(run_model(model, {"input_ids": input_ids})[0], source.module(input_ids).logits)


@pytest.fixture(scope="module")
def cached_export(qwen3_folder):
    source = load_source(str(qwen3_folder), with_past=True)
    model, notes = export_graph(source.module, source.args, source.kwargs, dynamic_shapes=source.dynamic_shapes)
    return source, model, notes


def test_the_example_of_a_cache_is_text_and_not_padding(qwen3_folder, cached_export):
    """Token 0 is often the padding: its embedding, and every key, value and logit after it, may be zero."""
    kwargs = cached_export[0].kwargs
    assert kwargs["input_ids"].unique().numel() > 2
    assert kwargs["input_ids"].min() >= 0 and kwargs["input_ids"].max() < 64
    for layer in kwargs["past_key_values"]:
        for name in ("key", "value"):
            assert (layer[name].abs().amax(-1) > 0).all()
        assert not torch.equal(layer["value"][:, :, 0], layer["value"][:, :, 1]), "other tokens, other values"
    again = load_source(str(qwen3_folder), with_past=True).kwargs
    assert torch.equal(again["input_ids"], kwargs["input_ids"]), "the same for everybody"


def test_a_folder_with_its_cache(cached_export, run_model, assert_as_torch):
    source, model, notes = cached_export
    assert notes == ()
    cache = [f"{{}}.{layer}.{part}" for layer in (0, 1) for part in ("key", "value")]
    names = ["input_ids", "attention_mask", "position_ids"]
    assert [value.name for value in model.graph.inputs] == names + [name.format("past_key_values") for name in cache]
    assert [value.name for value in model.graph.outputs] == ["logits"] + [name.format("present") for name in cache]
    shapes = {value.name: [getattr(d, "value", d) for d in value.shape] for value in model.graph.inputs}
    assert shapes["past_key_values.1.value"] == ["batch", 2, "past_sequence", 16]
    assert shapes["attention_mask"] == ["batch", "past_sequence + sequence"]

    tokens = torch.randint(0, 64, (3, 9))
    expected = source.module.model(tokens).logits
    past = {name.format("past_key_values"): torch.zeros(3, 2, 0, 16) for name in cache}
    done = 0
    for step in (5, 1, 1, 2):  # prefill from an empty cache, then one and two tokens
        mask = torch.ones(3, done + step, dtype=torch.int64)
        positions = torch.arange(done, done + step).expand(3, step)
        feeds = {"input_ids": tokens[:, done : done + step], "attention_mask": mask, "position_ids": positions, **past}
        logits, *present = run_model(model, feeds)
        assert_as_torch(logits, expected[:, done : done + step])
        past = dict(zip(past, present, strict=True))
        done += step


def test_left_padding_with_a_cache(cached_export, run_model, assert_as_torch):
    source, model, _ = cached_export
    tokens = torch.randint(1, 64, (1, 3))
    padded = torch.cat([torch.zeros(1, 2, dtype=torch.int64), tokens], 1)
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    past = {value.name: torch.zeros(1, 2, 0, 16) for value in model.graph.inputs if value.name.startswith("past")}
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    logits, *present = run_model(model, {"input_ids": padded, "attention_mask": mask, "position_ids": positions, **past})
    assert_as_torch(logits[:, 2:], source.module.model(tokens).logits)
    assert all(np.isfinite(value.numpy()).all() for value in present)


def test_dtype(qwen3_folder):
    assert load_source(str(qwen3_folder)).module.dtype == torch.float32
    assert load_source(str(qwen3_folder), dtype=torch.float16).module.dtype == torch.float16


def test_a_missing_norm_weight_is_an_error(changed_folder):
    message = refusal(changed_folder(lambda weights: weights.pop(NORM)))
    assert f"the checkpoint lacks {NORM}" in message


def test_nan_weights_are_an_error(changed_folder):
    message = refusal(changed_folder(lambda weights: weights[NORM].fill_(torch.nan)))
    assert f"{NORM} holds 16 NaN" in message


def test_a_weight_of_another_shape_is_an_error(changed_folder):
    message = refusal(changed_folder(lambda weights: weights.update({NORM: torch.ones(8)})))
    assert NORM in message


def test_a_norm_that_the_model_does_not_use_is_an_error(changed_folder):
    extra = "model.layers.0.self_attn.v_norm.weight"
    assert extra in refusal(changed_folder(lambda weights: weights.update({extra: torch.ones(16)})))


def test_other_unused_weights_are_noted(changed_folder):
    source = load_source(str(changed_folder(lambda weights: weights.update({"model.old_table": torch.ones(4)}))))
    assert any("model.old_table" in note for note in source.notes)


@pytest.mark.parametrize(
    ("config", "message"),
    [({"architectures": None}, "names no architecture"), ({"architectures": ["NoSuchModel"]}, "has no NoSuchModel")],
)
def test_a_config_that_names_no_known_model(changed_folder, config, message):
    assert message in refusal(changed_folder(config=config))


def test_damaged_folders(changed_folder, tmp_path):
    assert "has no config.json" in refusal(tmp_path)
    folder = changed_folder()
    (folder / "model.safetensors").write_bytes(b"\x10\x00\x00")
    assert "model.safetensors" in refusal(folder) or "safetensors file is damaged" in refusal(folder)
    (folder / "model.safetensors").unlink()
    assert "cannot be loaded" in refusal(folder)
    (folder / "config.json").write_text("{")
    assert "is not a JSON object" in refusal(folder)


def test_sources_that_are_nothing(tmp_path, qwen3_folder):
    for source in ("no/such/folder", "plainword", str(qwen3_folder / "config.json"), "a b:c", "module:"):
        assert "neither a folder" in refusal(source)
    assert "cannot be imported" in refusal("no_such_module_here:make")
    assert "has no 'nothing'" in refusal("json:nothing")
    assert "returned a str" in refusal("platform:python_version")


FACTORIES = """
    import torch
    from torch import nn

    class Plain(nn.Module):
        def forward(self, x, scale=None):
            return x if scale is None else x * scale

    class WithExample(Plain):
        dynamic_shapes = {"x": {0: "rows"}}
        def example_inputs(self):
            return (torch.ones(2, 3),)

    def pair():
        return Plain(), (torch.ones(2, 3),)

    def full():
        return Plain(), (torch.ones(2, 3),), {"scale": torch.ones(3)}, {"x": {0: "rows"}}

    def named():
        return Plain(), {"x": torch.ones(2, 3)}

    def no_example():
        return Plain()

    def broken():
        raise RuntimeError("the disk is full")

    constant = 3
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / "export_test_factories.py").write_text(textwrap.dedent(FACTORIES))
    monkeypatch.chdir(tmp_path)
    yield "export_test_factories"
    import sys

    sys.modules.pop("export_test_factories", None)


@pytest.mark.parametrize("name", ["pair", "full", "named", "WithExample"])
def test_factories(factories, name):
    source = load_source(f"{factories}:{name}")
    model, _ = export_graph(source.module, source.args, source.kwargs, dynamic_shapes=source.dynamic_shapes)
    rows = model.graph.inputs[0].shape[0]
    assert getattr(rows, "value", rows) == ("rows" if name in ("full", "WithExample") else 2)


def test_factories_that_do_not_serve(factories):
    assert "without example inputs" in refusal(f"{factories}:no_example")
    assert "the disk is full" in refusal(f"{factories}:broken")
    assert "must be a function" in refusal(f"{factories}:constant")
    assert "for Hugging Face folders only" in refusal(f"{factories}:pair", with_past=True)
