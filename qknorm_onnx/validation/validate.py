"""`validate`: a model against its PyTorch module, in one or several types, on many inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.model_file import ModelSource
from qknorm_onnx.runtime.runner import CannotRunError, loaded_model
from qknorm_onnx.runtime.session import HasModel
from qknorm_onnx.spec.signature import Dtype
from qknorm_onnx.validation.candidate import NUMPY_TYPES, Candidate, candidate_in, rounded_inputs
from qknorm_onnx.validation.cases import Case, make_cases
from qknorm_onnx.validation.error_budget import OwnErrors
from qknorm_onnx.validation.inputs import match_inputs
from qknorm_onnx.validation.judgement import Measured, judge, own_errors
from qknorm_onnx.validation.locate import locate_fault
from qknorm_onnx.validation.report import ParityReport, ParityRow
from qknorm_onnx.validation.untried import untried

if TYPE_CHECKING:
    import torch

    from qknorm_onnx.validation.torch_side import TorchSide

__all__ = ["ParityReport", "validate"]

Tensor = npt.NDArray[Any]
Progress = Callable[[str], None]

_MOST_FAULTS_LOCATED: Final = 3  # per type: finding one runs the model twice more


def validate(
    program_or_path: HasModel | ModelSource,
    module: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dtypes: Sequence[Dtype] = ("float32",),
    cases: Iterable[Case] | None = None,
    seeds: int = 1,
    progress: Progress | None = None,
) -> ParityReport:
    """Judge a model against float64, with PyTorch's own error in the same type as the budget.

    For each type: weights and inputs are rounded to it; the truth is the module in float64 on them; PyTorch's own error is
    eager `module.to(dtype)` on the CPU; the candidate may be off by twice that plus four units of the type. Where it is off by
    more, PyTorch's own error is the largest of several runs, in which the module adds its sums in other orders: one run alone
    may be lucky. An error that none of them comes near to is a failure.

    Args:
        program_or_path: `qk.Program`, path, `onnx.ModelProto` or `onnx_ir.Model`.
        module: the module that it was exported from, with its weights.
        args: example arguments, as for the export.
        kwargs: example keyword arguments.
        dtypes: "float32", "float16", "bfloat16". A float32 file is converted for the others; a file in float16 or bfloat16 is
            judged in its own type. bfloat16 is emulated on the CPU, and the report says so.
        cases: instead of the ones made from the example (its batch and lengths varied, adversarial values).
        seeds: number of further cases with random values at the example's size.
        progress: called with a line of text before each case.

    Returns:
        One row per type, case and output. `passed` needs evidence: a comparison of nothing is a failure.

    Raises:
        InputError: torch is missing, `dtypes` names an unknown type, or the graph's inputs do not match the arguments.
    """
    _require_dtypes(dtypes)
    torch_side = _import_torch_side()
    model = loaded_model(program_or_path)
    call = torch_side.call_of(module, args, kwargs)
    inputs = match_inputs(model, call.examples())
    chosen = tuple(cases) if cases is not None else tuple(make_cases(inputs, seeds=seeds))
    if not chosen:
        raise InputError("cases is empty: there is nothing to judge")
    rows: list[ParityRow] = []
    notes: dict[str, None] = dict.fromkeys(untried(inputs, chosen, module=module, model=model))
    for dtype in dtypes:
        run = _TypeRun(
            dtype=dtype, side=torch_side.TorchSide(call, inputs, dtype), vocabularies=_vocabularies(module), notes=notes
        )
        rows += run.rows(model, chosen, progress or _silent)
    return ParityReport(dtypes=tuple(dtypes), rows=tuple(rows), notes=tuple(notes))


@dataclasses.dataclass
class _TypeRun:
    """All cases in one type."""

    dtype: Dtype
    side: TorchSide
    vocabularies: frozenset[int]
    notes: dict[str, None]
    located: int = 0

    def rows(self, model: ir.Model, cases: Sequence[Case], say: Progress) -> Iterator[ParityRow]:
        try:
            candidate = candidate_in(model, self.dtype)
        except InputError as error:
            yield ParityRow(dtype=self.dtype, how="", case="all", output="all", verdict="not run", reason=str(error))
            return
        self._explain(candidate)
        for case in cases:
            say(f"{self.dtype}: {case.name}")
            yield from self._case_rows(candidate, case)
        for note in (self.side.note, self.side.autocast_note, self.side.order_note):
            if note:
                self.notes[f"{self.dtype}: {note}"] = None

    def _explain(self, candidate: Candidate) -> None:
        if "emulated" in candidate.how:
            self.notes["bfloat16 is emulated: bfloat16 values at the borders of operators, float32 arithmetic"] = None
        if "converted" in candidate.how:
            self.notes["converted: the float32 file in a half type; statistics of norms and positions stay float32"] = None

    def _case_rows(self, candidate: Candidate, case: Case) -> Iterator[ParityRow]:
        inputs = rounded_inputs(case.inputs, self.dtype)
        blank = ParityRow(
            dtype=self.dtype, how=candidate.how, case=case.name, output="all", verdict="not run", required=case.required
        )
        try:
            truth = self.side.truth(inputs)
        except Exception as error:
            if case.required:
                raise InputError(f"the module does not run on the example: {' '.join(str(error).split())[:300]}") from error
            self.notes[f"case {case.name!r} left out: the module itself refuses these sizes"] = None
            return
        if self.side.truth_type == self.dtype:
            yield dataclasses.replace(blank, reason=f"there is no truth to judge by: {self.side.note}")
            return
        try:
            given = candidate.run(inputs)
        except CannotRunError as error:
            yield dataclasses.replace(blank, verdict="failed", reason=f"PyTorch runs on this case, the model does not: {error}")
            return
        yield from self._output_rows(candidate, blank, inputs, truth, given)

    def _output_rows(
        self, candidate: Candidate, blank: ParityRow, inputs: Mapping[str, Tensor], truth: list[Tensor], given: list[Tensor]
    ) -> Iterator[ParityRow]:
        if len(truth) != len(given):
            reason = f"the model has {len(given)} outputs, the module returns {len(truth)} tensors"
            yield dataclasses.replace(blank, verdict="failed", reason=reason)
            return
        in_float32 = self.side.in_float32(inputs)
        in_dtype = in_float32 if self.dtype == "float32" else self.side.in_dtype(inputs)
        others: list[list[OwnErrors]] | None = None  # of each output; asked for where one run of PyTorch is too little
        for index, name in enumerate(candidate.runner.output_names):
            own = None if in_dtype is None else in_dtype[index]
            measured = Measured(truth=truth[index], in_float32=in_float32[index], in_dtype=own, given=given[index])
            named, is_logits = dataclasses.replace(blank, output=name), self._is_logits(inputs, truth[index])
            row = judge(named, measured, is_logits=is_logits)
            if row.exceeds:
                others = self._errors_in_other_orders(inputs, truth) if others is None else others
                row = judge(named, measured, is_logits=is_logits, others=others[index])
            yield self._located(candidate, row, inputs, truth) if row.verdict != "passed" else row

    def _errors_in_other_orders(self, inputs: Mapping[str, Tensor], truth: list[Tensor]) -> list[list[OwnErrors]]:
        """For each output PyTorch's own errors with its sums in other orders."""
        errors: list[list[OwnErrors]] = [[] for _ in truth]
        for in_float32, in_dtype in self.side.in_other_orders(inputs):
            for index, exact in enumerate(truth):
                errors[index].append(own_errors(exact, in_float32[index], None if in_dtype is None else in_dtype[index]))
        return errors

    def _located(self, candidate: Candidate, row: ParityRow, inputs: Mapping[str, Tensor], truth: list[Tensor]) -> ParityRow:
        if self.located >= _MOST_FAULTS_LOCATED:
            return row
        self.located += 1
        not_finite = row.torch_error is not None and not np.isfinite(row.torch_error)
        fault = locate_fault(candidate, inputs, truth, allowed=row.budget, torch_not_finite=not_finite)
        return dataclasses.replace(row, fault=fault)

    def _is_logits(self, inputs: Mapping[str, Tensor], truth: Tensor) -> bool:
        """Scores over a vocabulary: the model reads tokens, and the last axis is as long as one of its embeddings."""
        reads_tokens = any(np.issubdtype(array.dtype, np.integer) for array in inputs.values())
        return reads_tokens and truth.ndim == 3 and truth.shape[-1] in self.vocabularies


def _silent(text: str) -> None:
    """Progress that nobody watches."""
    del text


def _vocabularies(module: torch.nn.Module) -> frozenset[int]:
    import torch

    return frozenset(part.num_embeddings for part in module.modules() if isinstance(part, torch.nn.Embedding))


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
