"""Bad input ends in one clear line, exit code 2, and no file."""

from __future__ import annotations

import subprocess
import sys

import pytest


def assert_one_line(outcome, *parts, code=2):
    assert outcome.code == code, outcome
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1, outcome.err
    assert outcome.err.startswith("error: ")
    for part in parts:
        assert part in outcome.err


@pytest.mark.parametrize(
    "content", [b"this is not a model", b"", b"\x08\x0a" + b"\x00" * 40, b"PK\x03\x04zip"], ids=["text", "empty", "zeros", "zip"]
)
@pytest.mark.parametrize("verb", ["fuse", "inspect"])
def test_not_an_onnx_file(command, tmp_path, content, verb):
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(content)
    out = tmp_path / "out.onnx"
    assert_one_line(command(verb, bad, *([out] if verb == "fuse" else [])), "bad.onnx")
    assert list(tmp_path.iterdir()) == [bad]


def test_no_such_file(command, tmp_path):
    assert_one_line(command("inspect", tmp_path / "none.onnx"), "no such file")
    assert_one_line(command("fuse", tmp_path / "none.onnx", tmp_path / "out.onnx"), "no such file")
    assert_one_line(command("validate", tmp_path / "none.onnx", "package.module:factory"), "no such file")


def test_a_folder_in_place_of_a_file(command, tmp_path):
    assert_one_line(command("inspect", tmp_path), "is a folder")


@pytest.mark.parametrize("option", [("--target", "tensorrt"), ("--provider", "tpu")])
def test_unknown_target_or_provider(command, fused_file, tmp_path, option):
    out = tmp_path / "out.onnx"
    assert_one_line(command("fuse", fused_file, out, *option), option[1], "choose one of")
    assert_one_line(command("export", "package.module:factory", out, *option), option[1], "choose one of")
    assert not out.exists()


def test_output_folder_does_not_exist(command, fused_file, tmp_path):
    assert_one_line(command("fuse", fused_file, tmp_path / "none" / "out.onnx"), "none")
    assert not (tmp_path / "none").exists()


def test_wrong_usage(command):
    assert_one_line(command("fuse"), "MODEL", "--help")
    assert_one_line(command("fuze", "a", "b"), "fuze")
    assert_one_line(command("inspect", "a", "--no-such-option"), "--no-such-option")


def test_missing_external_weights(command, fused_file, tmp_path):
    import onnx

    model = onnx.load(fused_file)
    weight = onnx.numpy_helper.from_array(__import__("numpy").ones(1000, dtype="float32"), "w")
    model.graph.initializer.append(weight)
    path = tmp_path / "external.onnx"
    onnx.save(model, path, save_as_external_data=True, location="external.data", size_threshold=0)
    (tmp_path / "external.data").unlink()
    assert_one_line(command("inspect", path), "external.data", "missing")


BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
from qknorm_onnx.cli.main import run
sys.exit(run({arguments!r}))
"""


def run_without(missing, *arguments):
    script = BLOCK.format(missing=missing, arguments=[str(argument) for argument in arguments])
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)


def test_missing_extras(fused_file, tmp_path):
    out = tmp_path / "out.onnx"
    for arguments in (("export", "my_models:make", out), ("validate", fused_file, "my_models:make")):
        done = run_without("torch", *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1
        assert "pip install 'qknorm-onnx[torch,hf]'" in done.stderr
    assert not out.exists()
    for missing in ("torch", "onnxruntime"):
        assert run_without(missing, "inspect", fused_file).returncode == 0
        assert run_without(missing, "fuse", fused_file, out).returncode == 0
    done = run_without("onnxruntime", "inspect", fused_file, "--placement")
    assert done.returncode == 2
    assert "pip install 'qknorm-onnx[cpu]'" in done.stderr


@pytest.mark.parametrize("source", ["no_such_package.module:factory", "json:no_such_function", "neither-nor", "os:getcwd"])
def test_source_that_is_none(command, tmp_path, source):
    pytest.importorskip("torch")
    assert_one_line(command("export", source, tmp_path / "out.onnx"))
    assert not (tmp_path / "out.onnx").exists()


def test_damaged_weights(command, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = transformers.Qwen3Config(**sizes, **heads)
    model = transformers.Qwen3ForCausalLM(config)
    for case in ("nan", "missing"):
        folder = tmp_path / case
        state = {name: value.clone() for name, value in model.state_dict().items()}
        if case == "nan":
            state["model.layers.0.self_attn.q_norm.weight"][3] = torch.nan
        else:
            del state["model.layers.0.self_attn.k_norm.weight"]
        model.save_pretrained(folder, state_dict=state)
        named = "q_norm" if case == "nan" else "k_norm"
        assert_one_line(command("export", folder, tmp_path / "out.onnx"), named)
        assert not (tmp_path / "out.onnx").exists()
