"""The targets, and lowering a model to one of them: node by node, each to the first target that can express it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

import onnx_ir as ir

from qknorm_onnx.graph.canonical.body_builder import BodyBuilder, NamedSizes
from qknorm_onnx.graph.canonical.body_signature import signature_of
from qknorm_onnx.graph.canonical.known_fields import unknown_fields
from qknorm_onnx.graph.canonical.lowered_mark import LoweredMark, write_mark
from qknorm_onnx.graph.canonical.qk_norm_node import (
    canonical_operator,
    input_values,
    is_attention_node,
    is_prepared,
    read_attention_node,
    read_rotary_node,
)
from qknorm_onnx.graph.canonical.scopes import canonical_nodes, onnx_opset, scopes
from qknorm_onnx.graph.onnxruntime_release import CONTRIB_DOMAIN, Release, keep_from_misreading
from qknorm_onnx.graph.passes.attach_bodies import AttachBodiesPass, key_of
from qknorm_onnx.lowering.contrib.ort_contrib import ORT_CONTRIB
from qknorm_onnx.lowering.custom_op import CUSTOM_OP, kernel_note, kernel_refusal
from qknorm_onnx.lowering.emit.target import Emitted, LoweringRequest, RefusedLoweringError, Target
from qknorm_onnx.lowering.opset import raise_opset
from qknorm_onnx.lowering.primitive_onnx import PRIMITIVE
from qknorm_onnx.lowering.standard.standard_onnx import STANDARD
from qknorm_onnx.spec.qk_norm_spec import QKNormSpec, SpecError
from qknorm_onnx.spec.signature import NAMES_PER_OPERATOR
from qknorm_onnx.spec.targets import require_provider, target_named

TARGETS: Final[Mapping[str, Target]] = MappingProxyType(
    {target.name: target for target in (CUSTOM_OP, ORT_CONTRIB, STANDARD, PRIMITIVE)}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoweringOutcome:
    """What became of one canonical node: the target that serves it, and why that is not the one asked for, or how it runs."""

    name: str
    target: str
    note: str = ""


def lower(model: ir.Model, *, target: str, provider: str, for_onnxruntime: Release | None = None) -> tuple[LoweringOutcome, ...]:
    """Lower every canonical node of `model`, in place, and say per node what became of it, in node order.

    A target that cannot express a node hands it to its fallback, and the note says why. `onnx` raises the model's opset
    to 23 where that is possible. The node with an attention's softmax is marked with what the attention was.

    for_onnxruntime: what this release does not know is not written; None: what the target needs may be written.

    Raises:
        UnknownTargetError: `target` is none of `TARGETS`.
        InputError: `provider` is unknown, or `for_onnxruntime` cannot load the model whatever becomes of its attention.
        SpecError: a node cannot be expressed at all; the message names it.
    """
    target = target_named(target)
    require_provider(provider)
    if not any(canonical_nodes(scope) for scope in scopes(model)):
        return ()
    wanted = TARGETS[target].minimum_opset
    if for_onnxruntime is None or wanted <= for_onnxruntime.opset:
        raise_opset(model, wanted)
    opset = onnx_opset(model)
    nodes = [node for scope in scopes(model) for node in canonical_nodes(scope)]
    prepared = frozenset(node for node in nodes if is_attention_node(node) and any(map(is_prepared, node.inputs[:2])))
    surroundings = _Surroundings(
        taken=_names(model), named_sizes=_named_sizes(model.graph), prepared=prepared, bodies=_KeptBodies()
    )
    outcomes = []
    for node in nodes:  # in a subgraph or function a name may stand for another size
        around = surroundings if node.graph is model.graph else dataclasses.replace(surroundings, named_sizes={})
        request = _request(node, provider=provider, opset=opset, release=for_onnxruntime)
        outcomes.append(_lower_node(node, around, request, target=target))
    AttachBodiesPass()(model)
    _import_contrib(model)
    keep_from_misreading(model, release=for_onnxruntime)
    return tuple(outcomes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Surroundings:
    """What new nodes must know of the model: the names that are taken, and where sizes with a name can be read.

    prepared: the attentions whose queries or keys are normalised in front of them.
    bodies: the function bodies of the nodes that stay.
    """

    taken: set[str]
    named_sizes: NamedSizes
    prepared: frozenset[ir.Node]
    bodies: _KeptBodies


class _KeptBodies:
    """The distinct bodies of the canonical nodes that have been kept so far."""

    def __init__(self) -> None:
        self._keys: dict[str | None, set[str]] = {}

    def refusal(self, node: ir.Node) -> str | None:
        """Why `node` cannot stay: its body would be one more than an operator has names. Otherwise it is counted."""
        operator = canonical_operator(node)
        keys, key = self._keys.setdefault(operator, set()), key_of(node)
        if key not in keys and len(keys) == NAMES_PER_OPERATOR:
            return f"the file has {NAMES_PER_OPERATOR} other function bodies of {operator}, and there are names for no more"
        keys.add(key)
        return None


def _named_sizes(graph: ir.Graph) -> NamedSizes:
    found: dict[str, tuple[ir.Value, int]] = {}
    for value in graph.inputs:
        for axis, dim in enumerate(value.shape or ()):
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                found.setdefault(dim.value, (value, axis))
    return found


def _import_contrib(model: ir.Model) -> None:
    for scope in scopes(model):
        if any(node.domain == CONTRIB_DOMAIN for node in scope.all_nodes()):
            scope.opset_imports.setdefault(CONTRIB_DOMAIN, 1)


def _chain(name: str) -> Iterator[Target]:
    while name:
        yield TARGETS[name]
        name = TARGETS[name].fallback


def _request(node: ir.Node, *, provider: str, opset: int, release: Release | None) -> LoweringRequest:
    spec, inputs = read_attention_node(node) if is_attention_node(node) else read_rotary_node(node)
    values = input_values(inputs)
    signature = signature_of(values, num_outputs=len(node.outputs))
    present = {key: value for key, value in values.items() if value is not None}
    return LoweringRequest(spec=spec, inputs=present, signature=signature, opset=opset, provider=provider, release=release)


def _lower_node(node: ir.Node, around: _Surroundings, request: LoweringRequest, *, target: str) -> LoweringOutcome:
    name, spec, signature, provider = node.name or "", request.spec, request.signature, request.provider
    refusals: list[str] = []
    for candidate in _chain(target):
        refusal = _refusal(candidate, request, converted=candidate.name == target)
        if refusal is None and candidate.emit is None:
            refusal = kernel_refusal(spec, request.inputs, provider) or around.bodies.refusal(node)
        if refusal is None and candidate.emit is None:
            note = kernel_note(
                canonical_operator(node) or "", signature.inputs[0].dtype if signature.inputs[0] else None, provider
            )
            return LoweringOutcome(name=name, target=candidate.name, note=note)
        if refusal is None:
            try:
                note = _replace(node, candidate, request, around, asked=target)
            except RefusedLoweringError as error:
                refusal = str(error)
            else:
                return LoweringOutcome(name=name, target=candidate.name, note="; ".join([*refusals, *filter(None, [note])]))
        refusals.append(f"not {candidate.name}: {refusal}")
    raise SpecError(f"node {name!r} cannot be lowered: {'; '.join(refusals)}")


def _refusal(target: Target, request: LoweringRequest, *, converted: bool) -> str | None:
    opset = request.opset
    request.spec.check()
    unknown = unknown_fields(request.spec, target.known_fields)
    if unknown:
        return f"it does not know {', '.join(unknown)}"
    if request.release is not None and request.release.opset < target.minimum_opset:
        return f"it needs opset {target.minimum_opset}, and onnxruntime {request.release} knows {request.release.opset}"
    if opset < target.minimum_opset:
        if converted:
            return f"it needs opset {target.minimum_opset}, the model has {opset} and could not be converted"
        mend = f"export with opset={target.minimum_opset}, or choose the target {target.name}, which converts the model"
        return f"it needs opset {target.minimum_opset}, the model has {opset} ({mend})"
    return None


def _replace(node: ir.Node, target: Target, request: LoweringRequest, around: _Surroundings, *, asked: str) -> str:
    assert target.emit is not None and node.graph is not None, "a canonical node of a graph, and a target that replaces it"
    body = BodyBuilder(prefix=f"{node.name or node.op_type}/", taken=around.taken, named_sizes=around.named_sizes)
    try:
        emitted: Emitted = target.emit(body, request)
    except SpecError as error:
        raise RefusedLoweringError(str(error)) from error
    if emitted.outputs is None:
        refusal = around.bodies.refusal(node)
        if refusal:
            raise RefusedLoweringError(refusal)
        return emitted.note
    nodes = body.nodes_for(emitted.outputs)
    if isinstance(request.spec, QKNormSpec):
        normalised = request.spec.has_norm or node in around.prepared
        served = {"asked": asked, "provider": request.provider, "target": target.name}
        write_mark(nodes, LoweredMark(name=node.name or "", spec=request.spec, normalised=normalised, **served))
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], nodes, node.outputs, emitted.outputs)
    return emitted.note


def _names(model: ir.Model) -> set[str]:
    """The names of all values of the model."""
    names: set[str] = set()
    for scope in scopes(model):
        names.update(value.name for value in scope.inputs if value.name)
        if isinstance(scope, ir.Graph):
            names.update(scope.initializers)
        for node in scope.all_nodes():
            names.update(output.name for output in node.outputs if output.name)
            for attribute in node.attributes.values():
                names.update(_names_of_subgraphs(attribute))
    return names


def _names_of_subgraphs(attribute: ir.Attr) -> Iterator[str]:
    if attribute.is_ref() or attribute.type not in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        return
    graphs = [attribute.as_graph()] if attribute.type == ir.AttributeType.GRAPH else attribute.as_graphs()
    for graph in graphs:
        yield from (value.name for value in graph.inputs if value.name)
        yield from graph.initializers
