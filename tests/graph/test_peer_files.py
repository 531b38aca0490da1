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
    assert len(report.fused) == 2 and not report.declined and not report.refused
    assert not any(node.op_type == "MultiHeadAttention" for node in model.graph)
    assert_parity(model, source, sizes={"batch": 3, "seq": 7})


@pytest.mark.parametrize("name", ["qwen3", pytest.param("phi_qk", marks=pytest.mark.slow)])
def test_after_the_optimiser_of_onnxruntime(zoo, tmp_path, name):
    optimizer = pytest.importorskip("onnxruntime.transformers.optimizer")
    source = exported(zoo, name)
    path, optimised = tmp_path / "model.onnx", tmp_path / "optimised.onnx"
    ir.save(source.model.clone(), path)
    peer = optimizer.optimize_model(str(path), model_type="gpt2", num_heads=4, hidden_size=64, opt_level=1, use_gpu=False)
    peer.save_model_to_file(str(optimised))
    model, report = fused(ir.load(optimised))
    assert [item.note for item in report.fused] == ["", ""] and not report.declined and not report.refused
    assert_parity(model, source, sizes={"batch": 3, "seq": 7})


GROUP_QUERY = """<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
g (float[b,s,32] q, float[b,s,16] k, float[b,s,16] v, float[b,2,p,8] pk, float[b,2,p,8] pv, int32[b] lengths, int32 total,
   float[8] w) => (float[b,s,32] y, float[b,2,t,8] nk, float[b,2,t,8] nv)
{
  shape = Constant<value = int64[4] {0, 0, -1, 8}>()
  flat = Constant<value = int64[3] {0, 0, -1}>()
  q4 = Reshape(q, shape)
  qn = NORM(q4, w)
  q3 = Reshape(qn, flat)
  k4 = Reshape(k, shape)
  kn = NORM(k4, w)
  k3 = Reshape(kn, flat)
  y, nk, nv = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2>(q3, k3, v, pk, pv, lengths, total)
}
"""


@pytest.mark.parametrize(("norm", "declined"), [("LayerNormalization<axis=-1>", True), ("Mul", False)])
def test_group_query_attention_declines_only_behind_norms(norm, declined):
    model = ir.from_onnx_text(GROUP_QUERY.replace("NORM", norm))
    result, report = fused(model)
    assert not report.fused and [node.op_type for node in result.graph].count("GroupQueryAttention") == 1
    assert bool(report.declined) == declined and bool(report.plain) != declined
    assert not declined or ("cache" in report.declined[0].reason and report.declined[0].hint)
