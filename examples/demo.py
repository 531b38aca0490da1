"""The whole road on a small trained model: export, one node per attention, proven equal, the same text from both sides.

Run with `make demo`, or `python examples/demo.py` in an environment with the package and its extras cpu, torch and hf.
Exits with 1 if anything that it shows is not as it should be.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from byte_text import DOCUMENT_MARK, decode, encode
from rich.console import Console

import qknorm_onnx as qk
from qknorm_onnx.cli.fusion_tables import print_report
from qknorm_onnx.runtime.generation import generate
from qknorm_onnx.runtime.placement import node_placements
from qknorm_onnx.torch_export.load import load_source

MODEL_FOLDER = Path(__file__).parent / "byte_qwen3"
PROMPTS = ("This function ", "If the file ")
NEW_BYTES = 100


def main() -> int:
    """Show the three results; 0 where all hold."""
    console = Console()
    source = load_source(str(MODEL_FOLDER), with_past=True)

    console.rule("1. Export: one node per attention")
    program = qk.export(source.module, source.args, source.kwargs, dynamic_shapes=source.dynamic_shapes)
    print_report(console, program.report)
    for placement in node_placements(program):
        how = f"{placement.runs_in} ({placement.kernel})" if placement.kernel else f"{placement.runs_in}: {placement.reason}"
        console.print(f"{placement.name} runs in its {how}", highlight=False, markup=False)

    console.rule("2. Parity with PyTorch, judged against float64")
    report = qk.validate(program, source.module, source.args, source.kwargs, dtypes=("float32", "float16", "bfloat16"))
    console.print(report)
    console.print(report.summary(), highlight=False)

    console.rule("3. The same text from PyTorch and from onnxruntime")
    same = show_texts(console, program)
    return 0 if program.report.complete and report.passed and same else 1


def show_texts(console: Console, program: qk.Program) -> bool:
    """Greedy continuations of the prompts by both; whether they are the same, byte for byte."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "byte_qwen3.onnx"
        program.save(path)
        session = qk.create_session(path)
        console.print(f"the file is {path.stat().st_size / 1e6:.1f} MB", highlight=False)
    model = torch_model()
    same = True
    for prompt in PROMPTS:
        ids = np.array([[DOCUMENT_MARK, *encode(prompt)]], dtype=np.int64)
        by_torch = torch_continuation(model, ids)
        by_onnxruntime = generate(session, ids, max_new_tokens=NEW_BYTES)
        equal = bool(np.array_equal(by_torch, by_onnxruntime))
        same = same and equal
        for name, tokens in (("PyTorch", by_torch), ("onnxruntime", by_onnxruntime)):
            console.print(f"{name:>12}: {decode(tokens[0, 1:].tolist())!r}", highlight=False, markup=False)
        console.print("the same" if equal else "DIFFERENT")
    return same


def torch_model() -> torch.nn.Module:
    """The model as transformers loads it, untouched by the export."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL_FOLDER, dtype=torch.float32).eval()


def torch_continuation(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    """Greedy decoding without a cache, the plainest way there is."""
    tokens = torch.from_numpy(ids)
    with torch.no_grad():
        for _ in range(NEW_BYTES):
            following = model(input_ids=tokens, use_cache=False).logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, following], dim=1)
    return tokens.numpy()


if __name__ == "__main__":
    sys.exit(main())
