"""`validate`: a model against its PyTorch module, in one or several types, on many inputs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.model_file import ModelSource, label_of
from qknorm_onnx.runtime.runner import loaded_model
from qknorm_onnx.runtime.session import HasModel
from qknorm_onnx.spec.signature import Dtype
from qknorm_onnx.validation.candidate import NUMPY_TYPES
from qknorm_onnx.validation.cases.case import Case
from qknorm_onnx.validation.cases.domain import windows_of
from qknorm_onnx.validation.cases.given import require_inputs
from qknorm_onnx.validation.cases.inputs import GraphInput, match_inputs
from qknorm_onnx.validation.cases.made import make_cases
from qknorm_onnx.validation.cases.untried import untried
from qknorm_onnx.validation.failure_folder import require_room
from qknorm_onnx.validation.report.about import About, installed_versions
from qknorm_onnx.validation.report.parity_report import ParityReport
from qknorm_onnx.validation.report.parity_row import ParityRow
from qknorm_onnx.validation.shared_weights import SharedWeights
from qknorm_onnx.validation.spec_check import SpecCheck
from qknorm_onnx.validation.type_run import RunOptions, TypeRun

if TYPE_CHECKING:
    import torch


__all__ = ["ParityReport", "validate"]

Progress = Callable[[str], None]


def validate(
    program_or_path: HasModel | ModelSource,
    module: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dtypes: Sequence[Dtype] = ("float32",),
    cases: Iterable[Case] | None = None,
    seeds: int = 1,
    tolerance: float | None = None,
    fail_fast: bool = False,
    locate: int = 1,
    ranges: bool = False,
    save_failure: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> ParityReport:
    """Judge a model against float64, with PyTorch's own error in the same type as the budget.

    For each type: weights and inputs are rounded to it; the truth is the module in float64 on them; PyTorch's own error is
    eager `module.to(dtype)` on the CPU; the candidate may be off by twice that plus four units of the type. Where it is off by
    more, PyTorch's own error is the largest of several runs, in which the module adds its sums in other orders: one run alone
    may be lucky. An error that none of them comes near to is a failure. Beside the numbers, the spec of each attention in the
    file is compared with the one that is read off its module, where a reader knows it.

    Args:
        program_or_path: `qk.Program`, path, `onnx.ModelProto` or `onnx_ir.Model`.
        module: the module that it was exported from, with its weights.
        args: example arguments, as for the export.
        kwargs: example keyword arguments.
        dtypes: "float32", "float16", "bfloat16". A float32 file is converted for the others; a file in float16 or bfloat16 is
            judged in its own type. bfloat16 is emulated on the CPU, and the report says so.
        cases: instead of the ones made from the example (its batch and lengths varied, adversarial values).
        seeds: number of further cases with random values at the example's size.
        tolerance: what max|y - r| / max|r| of every float output may be, instead of the budget.
        fail_fast: end with the first output that fails; the report says that the rest was not tried.
        locate: how many failures of each type are followed into the model, to the first part of the module that it does not
            compute or the first operator that rounds too much. Each runs module and model again.
        ranges: note how large the values inside the model and the logits of its attentions are on the example, in each type.
        save_failure: a folder that is missing or empty. Where a type fails, its first failing case is written to a folder of the
            type's name in there: the model as it was judged, inputs, outputs, exact results, and a script that repeats it.
        progress: called with a line of text before each case.

    Returns:
        One row per type, case and output. `passed` needs evidence: a comparison of nothing is a failure.

    Raises:
        InputError: torch is missing, `dtypes` names an unknown type, the graph's inputs do not match the arguments, a case of
            `cases` does not give them, `tolerance` is not a number above 0, or `save_failure` is not empty.
    """
    _require_dtypes(dtypes)
    options = _options(locate=locate, tolerance=tolerance, ranges=ranges, save_failure=save_failure)
    torch_side = _import_torch_side()
    model = loaded_model(program_or_path)
    call = torch_side.call_of(module, args, kwargs)
    inputs = match_inputs(model, call.examples())
    first = torch_side.TorchSide(call, inputs, dtypes[0])
    shared = SharedWeights.of(model, module, first.observed())
    domain = shared.domain(inputs, call.tensor_places, windows=windows_of(module, model))
    chosen = _checked(cases, inputs) if cases is not None else tuple(make_cases(inputs, domain=domain, seeds=seeds))
    specs = SpecCheck.of(model, module)
    notes: dict[str, None] = dict.fromkeys((*untried(inputs, chosen, domain=domain), *shared.untried(), *specs.notes))
    runs: list[TypeRun] = []
    rows: list[ParityRow] = []
    for dtype in dtypes:
        side = first if dtype == dtypes[0] else torch_side.TorchSide(call, inputs, dtype)
        run = TypeRun(dtype=dtype, side=side, shared=shared, specs=specs, notes=notes, options=options)
        runs.append(run)
        of_type = run.rows(model, chosen, progress or _silent)
        rows += _until_failure(of_type, notes) if fail_fast else of_type
        if fail_fast and any(row.is_bad for row in rows):
            break
    about = _about(program_or_path, specs, seeds if cases is None else 0)
    return _report(dtypes, rows, notes=notes, about=about, runs=runs)


def _report(
    dtypes: Sequence[Dtype], rows: Sequence[ParityRow], *, notes: Iterable[str], about: About, runs: Sequence[TypeRun]
) -> ParityReport:
    return ParityReport(
        dtypes=tuple(dtypes),
        rows=tuple(rows),
        notes=tuple(notes),
        about=about,
        ranges=tuple(item for run in runs for item in run.ranges),
        logits=next((run.logits for run in runs if run.logits), ()),
    )


def _about(source: HasModel | ModelSource, specs: SpecCheck, seeds: int) -> About:
    name = label_of(source) if isinstance(source, (str, os.PathLike)) else ""
    return About(model=name, seeds=seeds, attention=specs.attention, versions=installed_versions())


def _checked(cases: Iterable[Case], inputs: Sequence[GraphInput]) -> tuple[Case, ...]:
    """Cases of the caller. Raises InputError where there is none, or one does not give what the graph takes."""
    chosen = tuple(cases)
    if not chosen:
        raise InputError("cases is empty: there is nothing to judge")
    for case in chosen:
        require_inputs(case, inputs)
    return chosen


def _until_failure(rows: Iterable[ParityRow], notes: dict[str, None]) -> Iterator[ParityRow]:
    """The rows up to the first bad one, and with it; a note says so."""
    for row in rows:
        yield row
        if row.is_bad:
            notes["stopped at the first failure: what follows it was not tried"] = None
            return


def _options(*, locate: int, tolerance: float | None, ranges: bool, save_failure: str | os.PathLike[str] | None) -> RunOptions:
    if tolerance is not None and not 0 < tolerance < math.inf:
        raise InputError(f"tolerance is {tolerance}; give a relative error above 0, for example 1e-3")
    if locate < 0:
        raise InputError(f"locate is {locate}; give how many failures to follow into the model, 0 for none")
    folder = None if save_failure is None else Path(save_failure)
    if folder is not None:
        require_room(folder)
    return RunOptions(locate=locate, tolerance=tolerance, ranges=ranges, save_failure=folder)


def _silent(text: str) -> None:
    """Progress that nobody watches."""
    del text


def _require_dtypes(dtypes: Sequence[Dtype]) -> None:
    if isinstance(dtypes, str) or not dtypes:
        raise InputError(f"dtypes is {dtypes!r}; give a tuple such as ('float32', 'float16')")
    for dtype in dtypes:
        if dtype not in NUMPY_TYPES:
            raise InputError(f"unknown type {dtype!r}; choose among {', '.join(NUMPY_TYPES)}")


def _import_torch_side() -> Any:
    try:
        import torch as _  # noqa: F401

        from qknorm_onnx.validation import torch_side
    except ImportError as error:
        raise InputError("validating needs torch; run: pip install 'qknorm-onnx[torch]'") from error
    return torch_side
