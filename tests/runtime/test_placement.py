"""Where nodes run: what the session says, not what was hoped for."""

from __future__ import annotations

import json

import onnx
import onnx_ir as ir
import pytest

import qknorm_onnx as qk
from qknorm_onnx import custom_ops
from qknorm_onnx.graph.canonical.qk_norm_node import AttentionInputs, RotaryInputs, make_attention_node, make_rotary_node
from qknorm_onnx.graph.passes.attach_bodies import AttachBodiesPass
from qknorm_onnx.runtime.placement import node_placements
from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormRotarySpec, QKNormSpec

pytest.importorskip("onnxruntime")

SPEC = QKNormSpec(
    attention=AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=0.5, is_causal=True),
    norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6),
)
PREPARATION = QKNormRotarySpec(num_heads=4, kind="rms", epsilon=1e-6)
WIDTHS = {"query": 64, "key": 32, "value": 32}


def two_nodes(dtype: ir.DataType = ir.DataType.FLOAT, names: tuple[str, str] = ("prepare", "attend")) -> ir.Model:
    """A `QKNormRotary` whose result is the query of a `QKNormAttention`."""
    inputs = {n: ir.Value(name=n, type=ir.TensorType(dtype), shape=ir.Shape(["b", "s", w])) for n, w in WIDTHS.items()}
    prepare = make_rotary_node(PREPARATION, RotaryInputs(x=inputs["query"]), name=names[0])
    attend = make_attention_node(SPEC, AttentionInputs(**inputs | {"query": prepare.outputs[0]}), name=names[1])
    prepare.outputs[0].name, attend.outputs[0].name = "prepared", "y"
    graph = ir.Graph(
        list(inputs.values()), [attend.outputs[0]], nodes=[prepare, attend], opset_imports={"": 20, "ai.qknorm": 1}, name="g"
    )
    model = ir.Model(graph, ir_version=10)
    AttachBodiesPass()(model)
    return model


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16], ids=lambda kind: kind.name)
def test_native_nodes_name_their_instructions_and_type(dtype: ir.DataType) -> None:
    placements = node_placements(two_nodes(dtype))
    assert [(item.name, item.op_type) for item in placements] == [("prepare", "QKNormRotary"), ("attend", "QKNormAttention")]
    expected = {"FLOAT": "float32", "FLOAT16": "float16", "BFLOAT16": "bfloat16"}[dtype.name]
    for item in placements:
        assert item.runs_in == "native kernel"
        assert item.execution_provider == "CPUExecutionProvider"
        assert item.kernel == f"{custom_ops.build_info()['instruction_set']}, {expected}"
        assert not item.reason


def test_nodes_without_names_are_counted_not_guessed() -> None:
    model = two_nodes()
    for node in model.graph:
        node.name = ""
    assert [item.runs_in for item in node_placements(model)] == ["native kernel", "native kernel"]


def test_without_the_library_the_reason_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise FileNotFoundError("the native library libx.so is not in somewhere")

    monkeypatch.setattr(custom_ops, "library_path", missing)
    for item in node_placements(two_nodes()):
        assert item.runs_in == "function body"
        assert "libx.so is not in" in item.reason
        assert item.execution_provider == ""


def test_one_missing_kernel_moves_all_nodes_and_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {("QKNormAttention", "cpu"): ("float32",)}
    monkeypatch.setattr("qknorm_onnx.runtime.native_kernels.KERNEL_DTYPES", kept)
    for item in node_placements(two_nodes()):
        assert item.runs_in == "function body"
        assert "no cpu kernel of QKNormRotary for float32 (node prepare)" in item.reason


def test_what_the_session_says_counts_not_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan says native; a session that was made without the library must still be reported as it is."""
    from qknorm_onnx.runtime import placement

    plain = placement.create_session
    monkeypatch.setattr(placement, "create_session", lambda *args, **kwargs: plain(*args, **kwargs, native_kernels=False))
    for item in node_placements(two_nodes()):
        assert item.runs_in == "function body"
        assert "did not keep the node" in item.reason


def test_a_session_that_cannot_say_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    owner = next(kind for kind in onnxruntime.InferenceSession.__mro__ if "get_provider_graph_assignment_info" in vars(kind))
    monkeypatch.delattr(owner, "get_provider_graph_assignment_info")
    for item in node_placements(two_nodes()):
        assert item.runs_in == "unknown"
        assert "native kernel is expected" in item.reason


def test_nodes_in_subgraphs_are_placed_too() -> None:
    inner = ir.to_proto(two_nodes())
    helper = onnx.helper
    types = list(inner.graph.value_info)
    then_branch = helper.make_graph(list(inner.graph.node), "then", [], [inner.graph.output[0]], value_info=types)
    z = helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, ["b", "s", 64])
    else_branch = helper.make_graph([helper.make_node("Identity", ["query"], ["z"])], "else", [], [z])
    node = helper.make_node("If", ["condition"], ["out"], then_branch=then_branch, else_branch=else_branch, name="if")
    condition = helper.make_tensor_value_info("condition", onnx.TensorProto.BOOL, [])
    out = helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, ["b", "s", 64])
    graph = helper.make_graph([node], "g", [*inner.graph.input, condition], [out])
    model = helper.make_model(
        graph, opset_imports=inner.opset_import, ir_version=inner.ir_version, functions=list(inner.functions)
    )
    assert [item.runs_in for item in node_placements(model)] == ["native kernel", "native kernel"]


def test_a_model_without_our_nodes() -> None:
    proto = onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 20]> g (float[N] x) => (float[N] y) { y = Abs(x) }')
    assert node_placements(proto) == ()


def test_a_provider_that_is_not_there() -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has the CUDA provider")
    with pytest.raises(qk.InputError, match="has no CUDAExecutionProvider"):
        node_placements(two_nodes(), provider="cuda")


def test_inspect_prints_the_placement(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    from qknorm_onnx.cli.main import run

    path = tmp_path / "model.onnx"
    ir.save(two_nodes(), path)
    assert run(["inspect", str(path), "--placement"]) == 0
    assert "2 of 2 nodes run in the native kernel" in capsys.readouterr().out
    assert run(["inspect", str(path), "--placement", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [item["runs_in"] for item in found["placement"]] == ["native kernel", "native kernel"]
    assert run(["inspect", str(path), "--json"]) == 0
    assert "placement" not in json.loads(capsys.readouterr().out)
    assert run(["inspect", str(path), "--provider", "tpu"]) == 2


def test_under_an_old_onnxruntime_the_nodes_run_in_their_bodies(
    monkeypatch, tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no report of where nodes are, and needs none: without the library there is nothing else that runs them."""
    import onnxruntime

    from qknorm_onnx.cli.main import run
    from qknorm_onnx.runtime import native_kernels

    owner = next(kind for kind in onnxruntime.InferenceSession.__mro__ if "get_provider_graph_assignment_info" in vars(kind))
    monkeypatch.delattr(owner, "get_provider_graph_assignment_info")
    monkeypatch.setattr(native_kernels, "release_of", lambda _onnxruntime: (1, 23))
    path = tmp_path / "model.onnx"
    ir.save(two_nodes(), path)
    for item in node_placements(path):
        assert item.runs_in == "function body"
        assert item.reason.startswith("the kernel library needs onnxruntime 1.24 or newer, and this is")
    assert run(["inspect", str(path), "--placement", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["placement"]
    assert [item["runs_in"] for item in found] == ["function body", "function body"]
