"""From any ONNX model to one whose QK-Norm attention is one node each: prepare, fuse (proved), lower."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

import onnx
import onnx_ir as ir

from qknorm_onnx.errors import FusionRequiredError, InputError
from qknorm_onnx.graph.fusion_report import FusedAttention, FusionReport
from qknorm_onnx.graph.model_file import ModelSource, label_of, load_model, model_as_proto, save_model
from qknorm_onnx.graph.onnxruntime_release import Release, needs_of, release_named
from qknorm_onnx.graph.passes.fuse import FuseQKNormPass
from qknorm_onnx.graph.passes.prepare import PreparePass
from qknorm_onnx.graph.passes.raise_opset import raise_to_floor
from qknorm_onnx.graph.passes.read_cache_lengths import read_cache_lengths
from qknorm_onnx.graph.rewrite.prover import Prover
from qknorm_onnx.graph.soundness.guard import make_sound, one_line
from qknorm_onnx.lowering.primitive_onnx import PRIMITIVE, forget_named_sizes
from qknorm_onnx.lowering.registry import LoweringOutcome, lower
from qknorm_onnx.lowering.turned_weights import TurnSharedWeightsPass
from qknorm_onnx.spec.targets import DEFAULT_TARGET, require_provider, target_named

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Program:
    """A model with its attention fused, and the account of how it became so."""

    model: ir.Model
    report: FusionReport

    def __repr__(self) -> str:
        """For example `<Program: fused 2 of 2 QK-Norm attentions (custom-op), 41 nodes, opset 20>`, not the whole graph."""
        targets = ", ".join(sorted({fused.target for fused in self.report.fused}))
        nodes = sum(1 for _ in self.model.graph.all_nodes())
        what = self.report.summary() + (f" ({targets})" if targets else "")
        return f"<Program: {what}, {nodes} nodes, opset {self.model.opset_imports.get('')}>"

    def to_proto(self) -> onnx.ModelProto:
        """The model as one protobuf message; raises InputError where its weights need `save`."""
        return model_as_proto(self.model)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model; large weights go to `<path>.data` beside it. Raises InputError; never leaves half a file.

        A model that was changed so that it would not load is refused.
        """
        make_sound(self.model, "the program")
        save_model(self.model, path)


def fuse(
    source: ModelSource,
    *,
    target: str = DEFAULT_TARGET,
    provider: str = "cpu",
    verify: bool = True,
    require_fusion: bool = False,
    for_onnxruntime: str | None = None,
    caches_in_place: bool = False,
    progress: Progress | None = None,
) -> Program:
    """Make each QK-Norm attention of `source` one node, and lower it to `target`.

    What an earlier call lowered for the same target and provider stays as it is, and the report says so.

    Args:
        source: path of an ONNX file, `onnx.ModelProto` or `onnx_ir.Model`; it is not changed.
        target: "custom-op" (our operator with its function body), "ort" (ONNX Runtime's contrib operators), "onnx"
            (standard operators of opset 23 and newer) or "primitive" (plain operators, for runtimes without functions; also
            called "portable").
        provider: "cpu" or "cuda": whose kernels the target is chosen for.
        verify: prove each rewrite by running old and new on random inputs; a failed proof leaves the attention as it was.
        require_fusion: raise unless there is QK-Norm attention and all of it is fused.
        for_onnxruntime: "1.24" writes nothing that onnxruntime 1.24 does not know; None writes what the model needs in this
            target, on every machine the same. `report.needs` says what a runtime must have.
        caches_in_place: let the pasts of a decoder be larger than what they hold: how many entries are valid is read off
            `attention_mask` (its columns less the new tokens). Such buffers stay in place where past and present are bound to
            one memory; a past of just that size grows as before. What hinders it is in the report's notes.
        progress: called with the name of each stage as it begins.

    Raises:
        InputError: `source` is no sound ONNX model or of an old opset that cannot be raised, `target` or `provider` is unknown,
            or the model has something else that `for_onnxruntime` does not know.
        FusionRequiredError: `require_fusion`, and something was missed; the message says what and why.
    """
    target = target_named(target)
    require_provider(provider)
    release = None if for_onnxruntime is None else release_named(for_onnxruntime)
    say = progress or _silent
    say("load")
    model = load_model(source)
    with one_line(label_of(source)):
        return _fuse(
            model,
            target=target,
            provider=provider,
            release=release,
            verify=verify,
            require_fusion=require_fusion,
            caches_in_place=caches_in_place,
            say=say,
        )


def _fuse(
    model: ir.Model,
    *,
    target: str,
    provider: str,
    release: Release | None,
    verify: bool,
    require_fusion: bool,
    caches_in_place: bool,
    say: Progress,
) -> Program:
    raised = raise_to_floor(model)
    declared = _declared(model)
    say("prepare")
    prepare = PreparePass()
    prepare(model)
    say("recognise and prove" if verify else "recognise")
    fuse_pass = _fuse_pass(target, provider, verify=verify)
    fused = fuse_pass(model).modified
    notes = (*([raised] if raised else []), *prepare.kept, *fuse_pass.report.notes)
    report = dataclasses.replace(fuse_pass.report, notes=notes)
    if require_fusion:
        require_complete(report)
    if caches_in_place and (why := read_cache_lengths(model.graph)):
        report = dataclasses.replace(report, notes=(*report.notes, f"caches cannot stay in place: {why}"))
    elif caches_in_place:
        declared = _declared(model)
    say("lower")
    outcomes = lower(model, target=target, provider=provider, for_onnxruntime=release)
    if fused or outcomes:  # bodies and lowerings bring equal constants along; a second run must find nothing to do
        PreparePass()(model)
        TurnSharedWeightsPass()(model)
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.shape = declared[value.name] or value.shape  # the names of sizes that the caller knows
    if target == PRIMITIVE.name:
        forget_named_sizes(model)
    say("check")
    make_sound(model, "the result")
    return Program(model, dataclasses.replace(_with_targets(report, outcomes), needs=_needs(model, release)))


def _declared(model: ir.Model) -> dict[str | None, ir.Shape | None]:
    return {value.name: value.shape for value in (*model.graph.inputs, *model.graph.outputs)}


def require_complete(report: FusionReport) -> None:
    """Raises FusionRequiredError, saying what was missed, unless all QK-Norm attention of the model is fused."""
    if report.complete:
        return
    if not (report.fused or report.declined or report.refused):
        raise FusionRequiredError(f"no QK-Norm attention found: {report.absence}")
    misses = [f"{miss.name}: {miss.reason}" for miss in report.declined]
    misses += [f"{refusal.name}: {refusal.reason}" for refusal in report.refused]
    total = len(report.fused) + len(misses)
    raise FusionRequiredError(f"{len(misses)} of {total} QK-Norm attentions are not fused: {'; '.join(misses)}")


def _needs(model: ir.Model, release: Release | None) -> str:
    """What a finished model needs, in one line; InputError where that is more than `release` has."""
    if release is not None:
        model.ir_version = min(model.ir_version, release.ir_version)  # what newer ones add, no model of these opsets has
    needs = needs_of(model)
    if release is not None and (needs.oldest is None or needs.oldest > release):
        raise InputError(f"onnxruntime {release} cannot load this model, which {needs.line}; write it for that one")
    return needs.line


def _silent(_stage: str) -> None:
    """No progress shown."""


def _prover() -> Prover:
    from qknorm_onnx.proof.region_prover import RegionProver

    return RegionProver()


def _fuse_pass(target: str, provider: str, *, verify: bool) -> FuseQKNormPass:
    """Keeps what was lowered as is asked for now; the kernels on CUDA cannot make room in a cache."""
    return FuseQKNormPass(
        _prover() if verify else None,
        keeps=lambda mark: (mark.asked, mark.provider) == (target, provider),
        buffers_grow=provider != "cuda",
    )


def _with_targets(report: FusionReport, outcomes: tuple[LoweringOutcome, ...]) -> FusionReport:
    by_name = {outcome.name: outcome for outcome in outcomes}

    def with_target(fused: FusedAttention) -> FusedAttention:
        outcome = by_name.get(fused.name)
        if outcome is None:
            return fused
        note = "; ".join(part for part in (fused.note, outcome.note) if part)
        return dataclasses.replace(fused, target=outcome.target, note=note)

    return dataclasses.replace(report, fused=tuple(with_target(fused) for fused in report.fused))
