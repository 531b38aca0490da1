"""One entry of the model zoo from PyTorch to a judged ONNX model, by the public functions of the package."""

from __future__ import annotations

import copy
import dataclasses
import gc
import re
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Final

import torch

import qknorm_onnx as qk
from qknorm_onnx.errors import ExportError
from qknorm_onnx.runtime.native_kernels import canonical_nodes, native_kernels_for
from qknorm_onnx.runtime.runner import CannotRunError
from qknorm_onnx.spec.signature import Dtype
from qknorm_onnx.validation.cases.inputs import match_inputs
from qknorm_onnx.validation.cases.made import make_cases
from qknorm_onnx.validation.report.parity_report import ParityReport
from qknorm_onnx.validation.torch_side import call_of
from tools.coverage_table import Cell, Decode, Row, error_text
from tools.native_nodes import NativeNodes
from tools.zoo_facts import facts

WHOLE_MODEL: Final[dict[str, Dtype]] = {"fp32": "float32", "fp16": "float16", "bf16 emulated": "bfloat16"}
# Sizes on which a node is judged alone: as exported, fewer and more rows, longer sequences.
NODE_CASES: Final = ("example", "batch 1", "batch 3", "batch 3, longer")
DECODE_AXES: Final = ({0: "batch"}, {0: "batch"}, {0: "batch", 1: "past+1"})
PAST_AXES: Final = {0: "batch", 2: "past"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """An entry's module and example beside its program."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    program: qk.Program
    notes: tuple[str, ...] = ()


def measure(zoo: ModuleType, entry: str) -> Row:
    """Export, fuse and judge one entry. What goes wrong on the way becomes part of the row."""
    blank = dataclasses.replace(empty_row(zoo, entry), refusal="")
    try:
        measured = exported(zoo, entry)
    except Exception as error:
        return dataclasses.replace(blank, refusal=_one_line(error))
    report = measured.program.report
    row = dataclasses.replace(
        blank,
        notes=(*measured.notes, *report.notes),
        fused=proven(measured.program),
        plain=len(report.plain),
        missed=(*(miss.reason for miss in report.declined), *(miss.reason for miss in report.refused)),
        parity=parity(measured),
    )
    gc.collect()
    return dataclasses.replace(row, decode=decode(zoo, entry) if row.decode_wanted else None)


def empty_row(zoo: ModuleType, entry: str) -> Row:
    """The row of an entry that was not measured to the end."""
    _, _, _, tags = built(zoo, entry)
    form = ", ".join(str(tags[key]) for key in ("norm", "axis", "order", "rope", "scale", "mask"))
    return Row(
        entry=entry,
        form=form,
        fusable=facts(entry).fusable,
        refusal="the process ended while this entry was measured",
        decode_wanted=tags["cache"] == "dynamic",
    )


def built(zoo: ModuleType, entry: str) -> tuple[torch.nn.Module, dict[str, Any], dict[str, dict[int, str]], dict[str, Any]]:
    """Module, example inputs, dynamic axes and tags of an entry, with PyTorch's own attention where the model has it."""
    built: tuple[torch.nn.Module, dict[str, Any], dict[str, dict[int, str]], dict[str, Any]] = zoo.ZOO[entry]("sdpa")
    return built


def exported(zoo: ModuleType, entry: str) -> Measured:
    """The entry by `qk.export`; where a size has a bound, within the bound that the refusal names."""
    module, kwargs, axes, _ = built(zoo, entry)
    try:
        program, notes = qk.export(module, (), kwargs, dynamic_shapes=axes or None), ()
    except ExportError as error:
        bounds = {kind: int(size) for kind, size in re.findall(r"Dim\('\w+', (min|max)=(\d+)", str(error))}
        if not bounds:
            raise
        bounded = {name: {axis: torch.export.Dim(dim, **bounds) for axis, dim in dims.items()} for name, dims in axes.items()}
        program = qk.export(module, (), kwargs, dynamic_shapes=bounded)
        notes = tuple(f"a size is treated apart by the module: exported with {kind} {size}" for kind, size in bounds.items())
    return Measured(module=module, args=(), kwargs=kwargs, program=program, notes=notes)


def proven(program: qk.Program) -> int:
    """How many attentions are fused and proven."""
    return sum(not fused.note.startswith("unverified") for fused in program.report.fused)


def parity(measured: Measured) -> dict[str, Cell]:
    """Every column of `coverage_table.PARITY`; without fused nodes there are none to judge alone."""
    cells = {name: _guarded(whole_model, measured, dtype) for name, dtype in WHOLE_MODEL.items()}
    if any(canonical_nodes(measured.program.model)):
        cells["bf16 nodes"] = _guarded(nodes_alone, measured, "bfloat16")
    return cells


def _guarded(judge: Callable[[Measured, Dtype], Cell], measured: Measured, dtype: Dtype) -> Cell:
    try:
        return judge(measured, dtype)
    except Exception as error:
        return Cell(verdict="failed", reason=_one_line(error))


def whole_model(measured: Measured, dtype: Dtype) -> Cell:
    """The verdict of `qk.validate` in one type, with the native library loaded (except where bfloat16 is emulated)."""
    kernels = native_kernels_for(measured.program.model, provider="cpu")
    if kernels.library is None and any(canonical_nodes(measured.program.model)):
        return Cell(verdict="failed", reason=f"the native library is not used: {kernels.reason}")
    return cell_of(qk.validate(measured.program, measured.module, measured.args, measured.kwargs, dtypes=(dtype,)))


def cell_of(report: ParityReport) -> Cell:
    """The row that comes nearest to its allowance, or the first failure and how many there are."""
    if not report.passed:
        bad = report.failures or report.rows
        counted = f"{len(report.failures)} of {len(report.rows)} comparisons; {bad[0].case}: {bad[0].reason or bad[0].verdict}"
        return Cell(verdict="failed", error=error_text(bad[0].error), allowed=error_text(bad[0].budget), reason=counted)
    worst = max((row for row in report.rows if row.verdict == "passed"), key=lambda row: row.error / row.budget)
    return Cell(verdict="ok", error=error_text(worst.error), allowed=error_text(worst.budget))


def nodes_alone(measured: Measured, dtype: Dtype) -> Cell:
    """Each canonical node alone in its native kernel, on what reaches it at several sizes."""
    model = measured.program.model
    call = call_of(measured.module, measured.args, measured.kwargs)
    nodes = NativeNodes(model, dtype)
    errors = []
    for case in make_cases(match_inputs(model, call.examples())):
        if case.name not in NODE_CASES:
            continue
        try:
            errors += list(nodes.errors(case.inputs))
        except CannotRunError:  # sizes that the module itself refuses; `validate` tells the two apart
            if case.required:
                raise
    worst = max(errors, key=lambda item: item.error / item.allowed)
    beyond = [item for item in errors if not item.is_allowed]
    figures = {"error": error_text(worst.error), "allowed": error_text(worst.allowed)}
    if beyond:
        return Cell(verdict="failed", reason=f"{len(beyond)} of {len(errors)} outputs, first {beyond[0].name}", **figures)
    return Cell(verdict="ok", **figures)


def decode(zoo: ModuleType, entry: str) -> Decode:
    """One-token decode with a cache: fused with the cache inside the node, and judged in float32."""
    try:
        measured = exported_decode(zoo, entry)
    except Exception as error:
        return Decode(fused=0, fusable=facts(entry).fusable, parity=Cell(verdict="failed", reason=_one_line(error)))
    cached = sum(_has_cache(node) for node in canonical_nodes(measured.program.model))
    fused = min(cached, proven(measured.program))
    return Decode(fused=fused, fusable=facts(entry).fusable, parity=_guarded(whole_model, measured, "float32"))


def exported_decode(zoo: ModuleType, entry: str) -> Measured:
    """The one-token form of an entry, with the past of each layer as inputs."""
    module, example, _ = zoo.build_with_cache(entry, "sdpa")
    axes = (*DECODE_AXES, *([PAST_AXES] * (len(example) - len(DECODE_AXES))))
    program = qk.export(module.eval(), example, dynamic_shapes=axes)
    return Measured(module=module, args=copy.deepcopy(example), kwargs={}, program=program)


def _has_cache(node: Any) -> bool:
    past: Sequence[Any] = node.inputs[12:14]
    return len(past) == 2 and all(value is not None for value in past) and len(node.outputs) == 3


def _one_line(error: BaseException) -> str:
    """The innermost error, on one line and not too long; an ExportError says it itself, with the module's line."""
    while error.__cause__ is not None and not isinstance(error, ExportError):
        error = error.__cause__
    return " ".join(str(error).split())[:300] or type(error).__name__
