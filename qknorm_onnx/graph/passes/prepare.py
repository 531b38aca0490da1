"""Makes a model walkable for the recognisers without changing what it computes."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.optimizer import fold_constants_ir

from qknorm_onnx.graph.passes.derive_shapes import DeriveShapesPass
from qknorm_onnx.graph.passes.inline_functions import inline_functions
from qknorm_onnx.graph.passes.mend_boolean_choices import MendBooleanChoicesPass
from qknorm_onnx.graph.passes.mend_rotary_tables import MendRotaryTablesPass
from qknorm_onnx.graph.passes.open_products import OpenProductsPass
from qknorm_onnx.graph.passes.open_writes import OpenWritesPass
from qknorm_onnx.graph.passes.remove_identities import RemoveIdentitiesPass
from qknorm_onnx.graph.passes.undo_optimizer import CloseSoftmaxPass, ReduceTransposedPass
from qknorm_onnx.spec.signature import DOMAIN

# Results of constant folding that are larger stay computed: a mask or table for all positions does not belong into a file.
LARGEST_FOLDED = 1 << 16


# Equal constants are made one up to this many values (axes, shapes, bounds), so that equal computations are seen to be
# equal; not larger ones, since two weights that happen to be equal are still two weights.
LARGEST_SHARED = 8


class PreparePass(ir.passes.InPlacePass):
    """Inlines functions, folds small constants, removes identities and duplicates, derives shapes, opens products and
    writes, closes softmaxes, reduces transposed tensors in place of transposing what is
    reduced, and mends rotary tables and choices between truth values.

    After a call, `kept` says of each called function that stays one why that is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: tuple[str, ...] = ()

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run on `model` in place."""
        before = _fingerprint(model)
        _sort(model)
        self.kept = inline_functions(model, lambda function: function.domain != DOMAIN).kept
        RemoveIdentitiesPass()(model)
        derive = DeriveShapesPass()
        derive(model)
        derived = _wiring(model)
        fold_constants_ir(model, output_size_limit=LARGEST_FOLDED, should_fold=_may_fold)
        RemoveIdentitiesPass()(model)
        common.RemoveUnusedNodesPass()(model)
        if not derive.settled or _wiring(model) != derived:
            DeriveShapesPass()(model)
        OpenProductsPass()(model)
        OpenWritesPass()(model)
        CloseSoftmaxPass()(model)
        ReduceTransposedPass()(model)
        MendBooleanChoicesPass()(model)
        MendRotaryTablesPass()(model)
        share_equal_nodes(model)
        return ir.passes.PassResult(model, _fingerprint(model) != before)


def _sort(model: ir.Model) -> None:
    """Put each node behind those whose results it reads, which converters to float16 do not; what is in order stays."""
    for graph in model.graphs():
        behind = {value: place for place, node in enumerate(graph) for value in node.outputs}
        if any(behind.get(value, -1) >= place for place, node in enumerate(graph) for value in node.inputs if value is not None):
            graph.sort()


def _may_fold(node: ir.Node) -> bool | None:
    """Not texts: folded, they would be of a type that cannot be written. None leaves the decision to the folding."""
    texts = any(value is not None and value.dtype == ir.DataType.STRING for value in (*node.inputs, *node.outputs))
    return False if texts else None


def share_equal_nodes(model: ir.Model) -> None:
    """Make nodes that compute the same from the same inputs one node, small constants included."""
    common.DeduplicateInitializersPass(size_limit=LARGEST_SHARED)(model)
    common.CommonSubexpressionEliminationPass()(model)


def _wiring(model: ir.Model) -> list[object]:
    """The nodes of the graphs and what they read; where it is the same, shapes need not be derived again."""
    return [item for graph in model.graphs() for node in graph for item in (node, *node.inputs)]


def _fingerprint(model: ir.Model) -> tuple[object, ...]:
    """What the steps above may change, bodies included: nodes, their inputs, results, and known shapes.

    It holds the values themselves: a number in place of a value could be given again to a new one.
    """
    graphs = [*model.graphs(), *(function.graph for function in model.functions.values())]
    return tuple(
        (
            tuple((node.domain, node.op_type, *node.inputs) for node in graph),
            tuple(graph.outputs),
            tuple(str(value.shape) for node in graph for value in node.outputs),
        )
        for graph in graphs
    )
