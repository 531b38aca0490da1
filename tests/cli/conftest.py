"""Files and a shell for the tests of the command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import onnx_ir as ir
import pytest

from qknorm_onnx.cli.main import run
from qknorm_onnx.graph.canonical.qk_norm_node import AttentionInputs, make_attention_node
from qknorm_onnx.graph.model_file import save_model
from qknorm_onnx.graph.passes.attach_bodies import AttachBodiesPass
from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormSpec

SPEC = QKNormSpec(
    attention=AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=0.25, is_causal=True),
    norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def command(capsys):
    """`command("inspect", path)` -> exit code and what was printed."""

    def call(*arguments):
        capsys.readouterr()  # what the test itself printed
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture
def fused_file(tmp_path) -> Path:
    """A model that is one canonical node."""
    return write_model(tmp_path / "fused.onnx", SPEC)


@pytest.fixture
def plain_file(tmp_path) -> Path:
    """A model whose attention has no QK norm."""
    return write_model(tmp_path / "plain.onnx", dataclasses.replace(SPEC, norm=NormSpec()))


def write_model(path: Path, spec: QKNormSpec) -> Path:
    widths = {"query": 64, "key": 32, "value": 32}
    inputs = {
        name: ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", "seq", width]))
        for name, width in widths.items()
    }
    node = make_attention_node(spec, AttentionInputs(**inputs), name="layer.0.attention")
    node.outputs[0].name = "y"
    graph = ir.Graph(list(inputs.values()), [node.outputs[0]], nodes=[node], opset_imports={"": 20, "ai.qknorm": 1}, name="g")
    model = ir.Model(graph, ir_version=10)
    AttachBodiesPass()(model)
    save_model(model, path)
    return path
