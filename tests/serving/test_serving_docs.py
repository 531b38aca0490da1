"""The programs of docs/serving-onnxruntime.md run as they stand there, on the example model."""

from __future__ import annotations

import re

import pytest

import qknorm_onnx as qk

PROMPT = "This function "


@pytest.fixture(scope="module")
def example(request, tmp_path_factory):
    """A working directory in which OUT is the folder of the example model."""
    place = tmp_path_factory.mktemp("docs")
    qk.export_folder(request.config.rootpath / "examples" / "byte_qwen3", place / "OUT", require_fusion=True)
    return place


def blocks(request):
    text = (request.config.rootpath / "docs" / "serving-onnxruntime.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_every_python_program_runs_and_says_the_same(request, example, monkeypatch, capsys):
    monkeypatch.chdir(example)
    genai, sampled, plain = blocks(request)
    expected = qk.generate("OUT", PROMPT, max_new_tokens=60, runtime="onnxruntime").texts[0]
    assert "function" in expected or " the " in expected, "it is trained text"
    exec(compile(plain, "plain", "exec"), {})
    assert capsys.readouterr().out == expected + "\n"
    exec(compile(sampled, "sampled", "exec"), {})
    assert "tokens/s" in capsys.readouterr().out
    exec(compile(genai, "genai", "exec"), {})
    without_mark = qk.generate("OUT", [list(PROMPT.encode())], max_new_tokens=200 - len(PROMPT)).texts[0]
    assert capsys.readouterr().out == PROMPT + without_mark + "\n"


def test_the_plain_program_is_short(request):
    assert len([line for line in blocks(request)[2].splitlines() if line.strip()]) <= 25
