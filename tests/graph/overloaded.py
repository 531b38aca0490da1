"""Files as version 0.1.0 wrote them: all bodies of an operator under its own name, told apart by their overload."""

from __future__ import annotations

import onnx_ir as ir

from qknorm_onnx.graph.canonical.qk_norm_node import canonical_operator


def with_overloads(model: ir.Model) -> ir.Model:
    """A copy of `model` with overloads instead of numbered names."""
    copy = model.clone()
    names = {node.op_type: canonical_operator(node) for node in copy.graph.all_nodes() if canonical_operator(node)}
    for node in copy.graph.all_nodes():
        if node.op_type in names:
            node.overload, node.op_type = f"body_of_{node.op_type.lower()}", names[node.op_type]
    for function in list(copy.functions.values()):
        if function.name in names:
            del copy.functions[function.identifier()]
            function.overload, function.name = f"body_of_{function.name.lower()}", names[function.name]
            copy.functions[function.identifier()] = function
    return copy
