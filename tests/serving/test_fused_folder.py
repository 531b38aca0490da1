"""Folders of onnxruntime-genai's builder, fused: it loads them, runs our kernels and gives the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import onnx_ir as ir
import pytest

import qknorm_onnx as qk
from qknorm_onnx.cli.main import run
from qknorm_onnx.errors import InputError
from qknorm_onnx.spec.signature import DOMAIN
from tests.serving.tiny_models import write_folder

og = pytest.importorskip("onnxruntime_genai")

PROMPT = list(b"The quick brown fox jumps")
NEW = 40


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The builder's folder of a tiny Qwen3, float32."""
    place = tmp_path_factory.mktemp("built")
    write_folder("qwen3", place / "hf")
    options = ["-i", place / "hf", "-o", place / "built by genai", "-p", "fp32", "-e", "cpu", "-c", place / "cache"]
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", *map(str, options)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return place / "built by genai"


@pytest.fixture(scope="module")
def fused(built):
    out = built.parent / "fused for genai"
    report = qk.fuse_folder(built, out, require_fusion=True).report
    assert [item.note for item in report.fused] == ["proven in float32: no float64 kernel for GroupQueryAttention"] * 2
    assert report.notes == ()
    return out


def continued(folder, rows):
    model = og.Model(str(folder))
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=len(rows[0]) + NEW, batch_size=len(rows), min_length=len(rows[0]) + NEW)
    generator = og.Generator(model, params)
    generator.append_tokens(np.array(rows, np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [generator.get_sequence(row).tolist() for row in range(len(rows))]


def test_genai_says_the_same_from_both(built, fused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [PROMPT, [token + 1 for token in PROMPT], PROMPT[::-1]]
    for given in (rows, rows[:1]):
        assert continued(fused, given) == continued(built, given)


def test_caches_stay_in_place(fused):
    config = json.loads((fused / "genai_config.json").read_text())
    assert config["search"]["past_present_share_buffer"] is True, "the builder's own setting"
    model = ir.load(fused / "model.onnx")
    nodes = [node for node in model.graph if node.domain == DOMAIN]
    assert len(nodes) == 2
    pasts = {str(value.name) for value in model.graph.inputs if str(value.name).startswith("past_key_values.")}
    presents = {str(value.name) for value in model.graph.outputs if str(value.name).startswith("present.")}
    for node in nodes:
        assert {value.name for value in node.inputs if value is not None} & pasts, "the past goes in as it is"
        assert {value.name for value in node.outputs} & presents, "and comes out as it is"


def test_what_lies_in_the_folder(built, fused):
    weights = {"model.onnx", "model.onnx.data"}
    kept = {path.name for path in built.iterdir()} - weights
    found = {path.name for path in fused.iterdir()} - weights
    assert found == kept | {qk.library_path().name} and "tokenizer.json" in found
    before, after = (json.loads((folder / "genai_config.json").read_text()) for folder in (built, fused))
    options = after["model"]["decoder"]["session_options"]
    assert options.pop("custom_ops_library") == qk.library_path().name
    assert before == after


def test_the_command(built, fused, tmp_path, capsys):
    assert run(["fuse", str(built), str(tmp_path / "out"), "--for", "genai", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["output"] == str(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in fused.iterdir()}
    assert run(["fuse", str(fused), str(tmp_path / "again")]) == 2
    assert "names the library" in capsys.readouterr().err


def test_refusals(built, fused, tmp_path):
    with pytest.raises(InputError, match=r"names the library .* already"):
        qk.fuse_folder(fused, tmp_path / "again")
    with pytest.raises(InputError, match="give the folder that it lies in"):
        qk.fuse_folder(built / "model.onnx", tmp_path / "again")
    with pytest.raises(InputError, match="with something in it"):
        qk.fuse_folder(built, fused)
    assert not list(tmp_path.iterdir())
