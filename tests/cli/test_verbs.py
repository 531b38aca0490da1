"""What the verbs print, for people and for machines, and their exit codes."""

from __future__ import annotations

import json
import os

import onnx
import pytest

MODULE = """
import torch
import qknorm_onnx as qk

def article():
    torch.manual_seed(0)
    module = qk.QKNormAttention(32, 4).eval()
    return module, (torch.randn(2, 6, 32),), {}, {"x": {0: "batch", 1: "length"}}
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    (tmp_path / "my_models.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_models:article"


def test_inspect_a_fused_file(command, fused_file):
    outcome = command("inspect", fused_file)
    assert outcome.code == 0
    assert "fused 1 of 1" in outcome.out
    assert "4:2 heads" in outcome.out
    found = json.loads(command("inspect", fused_file, "--json").out)
    assert [item["name"] for item in found["fused"]] == ["layer.0.attention"]
    assert found["fused"][0]["spec"]["q_norm"] == "rms"
    assert found["recognised"] == found["declined"] == found["plain"] == []


def test_require_fusion(command, fused_file, plain_file, tmp_path):
    assert command("inspect", fused_file, "--require-fusion").code == 0
    for outcome in (
        command("inspect", plain_file, "--require-fusion"),
        command("fuse", plain_file, tmp_path / "out.onnx", "--require-fusion"),
    ):
        assert outcome.code == 1
        assert "no QK-Norm attention" in outcome.err
    assert not (tmp_path / "out.onnx").exists()
    assert command("fuse", plain_file, tmp_path / "out.onnx").code == 0
    assert (tmp_path / "out.onnx").exists()


def test_fusing_a_fused_file_changes_nothing(command, fused_file, tmp_path):
    once, again = tmp_path / "once.onnx", tmp_path / "again.onnx"
    assert command("fuse", fused_file, once).code == 0
    assert command("fuse", once, again).code == 0
    assert once.read_bytes() == again.read_bytes()


@pytest.mark.parametrize("target", ["ort", "onnx", "primitive"])
def test_inspect_a_lowered_file(command, fused_file, tmp_path, target):
    out, again = tmp_path / "out.onnx", tmp_path / "again.onnx"
    assert command("fuse", fused_file, out, "--target", target).code == 0
    outcome = command("inspect", out, "--require-fusion")
    assert outcome.code == 0, outcome.err
    assert "fused 1 of 1" in outcome.out and "no QK-Norm attention" not in outcome.out
    found = json.loads(command("inspect", out, "--json").out)
    assert found["recognised"] == found["declined"] == []
    (item,) = found["fused"]
    assert item["spec"]["q_norm"] == "rms"
    assert f"lowered earlier to {item['target']}" in item["note"]
    assert command("fuse", out, again, "--target", target, "--require-fusion").code == 0
    assert out.read_bytes() == again.read_bytes()


def test_inspect_does_not_contradict_itself(command, fused_file, tmp_path):
    """A file without our marks, as other tools write it, whose attention would be fused."""
    out = tmp_path / "out.onnx"
    assert command("fuse", fused_file, out, "--target", "onnx").code == 0
    model = onnx.load(out)
    for node in model.graph.node:
        del node.metadata_props[:]
    onnx.save(model, out)
    outcome = command("inspect", out)
    assert "recognised 1 of 1" in outcome.out and "no QK-Norm attention" not in outcome.out
    assert command("inspect", out, "--require-fusion").code == 1


@pytest.mark.parametrize("target", ["custom-op", "primitive"])
def test_fuse_says_what_it_wrote(command, fused_file, tmp_path, target):
    out = tmp_path / "out.onnx"
    found = json.loads(command("fuse", fused_file, out, "--target", target, "--json").out)
    assert found["output"] == str(out)
    assert [item["target"] for item in found["fused"]] == [target]
    onnx.checker.check_model(out, full_check=True)


def test_export_and_validate(command, source, tmp_path):
    out = tmp_path / "article.onnx"
    exported = command("export", source, out, "--json", "--require-fusion")
    assert exported.code == 0, exported.err
    assert len(json.loads(exported.out)["fused"]) == 1
    judged = command("validate", out, source, "--dtypes", "all", "--json")
    assert judged.code == 0, judged.err
    report = json.loads(judged.out)
    assert report["passed"]
    assert {row["dtype"] for row in report["rows"]} == {"float32", "float16", "bfloat16"}
    assert "passed" in command("validate", out, source).out


def test_validate_fails_for_other_weights(command, source, tmp_path):
    out = tmp_path / "article.onnx"
    assert command("export", source, out).code == 0
    model = onnx.load(out)
    for weight in model.graph.initializer:
        array = onnx.numpy_helper.to_array(weight).copy()
        if array.shape == (32, 32):
            array[0] *= 1.01
            weight.CopyFrom(onnx.numpy_helper.from_array(array, weight.name))
    onnx.save(model, out)
    outcome = command("validate", out, source)
    assert outcome.code == 1
    assert "failed" in outcome.out


def test_output_over_a_link_and_over_a_device(command, fused_file, tmp_path):
    real, link = tmp_path / "real.onnx", tmp_path / "link.onnx"
    real.write_bytes(fused_file.read_bytes())
    real.chmod(0o600)
    link.symlink_to(real)
    assert command("fuse", link, link).code == 0
    assert link.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o600
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for bad in (pipe, tmp_path):
        outcome = command("fuse", fused_file, bad)
        assert outcome.code == 2
        assert "is not a file" in outcome.err
    assert pipe.is_fifo()


def test_weights_beside_the_model(command, source, tmp_path, monkeypatch):
    """Wherever it is used from, a model with external data keeps its own weights."""
    out, folder = tmp_path / "article.onnx", tmp_path / "elsewhere"
    assert command("export", source, out).code == 0
    folder.mkdir()
    settings = {"save_as_external_data": True, "location": "w.data", "size_threshold": 0}
    onnx.save(onnx.load(out), tmp_path / "external.onnx", **settings)
    (folder / "w.data").write_bytes(bytes((tmp_path / "w.data").stat().st_size))  # zeros: the wrong weights
    monkeypatch.chdir(folder)
    assert command("validate", "../external.onnx", source).code == 0
    assert command("fuse", "../external.onnx", "fused.onnx").code == 0
    assert sorted(path.name for path in folder.iterdir()) == ["fused.onnx", "w.data"]
    assert command("validate", "fused.onnx", source).code == 0
    (tmp_path / "w.data").write_bytes(b"short")
    outcome = command("inspect", "../external.onnx")
    assert outcome.code == 2
    assert "too short" in outcome.err


def test_doctor(command):
    outcome = command("doctor")
    assert outcome.code == 0
    assert "onnxruntime" in outcome.out
    findings = {finding["name"]: finding for finding in json.loads(command("doctor", "--json").out)["findings"]}
    assert findings["numpy"]["state"] == "ok"
    assert all(finding["mend"] for finding in findings.values() if finding["state"] == "missing")


def test_for_onnxruntime(command, fused_file, tmp_path):
    out = tmp_path / "out.onnx"
    assert "onnxruntime 1.20 or newer" in command("fuse", fused_file, out, "--for-onnxruntime", "1.20").out
    newer = onnx.load(fused_file)
    newer.opset_import[0].version = 24
    del newer.functions[:]
    onnx.save(newer, tmp_path / "newer.onnx")
    refused = command("fuse", tmp_path / "newer.onnx", tmp_path / "none.onnx", "--for-onnxruntime", "1.22")
    assert refused.code == 2 and not (tmp_path / "none.onnx").exists()
    assert "onnxruntime 1.22 cannot load this model, which needs onnxruntime 1.24 or newer (ONNX opset 24)" in refused.err
