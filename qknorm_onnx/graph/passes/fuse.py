"""Replaces each QK-Norm attention that is recognised, and whose rewrite is proven, by one canonical node."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Final

import onnx_ir as ir
from onnx_ir.passes import common

from qknorm_onnx.graph import report as reports
from qknorm_onnx.graph.canonical.lowered_mark import LoweredMark, read_mark
from qknorm_onnx.graph.canonical.qk_norm_node import is_attention_node, is_prepared, preparations, read_attention_node
from qknorm_onnx.graph.match.attention_core import Core
from qknorm_onnx.graph.match.located import Declined
from qknorm_onnx.graph.match.qk_norm_match import Plain, QKNormMatch, Recognition
from qknorm_onnx.graph.passes.attach_bodies import AttachBodiesPass
from qknorm_onnx.graph.passes.prepare import share_equal_nodes
from qknorm_onnx.graph.recognise.attention.softmax_attention import read_core
from qknorm_onnx.graph.recognise.masks.mask import MaskContext
from qknorm_onnx.graph.recognise.qk_norm_attention import recognise_attention
from qknorm_onnx.graph.recognise.unread.unread import divided_by_norms, normalises_operands, unread_attention
from qknorm_onnx.graph.recognise.unread.unsoftmaxed import unsoftmaxed_attention
from qknorm_onnx.graph.rewrite.node_builder import replace_value
from qknorm_onnx.graph.rewrite.prover import Proof, Prover
from qknorm_onnx.graph.rewrite.region import RegionError, region_models
from qknorm_onnx.graph.rewrite.replacement import Replacement, build_replacement
from qknorm_onnx.graph.rewrite.shape_readers import redirect_shape_readers
from qknorm_onnx.graph.walk.naming import attention_name, node_name
from qknorm_onnx.spec.qk_norm_spec import SpecError
from qknorm_onnx.spec.signature import DOMAIN, VERSION

COPIED_CACHE: Final = (
    "the file leaves it open whether its caches grow or are buffers of fixed size, so each past is copied once per call to make "
    "room for the new keys; where they are buffers, give past and present one name for their length"
)


class FuseQKNormPass(ir.passes.InPlacePass):
    """Fuses in all graphs of a model. Run `PreparePass` first and `AttachBodiesPass` afterwards.

    `prover` compares the old and the new nodes of each rewrite; without one, rewrites are kept unproven. After a call,
    `report` says what became of each attention. `keeps` says which attentions that were lowered earlier stay as they are;
    the others are recognised like foreign ones, and stay where that fails.
    """

    def __init__(self, prover: Prover | None = None, *, keeps: Callable[[LoweredMark], bool] = lambda _mark: False) -> None:
        super().__init__()
        self._prover = prover
        self._unread = set[ir.Node]()  # products of queries and keys around which an unknown form was reported
        self._keeps = keeps
        self._kept_names: set[str] = set()
        self.report = reports.FusionReport()

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run on `model` in place."""
        self.report = reports.FusionReport()
        self._unread.clear()
        marks = filter(None, map(read_mark, model.graph.all_nodes()))
        self._kept_names = {mark.name for mark in marks if self._keeps(mark)}
        changed = [self._fuse_graph(graph, model) for graph in _graphs(model)]
        if any(changed):
            common.RemoveUnusedNodesPass()(model)
            share_equal_nodes(model)
            model.opset_imports[DOMAIN] = VERSION
        return ir.passes.PassResult(model, any(changed))

    def _fuse_graph(self, graph: ir.Graph, model: ir.Model) -> bool:
        masks = MaskContext()
        changed = False
        for node in list(graph):
            if is_attention_node(node):
                self._report_canonical(node)
                continue
            mark = read_mark(node)
            if mark is not None and self._keeps(mark):
                self._report_mark(mark)
                continue
            before = self.report
            fused = self._fuse_core(node, masks, graph, model)
            if mark is not None and not fused and self.report.plain == before.plain:
                self._report_mark(mark, before)
            changed = fused or changed
        return changed

    def _fuse_core(self, node: ir.Node, masks: MaskContext, graph: ir.Graph, model: ir.Model) -> bool:
        core = read_core(node)
        if core is None:
            core = unread_attention(node, self._unread)
        if core is None:
            unlike = unsoftmaxed_attention(node, self._unread)
            if unlike is not None:
                self._decline(node_name(node), unlike)
            return False
        if isinstance(core, Declined):
            if normalises_operands(node):
                self._decline(node_name(node), divided_by_norms(node) or core)
            else:
                self._extend(plain=(node_name(node),))
            return False
        return self._handle(core, recognise_attention(core, masks), graph, model)

    def _report_mark(self, mark: LoweredMark, before: reports.FusionReport | None = None) -> None:
        """Report by `mark`, instead of what was added to the report `before` it."""
        why = ""
        if before is not None:
            reasons = [miss.reason for miss in self.report.declined[len(before.declined) :]]
            reasons += [refusal.reason for refusal in self.report.refused[len(before.refused) :]]
            why = "; ".join(f"not made one node again: {reason}" for reason in reasons)
            self.report = before
        if mark.normalised:
            self._extend(fused=(mark.as_fused(why=why),))
        else:
            self._extend(plain=(mark.name,))

    def _handle(self, core: Core, found: Recognition, graph: ir.Graph, model: ir.Model) -> bool:
        if isinstance(found, QKNormMatch):
            found = dataclasses.replace(found, name=self._unique(found.name))
        if isinstance(found, Plain):
            self._extend(plain=(found.name,))
            return False
        if isinstance(found, Declined):
            self._decline(attention_name(core), found)
            return False
        try:
            replacement = build_replacement(found)
        except SpecError as error:
            self._decline(
                found.name, Declined(f"its shapes contradict each other: {error}", core.node, "change what the message names")
            )
            return False
        proof = self._prove(replacement, model)
        if proof.verdict == "refused":
            replacement.builder.drop()
            refused = reports.Refused(name=found.name, reason=proof.reason, max_difference=proof.max_difference)
            self._extend(refused=(refused,))
            return False
        sources = insert(replacement, graph)
        note = f"unverified: {proof.reason}" if proof.verdict == "unverified" else proof.note
        node = next(node for node in replacement.builder.nodes if is_attention_node(node))
        fused = reports.FusedAttention(name=found.name, spec=found.spec, source_nodes=sources, note=note)
        fused = _with_preparations(fused, node)
        self._extend(fused=(fused,))
        lengths = found.core.lengths
        if lengths is not None and found.caches is not None and not lengths.is_buffer and COPIED_CACHE not in self.report.notes:
            self._extend(notes=(COPIED_CACHE,))
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

    def _unique(self, name: str) -> str:
        """`name`, numbered where one module has several attentions: the node takes it, and lowering reports by it."""
        taken = self._kept_names | {fused.name for fused in self.report.fused}
        candidates = itertools.chain([name], (f"{name}.{number}" for number in itertools.count(2)))
        return next(candidate for candidate in candidates if candidate not in taken)

    def _report_canonical(self, node: ir.Node) -> None:
        spec, inputs = read_attention_node(node)
        name = node.name or node_name(node)
        prepared = any(is_prepared(value) for value in (inputs.query, inputs.key))
        if spec.has_norm or prepared:
            self._extend(fused=(_with_preparations(reports.FusedAttention(name=name, spec=spec), node),))
        else:
            self._extend(plain=(name,))

    def _decline(self, name: str, declined: Declined) -> None:
        node = declined.node.name or declined.node.op_type if declined.node is not None else ""
        entry = reports.Declined(name=name, reason=declined.reason, node=node, hint=declined.hint)
        self._extend(declined=(entry,))

    def _extend(self, **entries: tuple[object, ...]) -> None:
        added = {field: (*getattr(self.report, field), *items) for field, items in entries.items()}
        self.report = dataclasses.replace(self.report, **added)


def _with_preparations(fused: reports.FusedAttention, node: ir.Node) -> reports.FusedAttention:
    """With what nodes of their own do to the queries and keys of the canonical node `node`."""
    query, key = (preparations(value) for value in node.inputs[:2])
    return dataclasses.replace(fused, query_preparation=query, key_preparation=key)


def insert(replacement: Replacement, graph: ir.Graph) -> tuple[str, ...]:
    """Put the new nodes in place of the old ones; returns the names of those that nothing reads any more."""
    inside = _inside(replacement)  # of a body, also nodes of the graphs around it
    before = {node: node.name or node.outputs[0].name or node.op_type for node in (*graph, *inside)}
    anchor = replacement.outputs[0][0].producer()
    assert anchor is not None, "an attention's output is made by a node"
    replacement.builder.insert_before(anchor)
    for old, new in replacement.outputs:
        early = _uses_before(old, anchor)
        replace_value(old, new)
        for reader, index in early:
            reader.replace_input_with(index, old)
    removed = _remove_unused([old.producer() for old, _ in replacement.outputs], inside)
    left = [node for node in inside if node.graph is not None]
    removed += _remove_unused(redirect_shape_readers(left, replacement.boundary), inside)
    return tuple(sorted(before[node] for node in removed))


def _uses_before(value: ir.Value, anchor: ir.Node) -> list[tuple[ir.Node, int]]:
    """Where `value` is read in front of `anchor`: a mask may be computed from the same keys or values that are cached."""
    readers = {usage.node for usage in value.uses()}
    if readers <= {anchor} or anchor.graph is None:
        return []
    before = set(itertools.takewhile(lambda node: node is not anchor, anchor.graph))
    return [(usage.node, usage.idx) for usage in value.uses() if usage.node in before]


def _inside(replacement: Replacement) -> list[ir.Node]:
    """The old nodes between the outputs and the boundary."""
    waiting = [old.producer() for old, _ in replacement.outputs]
    stop = {value.producer() for value in replacement.boundary}
    found: dict[ir.Node, None] = {}
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found and node not in stop:
            found[node] = None
            waiting += [value.producer() for value in node.inputs if value is not None]
    return list(found)


def _remove_unused(nodes: Sequence[ir.Node | None], inside: Sequence[ir.Node]) -> list[ir.Node]:
    """Remove those of `nodes` that nothing reads any more, and what only they read, as far as it is `inside`."""
    waiting, allowed = list(nodes), set(inside)
    removed: list[ir.Node] = []
    while waiting:
        node = waiting.pop()
        if node is None or node.graph is None or node not in allowed:
            continue
        if any(value.uses() or value.is_graph_output() for value in node.outputs):
            continue
        inputs = [value for value in node.inputs if value is not None]
        node.graph.remove(node, safe=True)
        removed.append(node)
        waiting += [value.producer() for value in dict.fromkeys(inputs)]
    return removed


def _graphs(model: ir.Model) -> list[ir.Graph]:
    """The main graph, and the graphs of If, Loop and Scan nodes in it."""
    return [model.graph, *model.graph.subgraphs()]
