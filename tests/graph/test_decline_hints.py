"""Every refusal says what would make it match, or that it is no QK-Norm attention."""

from __future__ import annotations

import ast
import pathlib

import onnx_ir as ir
import pytest

from tests.graph.zoo_export import exported, fused

RECOGNISE = pathlib.Path(__file__).resolve().parents[2] / "qknorm_onnx" / "graph"
LOOKALIKES = ["blt_cross_NOT_qknorm", "deepseek_v32_indexer_NOT_attention", "h_batchnorm_eval", "h_dynamic_tanh", "olmoe_clip"]


def refusals():
    """(file, line, the hint's expression) of each place that makes a `Unreadable`."""
    for path in sorted(RECOGNISE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Unreadable":
                hint = node.args[2] if len(node.args) > 2 else None
                hint = next((word.value for word in node.keywords if word.arg == "hint"), hint)
                yield f"{path.name}:{node.lineno}", hint


def test_every_refusal_in_the_source_has_a_hint():
    found = list(refusals())
    assert len(found) > 50
    assert not [place for place, hint in found if hint is None or (isinstance(hint, ast.Constant) and not hint.value)]


@pytest.mark.parametrize("name", LOOKALIKES)
def test_refusals_of_look_alikes_have_hints(zoo, name):
    _, report = fused(exported(zoo, name).model)
    assert not report.fused or report.declined
    for miss in report.declined:
        assert miss.hint and miss.hint != miss.reason and miss.node


def test_what_is_no_qk_norm_attention_is_called_so(zoo):
    hints = [
        miss.hint for name in ("h_batchnorm_eval", "h_dynamic_tanh") for miss in fused(exported(zoo, name).model)[1].declined
    ]
    assert hints and all("not QK-Norm attention" in hint for hint in hints)


REPEATED = """<ir_version: 10, opset_import: ["" : 20]>
g (float[b,4,s,8] q, float[b,2,s,8] k, float[b,4,s,8] v, float[8] w) => (float[b,4,s,8] y)
{
  qn = LayerNormalization<axis = -1>(q, w)
  kn = LayerNormalization<axis = -1>(k, w)
  times = Constant<value = int64[4] {1, 2, 1, 1}>()
  kr = Tile(kn, times)
  kt = Transpose<perm = [0, 1, 3, 2]>(kr)
  l = MatMul(qn, kt)
  p = Softmax(l)
  y = MatMul(p, v)
}
"""


def test_heads_that_are_repeated_in_blocks_are_told_from_neighbours():
    miss = fused(ir.from_onnx_text(REPEATED))[1].declined[0]
    assert "modulo" in miss.reason and "repeat_interleave" in miss.hint


def test_a_static_cache_is_named():
    text = REPEATED.replace("Tile(kn, times)", "ScatterND(buffer, place, kn)").replace(
        "float[8] w)", "float[8] w, float[b,4,s,8] buffer, int64[b,1] place)"
    )
    miss = fused(ir.from_onnx_text(text))[1].declined[0]
    assert "static cache" in miss.reason and "DynamicCache" in miss.hint
