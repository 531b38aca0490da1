"""The column of attention sinks that is appended to the scores, at any number of new tokens."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from qknorm_onnx.graph.recognise.attention.sinks import read_sink_column

TEXT = """<ir_version: 10, opset_import: ["" : 20]>
g (float[batch,4,{s},t] scores, float[{sinks}] sinks, int64[4] dims) => (float[batch,4,{s},u] logits)
  <float[batch,4,{s},1] column>
{{
  column = Expand(sinks, dims)
  logits = Concat<axis=-1>(scores, column)
}}"""


def read(new_tokens, sinks="1,4,1,1"):
    graph = ir.from_onnx_text(TEXT.format(s=new_tokens, sinks=sinks)).graph
    found = read_sink_column(next(node for node in graph if node.op_type == "Concat"))
    return found and (found[0].name, found[1].value.name, found[1].layout)


@pytest.mark.parametrize("new_tokens", ["s", 7, 1])
def test_one_sink_for_each_head(new_tokens):
    assert read(new_tokens) == ("scores", "sinks", ("", "H", "", ""))


@pytest.mark.parametrize("sinks", ["1,4,s,1", "batch,4,1,1"])
def test_sinks_that_depend_on_row_or_token_are_none(sinks):
    assert read("s", sinks) is None
