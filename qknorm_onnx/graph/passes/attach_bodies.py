"""The pass that gives every canonical node its function body, so that any ONNX runtime can run the file."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from qknorm_onnx.graph.canonical.body_signature import overload_name
from qknorm_onnx.graph.canonical.function_body import attention_body, rotary_body
from qknorm_onnx.graph.canonical.qk_norm_node import (
    is_attention_node,
    node_signature,
    read_attention_node,
    read_rotary_node,
)
from qknorm_onnx.graph.canonical.scopes import canonical_nodes, onnx_opset, scopes
from qknorm_onnx.spec.qk_norm_spec import SpecError
from qknorm_onnx.spec.signature import DOMAIN, VERSION

OVERLOADS_SINCE_IR_VERSION: Final = 10


class AttachBodiesPass(ir.passes.InPlacePass):
    """Makes the function bodies of the model be exactly those that its canonical nodes need.

    1. A node's overload is set to the name of its body; nodes with equal spec and equal input types share one.
    2. Bodies of nodes that are gone are removed; functions of other domains are left alone.
    3. `ai.qknorm` is imported where it is used, and no longer where it is not.
    4. Functions that contain canonical nodes, or call such functions, are inlined: ONNX Runtime (1.32) does not find
       overloaded functions from within functions.

    Raises SpecError where a body cannot be made; the message names the node.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Attach the bodies; `modified` says whether anything had to be changed."""
        before = _state(model)
        _inline_callers(model)
        bodies: dict[ir.OperatorIdentifier, ir.Function] = {}
        for scope in scopes(model):
            used = False
            for node in canonical_nodes(scope):
                used = True
                _attach(node, bodies, opset=onnx_opset(model))
            _import_domain(scope, used)
        kept = {key: function for key, function in model.functions.items() if function.domain != DOMAIN}
        model.functions.clear()
        model.functions.update(kept | bodies)
        if bodies:
            model.graph.opset_imports[DOMAIN] = VERSION
            model.ir_version = max(model.ir_version, OVERLOADS_SINCE_IR_VERSION)
        return ir.passes.PassResult(model, modified=_state(model) != before)


def _inline_callers(model: ir.Model) -> None:
    """Inline the functions through which a canonical node is reached."""
    callers: set[ir.OperatorIdentifier] = set()
    found = True
    while found:
        found = False
        for key, function in model.functions.items():
            reaches = canonical_nodes(function) or any(node.op_identifier() in callers for node in function.all_nodes())
            if function.domain != DOMAIN and key not in callers and reaches:
                callers.add(key)
                found = True
    if callers:
        InlinePass(criteria=lambda function: function.identifier() in callers)(model)


def _attach(node: ir.Node, bodies: dict[ir.OperatorIdentifier, ir.Function], *, opset: int) -> None:
    """Set the overload of `node` and add its body to `bodies`, unless an equal one is there."""
    make: Callable[[], ir.Function]
    try:
        signature = node_signature(node)
        if is_attention_node(node):
            attention, _ = read_attention_node(node)
            node.overload = overload_name(attention, signature)
            make = functools.partial(attention_body, attention, signature, opset=opset)
        else:
            rotary, _ = read_rotary_node(node)
            node.overload = overload_name(rotary, signature)
            make = functools.partial(rotary_body, rotary, signature, opset=opset)
        if node.op_identifier() not in bodies:
            bodies[node.op_identifier()] = make()
    except SpecError as error:
        raise SpecError(f"node {node.name!r} cannot have a function body: {error}") from error


def _import_domain(scope: ir.Graph | ir.Function, used: bool) -> None:
    if used:
        scope.opset_imports[DOMAIN] = VERSION
    else:
        scope.opset_imports.pop(DOMAIN, None)


def _state(model: ir.Model) -> object:
    """What the pass may change. A body is made of its name and the opset, so that equal ones need no comparison of nodes."""
    return (
        model.ir_version,
        [(tuple(scope.opset_imports.items()), [node.overload for node in canonical_nodes(scope)]) for scope in scopes(model)],
        [(key, function.opset_imports.get("")) for key, function in model.functions.items()],
    )
