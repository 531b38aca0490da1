"""`qk.export_folder`: what lies in the folder, that it can be moved, and what is refused."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import qknorm_onnx as qk
from qknorm_onnx.cli.main import run
from qknorm_onnx.errors import ExportError, InputError
from qknorm_onnx.serving import folder_writing
from qknorm_onnx.serving.decoder_folder import open_decoder_folder
from qknorm_onnx.serving.decoder_ports import CacheSize, DecoderPorts
from qknorm_onnx.serving.genai_config import Serving, genai_config
from tests.serving.tiny_models import DOCUMENT, SECOND_END, SIZES

PORTS = DecoderPorts(caches=(CacheSize(num_heads=2, head_size=16),) * 3, vocabulary=256, last_logits=True)
INPUTS = ("input_ids", "attention_mask", "position_ids")
SERVING = Serving(library="lib.so", provider="cpu", shared_cache=False)


def test_holds_all_that_serving_takes(exported):
    made = exported("qwen3")
    names = {path.name for path in made.folder.iterdir()}
    assert names == {
        "model.onnx", "genai_config.json", qk.library_path().name, "config.json", "generation_config.json", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert len(list(made.source.glob("*.safetensors"))) > 1, "the checkpoint is in several files"
    assert made.program.report.complete and len(made.program.report.fused) == SIZES["num_hidden_layers"]
    config = json.loads((made.folder / "genai_config.json").read_text())
    assert config["model"]["eos_token_id"] == [DOCUMENT, SECOND_END]
    assert config["model"]["decoder"]["session_options"]["custom_ops_library"] == qk.library_path().name
    decoder = config["model"]["decoder"]
    assert (decoder["head_size"], decoder["num_key_value_heads"], decoder["num_attention_heads"]) == (16, 2, 6)
    assert decoder["num_hidden_layers"] == 2 and config["model"]["vocab_size"] == 256
    assert config["model"]["context_length"] == 512
    assert not list(made.folder.parent.glob(".out*")), "nothing is left beside it"


def test_logits_are_of_the_last_token_that_the_mask_lets_through(exported):
    made = exported("qwen3")
    session = qk.create_session(made.folder / "model.onnx")
    ids = np.array([[0, 0, 72, 105, 33], [72, 105, 33, 0, 0], [72, 105, 0, 33, 0]])
    mask = (ids != 0).astype(np.int64)
    feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": np.maximum(mask.cumsum(1) - 1, 0)}
    empty = np.zeros((3, 2, 0, 16), np.float32)
    feeds |= {f"past_key_values.{layer}.{part}": empty for layer in range(2) for part in ("key", "value")}
    logits = session.run(["logits"], feeds)[0]
    assert logits.shape == (3, 1, 256)
    import torch

    plain = made.model(input_ids=torch.tensor([[72, 105, 33]])).logits[0, -1].detach().numpy()
    for row in logits[:, 0]:
        np.testing.assert_allclose(row, plain, atol=1e-4)


def test_an_existing_folder_or_file_is_in_the_way(tmp_path, exported):
    full, file = tmp_path / "full", tmp_path / "notes"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    file.write_text("mine")
    source = exported("qwen3").source
    with pytest.raises(InputError, match="full is a folder with something in it"):
        qk.export_folder(source, full)
    with pytest.raises(InputError, match="notes is a file"):
        qk.export_folder(source, file)
    assert (full / "notes.txt").read_text() == file.read_text() == "mine"


def test_what_fails_leaves_nothing(tmp_path, exported, monkeypatch):
    def fail(*_arguments):
        raise InputError("no room")

    monkeypatch.setattr(folder_writing, "write_json", fail)
    made = exported("qwen3")
    with pytest.raises(InputError, match="no room"):
        folder_writing.write_decoder_folder(
            made.program, tmp_path / "out", source=made.source, config=SIZES, generation={}, provider="cpu", shared_cache=False
        )
    assert not list(tmp_path.iterdir())


def test_an_empty_folder_is_filled(tmp_path, exported):
    made = exported("qwen3")
    (tmp_path / "out").mkdir()
    bare = tmp_path / "bare"
    bare.mkdir()
    notes = folder_writing.write_decoder_folder(
        made.program, tmp_path / "out", source=bare, config=SIZES, generation={}, provider="cpu", shared_cache=False
    )
    assert any("has no tokenizer.json" in note for note in notes)
    assert open_decoder_folder(tmp_path / "out").eos_token_ids == (DOCUMENT,)


def test_only_folders_with_language_models(tmp_path):
    with pytest.raises(ExportError, match="is none"):
        qk.export_folder("package.module:factory", tmp_path / "out")
    with pytest.raises(ExportError, match=r"has no config\.json"):
        qk.export_folder(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [3, 4], "pad_token_id": 5, "bos_token_id": 1}, {}, (1, [3, 4], 5)),
        ({}, {"eos_token_id": 3, "bos_token_id": None}, (3, [3], 3)),
        ({"eos_token_id": None}, {"eos_token_id": [9, 8], "pad_token_id": None}, (9, [9, 8], 9)),
        ({}, {}, (0, [], 0)),
    ],
)
def test_ends_and_padding(generation, config, expected):
    written = genai_config({**config, "max_position_embeddings": 64}, generation, PORTS, INPUTS, SERVING)["model"]
    assert (written["bos_token_id"], written["eos_token_id"], written["pad_token_id"]) == expected


def test_search_is_that_of_the_generation_config():
    said = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    written = genai_config({"max_position_embeddings": 40960}, said, PORTS, INPUTS, SERVING)
    assert said.items() <= written["search"].items()
    assert written["search"]["max_length"] == 4096 and written["model"]["context_length"] == 40960
    plain = genai_config({"n_positions": 64}, {}, PORTS, INPUTS, SERVING)["search"]
    assert (plain["do_sample"], plain["temperature"], plain["max_length"]) == (False, 1.0, 64)
    with pytest.raises(InputError, match="does not say how many tokens"):
        genai_config({}, {}, PORTS, INPUTS, SERVING)


def test_only_inputs_that_are_there_are_named():
    names = genai_config({"n_positions": 64}, {}, PORTS, ("input_ids",), SERVING)["model"]["decoder"]["inputs"]
    assert names == {
        "input_ids": "input_ids", "past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "genai_config.json").unlink(), r"no genai_config\.json; it looks like a Hugging Face folder"),
        (lambda folder: (folder / "genai_config.json").write_text("{"), "is damaged"),
        (lambda folder: (folder / "genai_config.json").write_text("[]"), "is damaged"),
        (lambda folder: (folder / "model.onnx").unlink(), r"names model\.onnx, which is not there"),
        (shutil.rmtree, "no such folder"),
    ],
)
def test_a_damaged_folder_says_what_is_wrong(tmp_path, exported, damage, message):
    folder = tmp_path / "out"
    shutil.copytree(exported("qwen3").folder, folder)
    damage(folder)
    with pytest.raises(InputError, match=message):
        open_decoder_folder(folder)


def test_validate_judges_a_folder(exported, capsys):
    made = exported("qwen3")
    assert run(["validate", str(made.folder), str(made.source), "--seeds", "0"]) == 0, capsys.readouterr()


def test_the_command_writes_a_folder_or_a_file(tmp_path, exported, capsys):
    made = exported("qwen3")
    assert run(["export", str(made.source), str(tmp_path / "full.onnx"), "--logits", "last"]) == 2
    assert "models with a cache" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
