"""Replaces each QK-Norm attention that is recognised, and whose rewrite is proven, by one canonical node."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable
from typing import Final

import onnx_ir as ir
from onnx_ir.passes import common

from qknorm_onnx.graph import fusion_report as reports
from qknorm_onnx.graph.canonical.lowered_mark import LoweredMark, read_mark
from qknorm_onnx.graph.canonical.qk_norm_node import is_attention_node, is_prepared, preparations, read_attention_node
from qknorm_onnx.graph.match.attention_core import Core
from qknorm_onnx.graph.match.located import Unreadable
from qknorm_onnx.graph.match.qk_norm_match import Plain, QKNormMatch, Recognition
from qknorm_onnx.graph.passes.attach_bodies import AttachBodiesPass
from qknorm_onnx.graph.passes.prepare import share_equal_nodes
from qknorm_onnx.graph.recognise.attention.softmax_attention import read_core
from qknorm_onnx.graph.recognise.masks.mask import MaskContext
from qknorm_onnx.graph.recognise.qk_norm_attention import recognise_attention
from qknorm_onnx.graph.recognise.unread.contradictions import contradiction_behind
from qknorm_onnx.graph.recognise.unread.distant import Answers, distant_attention
from qknorm_onnx.graph.recognise.unread.operators import read_named_operator
from qknorm_onnx.graph.recognise.unread.unread import divided_by_norms, normalises_operands, unread_attention
from qknorm_onnx.graph.recognise.unread.unread_products import unread_product
from qknorm_onnx.graph.recognise.unread.unsoftmaxed import unsoftmaxed_attention
from qknorm_onnx.graph.rewrite.insertion import insert
from qknorm_onnx.graph.rewrite.prover import Proof, Prover
from qknorm_onnx.graph.rewrite.region import RegionError, region_models
from qknorm_onnx.graph.rewrite.replacement import Replacement, build_replacement
from qknorm_onnx.graph.walk.naming import attention_name, module_path, node_name
from qknorm_onnx.graph.walk.readings import ROOMS, first_answer, record
from qknorm_onnx.spec.qk_norm_spec import SpecError
from qknorm_onnx.spec.signature import DOMAIN, VERSION

COPIED_CACHE: Final = (
    "the file leaves it open whether its caches grow or are buffers of fixed size, which kernels on CUDA cannot, so each past is "
    "copied once per call to make room for the new keys; where they are buffers, give past and present one name for their length"
)

Outcome = reports.FusionReport  # of one node: empty, or with the one entry that it leads to
NOTHING: Final = reports.FusionReport()
UnreadReader = Callable[[ir.Node], Unreadable | None]
UnlikeReader = Callable[[ir.Node], Unreadable | Plain | None]


class FuseQKNormPass(ir.passes.InPlacePass):
    """Fuses in all graphs of a model. Run `PreparePass` first and `AttachBodiesPass` afterwards.

    `prover` compares the old and the new nodes of each rewrite; without one, rewrites are kept unproven. After a call,
    `report` says what became of each attention. `keeps` says which attentions that were lowered earlier stay as they are;
    the others are recognised like foreign ones, and stay where that fails. `buffers_grow`: the kernels that are meant make room
    in a cache that is too short; where they do not, a past that may be is extended before.
    """

    def __init__(
        self,
        prover: Prover | None = None,
        *,
        keeps: Callable[[LoweredMark], bool] = lambda _mark: False,
        buffers_grow: bool = True,
    ) -> None:
        super().__init__()
        self._prover = prover
        self._keeps = keeps
        self._buffers_grow = buffers_grow
        self.report = reports.FusionReport()

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run on `model` in place."""
        marks = filter(None, map(read_mark, model.graph.all_nodes()))
        fusion = _Fusion(
            model=model,
            prover=self._prover,
            keeps=self._keeps,
            buffers_grow=self._buffers_grow,
            names={mark.name for mark in marks if self._keeps(mark)},
            nodes=collections.Counter(node.name for node in model.graph.all_nodes()),
        )
        self.report, changed = fusion.run()
        if changed:
            common.RemoveUnusedNodesPass()(model)
            share_equal_nodes(model)
            model.opset_imports[DOMAIN] = VERSION
        return ir.passes.PassResult(model, changed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fusion:
    """One call of the pass: what every node needs to know of the model and of the nodes before it.

    names: those that attentions have already, so that a report can tell them apart. nodes: how many nodes of the file have
    each name; onnxruntime loads no file in which two have one. unread: products of queries and keys
    around which an unknown form was reported; a softmax written by hand has several parts.
    """

    model: ir.Model
    prover: Prover | None
    keeps: Callable[[LoweredMark], bool]
    buffers_grow: bool
    names: set[str]
    nodes: collections.Counter[str | None]
    unread: set[ir.Node] = dataclasses.field(default_factory=set)
    distant: Answers = dataclasses.field(default_factory=Answers)

    def run(self) -> tuple[reports.FusionReport, bool]:
        """What became of all attention, and whether a graph was changed."""
        report, changed = NOTHING, False
        for graph in (self.model.graph, *self.model.graph.subgraphs()):  # subgraphs: those of If, Loop and Scan
            masks = MaskContext()
            for node in list(graph):
                outcome, fused = self._visit(node, masks, graph)
                for entry in outcome.declined:
                    logging.getLogger(ROOMS).debug("%s", entry, extra={"declined": entry})
                report, changed = report.joined(outcome), fused or changed
        return report, changed

    def _visit(self, node: ir.Node, masks: MaskContext, graph: ir.Graph) -> tuple[Outcome, bool]:
        """What `node` adds to the report, and whether it was fused now."""
        if is_attention_node(node):
            return self._canonical(node), False
        mark = read_mark(node)
        if mark is not None and self.keeps(mark):
            return _marked(mark), False
        outcome, fused = self._read(node, masks, graph)
        contradiction = contradiction_behind(node) if outcome.declined else None
        if contradiction is not None:
            record(contradiction_behind, node, "declined", "unread", why=contradiction.reason)
            outcome = _declined(outcome.declined[0].name, contradiction)
        if mark is not None and not fused and not outcome.plain:
            self.names.add(mark.name)
            return _marked(mark, instead_of=outcome), False
        return outcome, fused

    def _read(self, node: ir.Node, masks: MaskContext, graph: ir.Graph) -> tuple[Outcome, bool]:
        unread, unlike_any = self._unread_readers()
        core = read_core(node) or first_answer(unread, node, "unread")
        if core is None:
            unlike = first_answer(unlike_any, node, "unread")
            if isinstance(unlike, Plain):
                return Outcome(plain=(unlike.name,)), False
            return (_declined(node_name(node), unlike) if unlike is not None else NOTHING), False
        if isinstance(core, Core):
            return self._rewrite(core, recognise_attention(core, masks), graph)
        if normalises_operands(node):
            return _declined(node_name(node), divided_by_norms(node) or core), False
        return Outcome(plain=(node_name(node),)), False

    def _unread_readers(self) -> tuple[tuple[UnreadReader, ...], tuple[UnlikeReader, ...]]:
        """Who is asked about what no reader of attention knows, and then about what is unlike any that is known."""
        reported = self.unread
        distant = functools.partial(distant_attention, reported=reported, answers=self.distant)
        known = read_named_operator, functools.partial(unread_attention, reported=reported), distant
        return known, tuple(functools.partial(read, reported=reported) for read in (unread_product, unsoftmaxed_attention))

    def _rewrite(self, core: Core, found: Recognition, graph: ir.Graph) -> tuple[Outcome, bool]:
        if isinstance(found, Plain):
            return Outcome(plain=(found.name,)), False
        if isinstance(found, Unreadable):
            return _declined(attention_name(core), found), False
        match = dataclasses.replace(found, name=self._unique(found))
        if self.buffers_grow and core.lengths is not None:
            lengths = dataclasses.replace(core.lengths, is_buffer=True)
            match = dataclasses.replace(match, core=dataclasses.replace(match.core, lengths=lengths))
        try:
            replacement = build_replacement(match)
        except SpecError as error:
            reason = f"its shapes contradict each other: {error}"
            return _declined(match.name, Unreadable(reason, core.node, "change what the message names")), False
        proof = self._prove(replacement)
        if proof.verdict == "refused":
            replacement.builder.drop()
            refused = reports.Refused(name=match.name, reason=proof.reason, max_difference=proof.max_difference)
            return Outcome(refused=(refused,)), False
        self.names.add(match.name)
        return _insert(match, replacement, proof, graph), True

    def _prove(self, replacement: Replacement) -> Proof:
        if self.prover is None:
            return Proof(verdict="unverified", reason="no proof was asked for")
        try:
            old, new = region_models(replacement, self.model)
        except RegionError as error:
            return Proof(verdict="unverified", reason=str(error))
        AttachBodiesPass()(new)
        return self.prover.prove(old, new)

    def _unique(self, match: QKNormMatch) -> str:
        """Its name, numbered where one module has several attentions: the node takes it, and lowering reports by it.

        It is numbered too where a node that is not replaced is called so already.
        """
        last = {match.core.node, match.core.output.value.producer()}
        replaced = collections.Counter(node.name for node in last if node is not None)
        candidates = itertools.chain([match.name], (f"{match.name}.{number}" for number in itertools.count(2)))
        return next(name for name in candidates if name not in self.names and self.nodes[name] <= replaced[name])

    def _canonical(self, node: ir.Node) -> Outcome:
        spec, inputs = read_attention_node(node)
        name = node.name or node_name(node)
        prepared = any(is_prepared(value) for value in (inputs.query, inputs.key))
        if not (spec.has_norm or prepared):
            return Outcome(plain=(name,))
        self.names.add(name)
        return Outcome(fused=(_with_preparations(reports.FusedAttention(name=name, spec=spec), node),))


def _insert(match: QKNormMatch, replacement: Replacement, proof: Proof, graph: ir.Graph) -> Outcome:
    """Put the canonical node into the graph; the entry that says so."""
    sources = insert(replacement, graph)
    note = f"unverified: {proof.reason}" if proof.verdict == "unverified" else proof.note
    node = next(node for node in replacement.builder.nodes if is_attention_node(node))
    fused = reports.FusedAttention(name=match.name, spec=match.spec, source_nodes=sources, note=note)
    lengths = match.core.lengths
    copied = lengths is not None and match.caches is not None and not lengths.is_buffer
    return Outcome(fused=(_with_preparations(fused, node),), notes=(COPIED_CACHE,) if copied else ())


def _marked(mark: LoweredMark, *, instead_of: Outcome = NOTHING) -> Outcome:
    """What the mark of an earlier lowering says, and why the attention was not made one node again."""
    reasons = [miss.reason for miss in instead_of.declined] + [refusal.reason for refusal in instead_of.refused]
    why = "; ".join(f"not made one node again: {reason}" for reason in reasons)
    if not mark.normalised:
        return Outcome(plain=(mark.name,))
    note = "; ".join(filter(None, [mark.note, why]))
    return Outcome(fused=(reports.FusedAttention(name=mark.name, spec=mark.spec, target=mark.target, note=note),))


def _declined(name: str, declined: Unreadable) -> Outcome:
    node = declined.node.name or declined.node.op_type if declined.node is not None else ""
    return Outcome(declined=(reports.Declined(name=name, reason=declined.reason, node=node, hint=declined.hint),))


def _with_preparations(fused: reports.FusedAttention, node: ir.Node) -> reports.FusedAttention:
    """With what nodes of their own do to the queries and keys of the canonical node `node`."""
    query, key = (preparations(value) for value in node.inputs[:2])
    return dataclasses.replace(fused, query_preparation=query, key_preparation=key, surroundings=_surroundings(node))


def _surroundings(node: ir.Node) -> reports.Surroundings:
    _, inputs = read_attention_node(node)
    new, past = _size(inputs.key, 1), _size(inputs.past_key, 2)
    total = new if inputs.past_key is None else past if inputs.cache_length is not None else None
    if total is None and past is not None and new is not None:
        total = past + new
    at_end = inputs.past_key is not None or new == 1
    return reports.Surroundings(
        has_mask=inputs.attention_bias is not None,
        num_keys=total,
        is_decode=at_end and _size(inputs.query, 1) == 1,
        module=module_path(node),
    )


def _size(value: ir.Value | None, axis: int) -> int | None:
    """The fixed size of an axis."""
    size = value.shape[axis] if value is not None and value.shape is not None else None
    return size if isinstance(size, int) else None
