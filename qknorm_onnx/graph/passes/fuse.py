"""Replaces each QK-Norm attention that is recognised, and whose rewrite is proven, by one canonical node."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir
from onnx_ir.passes import common

from qknorm_onnx.graph import report as reports
from qknorm_onnx.graph.match import Core, Declined, Plain, Recognition
from qknorm_onnx.graph.passes.attach_bodies import AttachBodiesPass
from qknorm_onnx.graph.prover import Proof, Prover
from qknorm_onnx.graph.qk_norm_node import is_attention_node, is_rotary_node, read_attention_node
from qknorm_onnx.graph.recognise.attention import read_core
from qknorm_onnx.graph.recognise.mask import MaskContext
from qknorm_onnx.graph.recognise.naming import attention_name, node_name
from qknorm_onnx.graph.recognise.qk_norm_attention import recognise_attention
from qknorm_onnx.graph.region import RegionError, region_models
from qknorm_onnx.graph.replacement import Replacement, build_replacement
from qknorm_onnx.spec.qk_norm_spec import SpecError


class FuseQKNormPass(ir.passes.InPlacePass):
    """Fuses in all graphs of a model. Run `PreparePass` first and `AttachBodiesPass` afterwards.

    `prover` compares the old and the new nodes of each rewrite; without one, rewrites are kept unproven. After a call,
    `report` says what became of each attention.
    """

    def __init__(self, prover: Prover | None = None) -> None:
        super().__init__()
        self._prover = prover
        self.report = reports.FusionReport()

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run on `model` in place."""
        self.report = reports.FusionReport()
        changed = [self._fuse_graph(graph, model) for graph in _graphs(model)]
        if any(changed):
            common.RemoveUnusedNodesPass()(model)
            common.CommonSubexpressionEliminationPass()(model)
        return ir.passes.PassResult(model, any(changed))

    def _fuse_graph(self, graph: ir.Graph, model: ir.Model) -> bool:
        masks = MaskContext()
        changed = False
        for node in list(graph):
            if is_attention_node(node):
                self._report_canonical(node)
                continue
            core = read_core(node)
            if core is None:
                continue
            if isinstance(core, Declined):
                self._decline(node_name(node), core)
                continue
            changed = self._handle(core, recognise_attention(core, masks), graph, model) or changed
        return changed

    def _handle(self, core: Core, found: Recognition, graph: ir.Graph, model: ir.Model) -> bool:
        if isinstance(found, Plain):
            self._extend(plain=(found.name,))
            return False
        if isinstance(found, Declined):
            self._decline(attention_name(core), found)
            return False
        try:
            replacement = build_replacement(found)
        except SpecError as error:
            self._decline(found.name, Declined(f"its shapes contradict each other: {error}", core.node))
            return False
        proof = self._prove(replacement, model)
        if proof.verdict == "refused":
            replacement.builder.drop()
            refused = reports.Refused(name=found.name, reason=proof.reason, max_difference=proof.max_difference)
            self._extend(refused=(refused,))
            return False
        sources = insert(replacement, graph)
        note = f"unverified: {proof.reason}" if proof.verdict == "unverified" else ""
        fused = reports.FusedAttention(name=found.name, spec=found.spec, source_nodes=sources, note=note)
        self._extend(fused=(fused,))
        return True

    def _prove(self, replacement: Replacement, model: ir.Model) -> Proof:
        if self._prover is None:
            return Proof(verdict="unverified", reason="no proof was asked for")
        try:
            old, new = region_models(replacement, model)
        except RegionError as error:
            return Proof(verdict="unverified", reason=str(error))
        AttachBodiesPass()(new)
        return self._prover.prove(old, new)

    def _report_canonical(self, node: ir.Node) -> None:
        spec, inputs = read_attention_node(node)
        prepared = any(_is_prepared(value) for value in (inputs.query, inputs.key))
        if spec.has_norm or prepared:
            self._extend(fused=(reports.FusedAttention(name=node_name(node), spec=spec),))
        else:
            self._extend(plain=(node_name(node),))

    def _decline(self, name: str, declined: Declined) -> None:
        node = declined.node.name or declined.node.op_type if declined.node is not None else ""
        entry = reports.Declined(name=name, reason=declined.reason, node=node, hint=declined.hint)
        self._extend(declined=(entry,))

    def _extend(self, **entries: tuple[object, ...]) -> None:
        added = {field: (*getattr(self.report, field), *items) for field, items in entries.items()}
        self.report = dataclasses.replace(self.report, **added)


def _is_prepared(value: ir.Value) -> bool:
    """Whether a `QKNormRotary` made this, or several of them for streams that were then concatenated."""
    node = value.producer()
    if node is not None and node.op_type == "Concat":
        return any(operand is not None and _is_prepared(operand) for operand in node.inputs)
    return node is not None and is_rotary_node(node)


def insert(replacement: Replacement, graph: ir.Graph) -> tuple[str, ...]:
    """Put the new nodes in place of the old ones; returns the names of those that nothing reads any more."""
    before = {node: node.name or "" for node in graph}
    anchor = replacement.outputs[0][0].producer()
    assert anchor is not None, "an attention's output is made by a node"
    replacement.builder.insert_before(anchor)
    for old, new in replacement.outputs:
        _replace(old, new)
    return _remove_unused(replacement, before)


def _replace(old: ir.Value, new: ir.Value) -> None:
    """Let everybody who read `old` read `new`; a graph output keeps its name."""
    name = old.name
    is_output = old.is_graph_output()
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    if is_output:
        old.name = f"{name}/replaced"
        new.name = name


def _remove_unused(replacement: Replacement, names: dict[ir.Node, str]) -> tuple[str, ...]:
    """Remove the old nodes that are left without readers, from the outputs backwards."""
    waiting = [old.producer() for old, _ in replacement.outputs]
    stop = set(replacement.boundary)
    removed: list[str] = []
    while waiting:
        node = waiting.pop()
        if node is None or node.graph is None or node not in names:
            continue
        if any(value.uses() or value.is_graph_output() for value in node.outputs):
            continue
        inputs = [value for value in node.inputs if value is not None]
        node.graph.remove(node, safe=True)
        removed.append(names[node] or node.outputs[0].name or node.op_type)
        waiting += [value.producer() for value in dict.fromkeys(inputs) if value not in stop]
    return tuple(sorted(removed))


def _graphs(model: ir.Model) -> list[ir.Graph]:
    """The main graph, and the graphs of If, Loop and Scan nodes in it."""
    return [model.graph, *model.graph.subgraphs()]
