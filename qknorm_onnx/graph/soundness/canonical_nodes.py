"""Nodes of our own domain: what their attributes, types and known shapes decide is refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.canonical.qk_norm_node import check_known_shapes, is_attention_node, is_rotary_node
from qknorm_onnx.spec.qk_norm_spec import SpecError
from qknorm_onnx.spec.signature import ATTENTION_OUTPUTS, DOMAIN, ROTARY_OUTPUTS


def check_canonical_nodes(model: ir.Model, label: str) -> None:
    """Raises InputError where a node of `ai.qknorm` contradicts itself; its function, if any, is not looked at."""
    scopes = [model.graph, *(function.graph for function in model.functions.values() if function.domain != DOMAIN)]
    for scope in scopes:
        for node in scope.all_nodes():
            # In a function an attribute may be the caller's: known once the function is written out.
            if node.domain == DOMAIN and not any(attribute.is_ref() for attribute in node.attributes.values()):
                _guarded(node, label, _check_node)


def _check_node(node: ir.Node) -> None:
    if not (is_attention_node(node) or is_rotary_node(node)):
        raise SpecError(f"{DOMAIN} has no operator {node.op_type!r}: install the qknorm-onnx that wrote the file")
    outputs, most = len(node.outputs), len(ATTENTION_OUTPUTS if is_attention_node(node) else ROTARY_OUTPUTS)
    if not 1 <= outputs <= most:
        raise SpecError(f"it has {outputs} outputs; a {node.op_type} has 1 to {most}")
    check_known_shapes(node)


def _guarded(node: ir.Node, label: str, check: Callable[[ir.Node], None]) -> None:
    try:
        check(node)
    except SpecError as error:
        raise InputError(f"{label}: node {node.name!r} ({node.op_type}): {error}") from error
