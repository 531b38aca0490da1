"""The pass that gives every canonical node its function body, so that runtimes without our kernels run the file."""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from qknorm_onnx.graph.canonical.body_signature import body_key
from qknorm_onnx.graph.canonical.function_body import attention_body, rotary_body
from qknorm_onnx.graph.canonical.qk_norm_node import (
    is_attention_node,
    node_signature,
    read_attention_node,
    read_rotary_node,
)
from qknorm_onnx.graph.canonical.scopes import canonical_nodes, onnx_opset, scopes
from qknorm_onnx.graph.passes.inline_functions import inline_functions
from qknorm_onnx.spec.qk_norm_spec import SpecError
from qknorm_onnx.spec.signature import ATTENTION_OP, DOMAIN, ROTARY_OP, VERSION, numbered_name, operator_of

FUNCTIONS_SINCE_IR_VERSION: Final = 8


class AttachBodiesPass(ir.passes.InPlacePass):
    """Makes the function bodies of the model be exactly those that its canonical nodes need.

    1. Nodes with equal spec and equal input types share a body, and every body has a name of its own, in the order of the
       nodes: `QKNormAttention`, `QKNormAttention_2`, ... They are never told apart by `overload`, which onnxruntime before
       1.27 and ONNX's reference evaluator ignore: there the last function of a name would stand for all.
    2. Nodes whose body has a number for which the native library has no name are replaced by that body; `inlined` names
       them after a call. (`lowering` does this earlier, and says so in its report.)
    3. Bodies of nodes that are gone are removed; functions of other domains are left alone.
    4. `ai.qknorm` is imported where it is used, and no longer where it is not.
    5. Functions that contain canonical nodes, or call such functions, are inlined: a body is made for the types of a node's
       inputs, and in a function they are not known.

    Raises SpecError where a body cannot be made; the message names the node.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inlined: tuple[str, ...] = ()

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Attach the bodies; `modified` says whether anything had to be changed."""
        before = _state(model)
        _inline_callers(model)
        bodies = _Bodies()
        for scope in scopes(model):
            nodes = canonical_nodes(scope)
            for node in nodes:
                bodies.attach(node, opset=onnx_opset(model))
            _import_domain(scope, bool(nodes))
        kept = {key: function for key, function in model.functions.items() if function.domain != DOMAIN}
        model.functions.clear()
        model.functions.update(kept | {function.identifier(): function for function in bodies.functions()})
        self.inlined = tuple(bodies.surplus)
        if self.inlined:
            inline_functions(model, lambda function: function.domain == DOMAIN and operator_of(function.name) is None)
            _import_domain(model.graph, bool(canonical_nodes(model.graph)))
        if bodies.functions():
            model.ir_version = max(model.ir_version, FUNCTIONS_SINCE_IR_VERSION)
        return ir.passes.PassResult(model, modified=_state(model) != before)


class _Bodies:
    """The distinct bodies of a model; `surplus` are the names of nodes whose body has too high a number to stay."""

    def __init__(self) -> None:
        self._by_operator: dict[str, dict[str, ir.Function]] = {ATTENTION_OP: {}, ROTARY_OP: {}}
        self.surplus: list[str] = []

    def functions(self) -> list[ir.Function]:
        """All of them, in the order in which nodes need them."""
        return [function for bodies in self._by_operator.values() for function in bodies.values()]

    def attach(self, node: ir.Node, *, opset: int) -> None:
        """Let `node` call its body, which is made unless an equal one is there."""
        operator = ATTENTION_OP if is_attention_node(node) else ROTARY_OP
        bodies = self._by_operator[operator]
        try:
            key = key_of(node)
            if key not in bodies:
                bodies[key] = _body_of(node, opset=opset, name=numbered_name(operator, len(bodies) + 1))
        except SpecError as error:
            raise SpecError(f"node {node.name!r} cannot have a function body: {error}") from error
        node.op_type, node.overload = bodies[key].name, ""
        if operator_of(node.op_type) is None:
            self.surplus.append(node.name or node.op_type)


def key_of(node: ir.Node) -> str:
    """Equal for canonical nodes of one operator that share a body. Raises SpecError where an input's type is not known."""
    spec, _ = read_attention_node(node) if is_attention_node(node) else read_rotary_node(node)
    return body_key(spec, node_signature(node))


def _body_of(node: ir.Node, *, opset: int, name: str) -> ir.Function:
    signature = node_signature(node)
    if is_attention_node(node):
        return attention_body(read_attention_node(node)[0], signature, opset=opset, name=name)
    return rotary_body(read_rotary_node(node)[0], signature, opset=opset, name=name)


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
        kept = inline_functions(model, lambda function: function.identifier() in callers).kept
        if kept:
            raise SpecError(f"an attention in a function needs the types of a call: {kept[0]}")


def _import_domain(scope: ir.Graph | ir.Function, used: bool) -> None:
    if used:
        scope.opset_imports[DOMAIN] = VERSION
    else:
        scope.opset_imports.pop(DOMAIN, None)


def _state(model: ir.Model) -> object:
    """What the pass may change."""
    return (
        model.ir_version,
        [
            (tuple(scope.opset_imports.items()), [node.op_identifier() for node in canonical_nodes(scope)])
            for scope in scopes(model)
        ],
        [_text_of(function) for function in model.functions.values()],
    )


def _text_of(function: ir.Function) -> bytes:
    """A function as it is written, without the types of its values, of which reading a file forgets some."""
    proto = ir.to_proto(function)
    proto.ClearField("value_info")
    return proto.SerializeToString(deterministic=True)
