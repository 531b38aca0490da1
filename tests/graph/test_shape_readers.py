"""Readers of shapes get the same sizes from tensors that are known where they stand."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from qknorm_onnx.graph.rewrite.shape_readers import redirect_shape_readers
from tests.graph.zoo_export import assert_in_order

TEXT = """<ir_version: 10, opset_import: ["" : 20]>
g (float[{batch},4] x, float[4,4] w) => (float[b,n] y, float[b,4] late) <float[b,4] early, int64[1] size>
{{
  early = Neg(x)
  size = Shape<start=0, end=1>(early)
  late = MatMul(x, w)
  n = Abs(size)
  y = Expand(x, n)
}}"""


def redirected(batch, source):
    model = ir.from_onnx_text(TEXT.format(batch=batch))
    nodes = {node.op_type: node for node in model.graph}
    value = {"late": nodes["MatMul"].outputs[0], "x": model.graph.inputs[0]}[source]
    relieved = redirect_shape_readers([nodes["Neg"]], [value])
    assert_in_order(model)
    reader = nodes["Abs"].inputs[0].producer()
    return bool(relieved), reader.inputs[0].name


def test_a_source_that_is_known_is_read():
    assert redirected("b", "x") == (True, "x")


def test_a_source_that_comes_later_is_not_read():
    assert redirected("b", "late") == (True, "x")  # the graph's input has the same size


@pytest.mark.parametrize("source", ["late", "x"])
def test_without_any_source_the_reader_stays(source):
    assert redirected("other", source) == (False, "early")
