"""Where canonical nodes may be in a model, which there are, and the ONNX opset around them."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from qknorm_onnx.graph.canonical.qk_norm_node import is_attention_node, is_rotary_node
from qknorm_onnx.spec.qk_norm_spec import SpecError
from qknorm_onnx.spec.signature import DOMAIN


def scopes(model: ir.Model) -> Iterator[ir.Graph | ir.Function]:
    """The graph and the functions that are not bodies of canonical nodes: wherever a canonical node may be."""
    yield model.graph
    yield from [function for function in model.functions.values() if function.domain != DOMAIN]


def canonical_nodes(scope: ir.Graph | ir.Function) -> list[ir.Node]:
    """The canonical nodes of a graph or function, those in subgraphs of If, Loop and Scan included, in order."""
    return [node for node in scope.all_nodes() if is_attention_node(node) or is_rotary_node(node)]


def onnx_opset(model: ir.Model) -> int:
    """The version of the ONNX operators that the model imports. Raises SpecError if it imports none."""
    version = model.opset_imports.get("")
    if version is None:
        raise SpecError("the model imports no ONNX opset; add one of version 18 or newer")
    return version
