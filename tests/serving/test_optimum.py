"""optimum-onnx 0.1.0 loads our folder and generates transformers' tokens; it needs an environment of its own."""

from __future__ import annotations

import json
import subprocess

import pytest

import qknorm_onnx as qk
from tests.serving.reference import cut, reference
from tests.serving.tiny_models import DOCUMENT
from tools.runtimes.environments import install

PROMPTS = ("Hello there, friend", "a", "The quick brown fox jumps over")
NEW = 40
PROGRAM = """
import json, sys
import onnxruntime, torch
from optimum.onnxruntime import ORTModelForCausalLM

folder, library, rows, new, pad = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
options = onnxruntime.SessionOptions()
options.register_custom_ops_library(library)
length = max(map(len, rows))
ids = torch.tensor([[pad] * (length - len(row)) + row for row in rows])
mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
for binding in (False, True):
    model = ORTModelForCausalLM.from_pretrained(
        folder, file_name="model.onnx", session_options=options, use_io_binding=binding, local_files_only=True
    )
    made = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)
    print("TOKENS", json.dumps(made[:, length:].tolist()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("logits", ["last", "all"])
def test_generates_from_the_folder(exported, request, logits):
    root = request.config.rootpath
    install(root / "requirements" / "optimum.txt", root / "build" / "optimum")
    made = exported("qwen3", logits=logits)
    rows = [list(prompt.encode()) for prompt in PROMPTS]
    arguments = [made.folder, qk.library_path(), json.dumps(rows), NEW, DOCUMENT]
    command = [root / "build" / "optimum" / "bin" / "python", "-c", PROGRAM, *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line.removeprefix("TOKENS ")) for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    expected = reference(made.model, PROMPTS, NEW)
    for tokens in found:
        assert [cut(row) for row in tokens] == expected
    assert len(found) == 2
