"""RotaryEmbedding with one table for all of a batch: valid by its author's intent, refused by onnxruntime."""

from __future__ import annotations

import onnx_ir as ir

from qknorm_onnx.graph.rewrite.node_builder import NodeBuilder


class MendRotaryTablesPass(ir.passes.InPlacePass):
    """Expands tables (1, S, W) of ONNX's RotaryEmbedding to the batch of its input.

    torch.onnx writes such nodes at opset 23; onnxruntime runs them at batch 1 only. Shapes must have been inferred.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run on `model` in place."""
        mended = [_mend(node) for graph in (model.graph, *model.graph.subgraphs()) for node in list(graph)]
        return ir.passes.PassResult(model, any(mended))


def _mend(node: ir.Node) -> bool:
    if (node.domain, node.op_type) != ("", "RotaryEmbedding") or len(node.inputs) != 3:
        return False
    x, tables = node.inputs[0], node.inputs[1:]
    if x is None or x.shape is None or x.shape[0] == 1 or node.graph is None:
        return False
    if any(table is None or table.shape is None or len(table.shape) != 3 or table.shape[0] != 1 for table in tables):
        return False
    builder = NodeBuilder(f"{node.outputs[0].name}/batch")
    batch = builder.apply(
        "Shape", [x], dims=[1], attributes=[ir.AttrInt64("start", 0), ir.AttrInt64("end", 1)], dtype=ir.DataType.INT64
    )
    target = builder.apply("Concat", [batch, builder.integers([1, 1], "ones")], dims=[3], attributes=[ir.AttrInt64("axis", 0)])
    for index, table in enumerate(tables, start=1):
        assert table is not None and table.shape is not None
        expanded = builder.apply("Expand", [table, target], dims=[x.shape[0], *table.shape[1:]])
        node.replace_input_with(index, expanded)
    builder.insert_before(node)
    return True
