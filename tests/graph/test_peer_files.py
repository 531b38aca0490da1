"""Files that other tools wrote: onnxscript's fusions for onnxruntime, and onnxruntime's own optimiser."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from tests.graph.zoo_export import assert_parity, exported, fused


def test_after_fusions_of_onnxscript(zoo):
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    source = exported(zoo, "qwen3")
    copy = source.model.clone()
    result = optimize_for_ort(copy)
    peer = result[0] if isinstance(result, tuple) else result
    assert any(node.op_type == "MultiHeadAttention" for node in peer.graph)
    model, report = fused(peer)
    assert not report.declined and not report.refused
    assert [item.note for item in report.fused] == ["proven in float32: no float64 kernel for MultiHeadAttention"] * 2
    assert not any(node.op_type == "MultiHeadAttention" for node in model.graph)
    assert_parity(model, source, sizes={"batch": 3, "seq": 7})


@pytest.mark.parametrize("name", ["qwen3", pytest.param("phi_qk", marks=pytest.mark.slow)])
def test_after_the_optimiser_of_onnxruntime(zoo, tmp_path, name):
    from onnxruntime.transformers import optimizer

    source = exported(zoo, name)
    path, optimised = tmp_path / "model.onnx", tmp_path / "optimised.onnx"
    ir.save(source.model.clone(), path)
    peer = optimizer.optimize_model(str(path), model_type="gpt2", num_heads=4, hidden_size=64, opt_level=1, use_gpu=False)
    peer.save_model_to_file(str(optimised))
    model, report = fused(ir.load(optimised))
    assert [item.note for item in report.fused] == ["", ""] and not report.declined and not report.refused
    assert_parity(model, source, sizes={"batch": 3, "seq": 7})
