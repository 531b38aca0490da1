"""All cases in one type: the module in float64, PyTorch in the type, and the model, side by side."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.canonical.qk_norm_node import is_attention_node
from qknorm_onnx.runtime.runner import CannotRunError
from qknorm_onnx.spec.signature import Dtype
from qknorm_onnx.validation.candidate import NUMPY_TYPES, Candidate, candidate_in, rounded_inputs
from qknorm_onnx.validation.cases.case import Case, WeightScale
from qknorm_onnx.validation.failure_folder import save_failure
from qknorm_onnx.validation.inside.inner_values import inner_values
from qknorm_onnx.validation.inside.logit_ranges import logit_ranges
from qknorm_onnx.validation.judgement import Measured, is_left_out, judge, own_errors, without_what_changes
from qknorm_onnx.validation.locate import locate_fault
from qknorm_onnx.validation.measures.error_budget import OwnErrors
from qknorm_onnx.validation.report.parity_row import ParityRow
from qknorm_onnx.validation.report.ranges import LogitRange, ValueRange
from qknorm_onnx.validation.shared_weights import SharedWeights, scaled_model
from qknorm_onnx.validation.spec_check import SpecCheck

if TYPE_CHECKING:
    from qknorm_onnx.validation.torch_side import TorchSide

Tensor = npt.NDArray[Any]
Progress = Callable[[str], None]

# An error of so many budgets is none of rounding: PyTorch's sums are not tried in other orders.
HOPELESS: Final = 100.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """`locate`: how many faults of a type are searched for inside the model, which runs it and the module again for each.

    `tolerance`: the allowed max|y - r| / max|r| of every float output, instead of the budget.
    `ranges`: note how large the values inside the model are on the example.
    `save_failure`: where each type's first failing case is kept, in a folder of its own.
    """

    locate: int = 1
    tolerance: float | None = None
    ranges: bool = False
    save_failure: Path | None = None


@dataclasses.dataclass
class TypeRun:
    """All cases in one type. `notes` are added to."""

    dtype: Dtype
    side: TorchSide
    shared: SharedWeights
    specs: SpecCheck
    notes: dict[str, None]
    options: RunOptions
    located: int = 0
    saved: bool = False
    ranges: tuple[ValueRange, ...] = ()
    logits: tuple[LogitRange, ...] = ()

    def rows(self, model: ir.Model, cases: Sequence[Case], say: Progress) -> Iterator[ParityRow]:
        """One row for each case and output, and one for each table that is in module and file."""
        try:
            candidate = candidate_in(model, self.dtype)
        except InputError as error:
            yield ParityRow(dtype=self.dtype, how="", case="all", output="all", verdict="not run", reason=str(error))
            return
        self._explain(candidate)
        chosen = [case for case in cases if case.in_half or self.dtype == "float32"]
        for scale, group in itertools.groupby(chosen, key=lambda case: case.weights):
            if scale is None:
                yield from self._group_rows(candidate, group, say)
            else:
                with self.side.scaled(scale.factors):
                    yield from self._group_rows(self._scaled(model, scale), group, say)
        yield from self.shared.table_rows(self.dtype, candidate.how)
        yield from self.specs.rows(self.dtype, candidate.how)
        for note in (self.side.note, self.side.autocast_note, self.side.order_note):
            if note:
                self.notes[f"{self.dtype}: {note}"] = None

    def _group_rows(self, candidate: Candidate, cases: Iterable[Case], say: Progress) -> Iterator[ParityRow]:
        """Cases with the same weights."""
        for case in cases:
            say(f"{self.dtype}: {case.name}")
            yield from self._case_rows(candidate, case)

    def _scaled(self, model: ir.Model, scale: WeightScale) -> Candidate:
        weights = {name: self.shared.weight(name) for name in scale.factors}
        return candidate_in(scaled_model(model, weights, scale.factors, NUMPY_TYPES[self.dtype]), self.dtype)

    def _explain(self, candidate: Candidate) -> None:
        if "emulated" in candidate.how:
            self.notes["bfloat16 is emulated: bfloat16 values at the borders of operators, float32 arithmetic"] = None
        if "converted" in candidate.how:
            self.notes["converted: the float32 file in a half type; statistics of norms and positions stay float32"] = None

    def _case_rows(self, candidate: Candidate, case: Case) -> Iterator[ParityRow]:
        inputs = rounded_inputs(case.inputs, self.dtype)
        blank = ParityRow(
            dtype=self.dtype,
            how=candidate.how,
            case=case.name,
            output="all",
            verdict="not run",
            required=case.required,
            purpose=case.purpose,
        )
        try:
            truth = self._truth(inputs, case)
        except Exception as error:
            if case.required:
                raise InputError(f"the module does not run on the example: {' '.join(str(error).split())[:300]}") from error
            self.notes[f"case {case.name!r} left out: the module itself refuses it"] = None
            return
        if self.side.truth_type == self.dtype:
            yield dataclasses.replace(blank, reason=f"there is no truth to judge by: {self.side.note}")
            return
        try:
            given = candidate.run(inputs)
        except CannotRunError as error:
            yield dataclasses.replace(blank, verdict="failed", reason=f"PyTorch runs on this case, the model does not: {error}")
            return
        rows = list(self._output_rows(candidate, blank, inputs, truth, given))
        if self.options.save_failure is not None and any(row.is_bad for row in rows) and not self.saved:
            self._save(candidate, inputs, truth, given, rows)
        yield from rows
        if self.options.ranges and case.required and not self.ranges:
            self._note_ranges(candidate, inputs)

    def _save(
        self, candidate: Candidate, inputs: Mapping[str, Tensor], truth: list[Tensor], given: list[Tensor], rows: list[ParityRow]
    ) -> None:
        assert self.options.save_failure is not None, "asked for"
        self.saved = True
        places = places_by_name(candidate.runner.output_names, self.side.output_names)
        if len(truth) != len(given):
            return
        folder = self.options.save_failure / self.dtype
        save_failure(folder, candidate, inputs=inputs, exact=[truth[place] for place in places], given=given, rows=rows)
        self.notes[f"{self.dtype}: case {rows[0].case} is kept in {folder}; repeat.py there runs it again"] = None

    def _note_ranges(self, candidate: Candidate, inputs: Mapping[str, Tensor]) -> None:
        try:
            self.ranges = tuple(
                ValueRange(
                    dtype=self.dtype,
                    node=str(value.node.name),
                    op_type=value.node.op_type,
                    is_attention=is_attention_node(value.node),
                    largest=value.largest,
                    smallest=value.smallest,
                    error=value.error,
                    lost=value.lost,
                )
                for value in inner_values(candidate.model, inputs, arithmetic=candidate.arithmetic)
            )
            found = logit_ranges(candidate.model, inputs)
            self.logits = tuple(LogitRange(name=name, lowest=lowest, highest=highest) for name, lowest, highest in found)
        except CannotRunError as error:
            self.notes[f"{self.dtype}: the values inside the graph could not be read: {error}"] = None

    def _truth(self, inputs: Mapping[str, Tensor], case: Case) -> list[Tensor]:
        """The outputs in float64, NaN where they hang on the values of hidden tokens."""
        truth = self.side.truth(inputs)
        if case.with_other_padding is None:
            return truth
        other = self.side.truth(rounded_inputs(case.with_other_padding, self.dtype))
        return [without_what_changes(value, changed) for value, changed in zip(truth, other, strict=True)]

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
        places = places_by_name(candidate.runner.output_names, self.side.output_names)
        in_graph_order = [truth[place] for place in places]
        for name, value, place in zip(candidate.runner.output_names, given, places, strict=True):
            if is_left_out(truth[place]):
                continue
            own = None if in_dtype is None else in_dtype[place]
            measured = Measured(truth=truth[place], in_float32=in_float32[place], in_dtype=own, given=value)
            named, is_logits = dataclasses.replace(blank, output=name), self._is_logits(inputs, truth[place])
            tolerance = self.options.tolerance
            row = judge(named, measured, is_logits=is_logits, tolerance=tolerance)
            if row.exceeds and tolerance is None and row.error < HOPELESS * row.budget:
                others = self._errors_in_other_orders(inputs, truth) if others is None else others
                row = judge(named, measured, is_logits=is_logits, others=others[place])
            yield self._located(candidate, row, inputs, in_graph_order) if row.verdict != "passed" else row

    def _errors_in_other_orders(self, inputs: Mapping[str, Tensor], truth: list[Tensor]) -> list[list[OwnErrors]]:
        """For each output PyTorch's own errors with its sums in other orders."""
        errors: list[list[OwnErrors]] = [[] for _ in truth]
        for in_float32, in_dtype in self.side.in_other_orders(inputs):
            for index, exact in enumerate(truth):
                errors[index].append(own_errors(exact, in_float32[index], None if in_dtype is None else in_dtype[index]))
        return errors

    def _located(self, candidate: Candidate, row: ParityRow, inputs: Mapping[str, Tensor], truth: list[Tensor]) -> ParityRow:
        if self.located >= self.options.locate:
            return row
        self.located += 1
        not_finite = row.torch_error is not None and not np.isfinite(row.torch_error)
        fault = locate_fault(candidate, self.side, inputs, truth, allowed=row.budget, torch_not_finite=not_finite)
        return dataclasses.replace(row, fault=fault)

    def _is_logits(self, inputs: Mapping[str, Tensor], truth: Tensor) -> bool:
        """Scores over a vocabulary: the model reads tokens, and the last axis is as long as one of its embeddings."""
        reads_tokens = any(np.issubdtype(array.dtype, np.integer) for array in inputs.values())
        return reads_tokens and truth.ndim == 3 and truth.shape[-1] in self.shared.vocabularies


def places_by_name(given: Sequence[str], module: Sequence[str]) -> list[int]:
    """For each output of the graph its place among the module's: by name where all names are the same, else in order."""
    if len(set(module)) == len(module) and set(given) == set(module):
        return [module.index(name) for name in given]
    return list(range(len(given)))
