"""Keeps or refuses a rewrite by running the old and the new subgraph on the same random inputs.

How large a difference is an error follows from what a right rewrite may change. Both sides run in float64, so rounding in
the arithmetic does not count. A right rewrite may fold constants (a scale split into two roots, 1 + w, eps / D, 1 / sqrt(D))
and stores the result as float32: a relative change of up to 2^-24 of each constant. How far such changes carry depends on
the subgraph (a temperature of 100 makes a hundredfold of them), so it is measured: the old subgraph runs again with every
float constant moved by 2^-23 of itself, up or down at random. Four times what that changes, plus 1e-6 of the output's
largest value, is put down to folding; real mistakes (another epsilon, order, window, head) are larger by orders.

Operators of onnxruntime have no float64 kernels. A subgraph with one of them runs in float32, and is compared with the new one
in float64. A float32 evaluation may be off by what moving its inputs and constants by a few roundings does to the result,
which is measured as above, and by as much again as the new subgraph is off in float32; four and two times that is allowed.

float16 and bfloat16 subgraphs are run in their own type besides: against the old one in float64, the new one's error is at
most twice the old one's plus four units of the type, and it is finite wherever the old one is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import onnx_ir as ir

from qknorm_onnx.graph.rewrite.prover import Proof
from qknorm_onnx.graph.walk.constants import MICROSOFT_DOMAIN
from qknorm_onnx.proof.comparison import Comparison
from qknorm_onnx.proof.opened_norms import has_norms_inside, with_norms_in_front
from qknorm_onnx.proof.region_inputs import RegionCase, region_cases
from qknorm_onnx.proof.region_sizes import Relation, SymbolTable
from qknorm_onnx.proof.row_lengths import RowLengthInputs, length_cases, row_lengths
from qknorm_onnx.proof.subgraph_side import ProofSide, ProofSideMaker
from qknorm_onnx.runtime.runner import CannotRunError

_HALF_TYPES: Final = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_UNDEFINED: Final = "nothing was compared: the outputs are empty or not finite in every case"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseSource:
    """What the inputs of a region are made from, anew for each arithmetic."""

    inputs: Sequence[ir.Value]
    table: SymbolTable
    relation: Relation | None
    lengths: RowLengthInputs | None
    seed: int

    def cases(self, *, half: bool = False) -> Iterator[RegionCase]:
        """The cases in order; with `half`, of sizes that half precision holds."""
        if self.lengths is not None:
            return length_cases(self.lengths, self.inputs, self.table, seed=self.seed, half=half)
        return region_cases(self.inputs, self.table, self.relation, seed=self.seed, half=half)


class RegionProver:
    """Implements `graph.prover.Prover`. One prover for a whole model: layers of equal structure share their sessions."""

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed
        self._sides = ProofSideMaker()

    def prove(self, old: ir.Model, new: ir.Model) -> Proof:
        """Run both on random inputs of several sizes and magnitudes; neither model is changed."""
        mismatch = _interface_mismatch(old, new)
        if mismatch:
            return Proof(verdict="refused", max_difference=float("inf"), reason=mismatch)
        try:
            old_side, new_side = self._sides.make(old, "float64"), self._sides.make(new, "float64")
            source = self._case_source(old, old_side)
        except CannotRunError as error:
            if not any(node.domain == MICROSOFT_DOMAIN for node in old.graph):
                return Proof(verdict="unverified", reason=f"it cannot be run in float64: {error}")
            return self._prove_in_float32(old, new)
        comparison = Comparison(seed=self._seed)
        proof = _verdict(comparison, (comparison.in_float64(case, old_side, new_side) for case in source.cases()))
        return self._in_own_type(proof, old, new, exact=old_side, source=source)

    def _prove_in_float32(self, old: ir.Model, new: ir.Model) -> Proof:
        """As `prove`, for operators that only run in narrower types."""
        opened = has_norms_inside(old)
        names = {node.op_type for node in old.graph if node.domain == MICROSOFT_DOMAIN}
        old = with_norms_in_front(old) if opened else old
        try:
            old_side, new_side = self._sides.make(old, "float32"), self._sides.make(new, "float32")
            exact = self._sides.make(new, "float64")
            source = self._case_source(old, old_side)
        except CannotRunError as error:
            return Proof(verdict="unverified", reason=f"it can be run neither in float64 nor in float32: {error}")
        comparison = Comparison(seed=self._seed)
        reasons = (comparison.in_float32(case, old_side, new_side, exact) for case in source.cases())
        proof = _verdict(comparison, reasons)
        note = f"proven in float32: no float64 kernel for {', '.join(sorted(names))}"
        if opened:
            note += ", whose norms the CPU provider lacks: they are taken as documented"
        return self._in_own_type(dataclasses.replace(proof, note=note), old, new, exact=exact, source=source)

    def _in_own_type(self, proof: Proof, old: ir.Model, new: ir.Model, *, exact: ProofSide, source: CaseSource) -> Proof:
        """`proof`, refused if in half precision `new` is worse than `old`."""
        if proof.verdict != "proven" or not any(value.dtype in _HALF_TYPES for value in old.graph.inputs):
            return proof
        try:
            old_half, new_half = self._sides.make(old, "own type"), self._sides.make(new, "own type")
        except CannotRunError as error:
            reason = f"equal in a wider type, not run in its own: {error}"
            return dataclasses.replace(proof, verdict="unverified", reason=reason)
        comparison = Comparison(seed=self._seed)
        reasons = (comparison.in_own_type(case, exact, old_half, new_half) for case in source.cases(half=True))
        worse = next((reason for reason in reasons if reason), "")
        return dataclasses.replace(proof, verdict="refused", reason=worse) if worse else proof

    def _case_source(self, old: ir.Model, side: ProofSide) -> CaseSource:
        """What cases are made from. Raises CannotRunError where the old subgraph refuses all sizes."""
        table, lengths = SymbolTable(old.graph.inputs), row_lengths(old)
        relation = None if lengths is not None else self._runnable_relation(old.graph.inputs, side, table)
        source = CaseSource(inputs=old.graph.inputs, table=table, relation=relation, lengths=lengths, seed=self._seed)
        if lengths is not None:
            refusals = [_refusal(side, case) for case in source.cases()]
            if None not in refusals:
                raise next((error for error in refusals if error), None) or CannotRunError("no lengths fit its dimensions")
        return source

    def _runnable_relation(self, inputs: Sequence[ir.Value], side: ProofSide, table: SymbolTable) -> Relation | None:
        """What must hold between the symbols so that the old subgraph runs. Raises CannotRunError where nothing helps."""
        first: CannotRunError | None = None
        for relation in table.relations():
            case = next(region_cases(inputs, table, relation, seed=self._seed), None)
            if case is None:
                continue
            error = _refusal(side, case)
            if error is None:
                return relation
            first = first or error
        raise first or CannotRunError("no sizes that can be tried fit its dimensions")


def _verdict(comparison: Comparison, reasons: Iterable[str]) -> Proof:
    """Proven where no case gives a reason against it, and at least one number was compared."""
    reason = next((reason for reason in reasons if reason), "")
    if not reason and not comparison.compared:
        reason = _UNDEFINED
    return Proof(verdict="refused" if reason else "proven", max_difference=comparison.max_difference, reason=reason)


def _refusal(side: ProofSide, case: RegionCase) -> CannotRunError | None:
    try:
        side.run(case.inputs)
    except CannotRunError as error:
        return error
    return None


def _interface_mismatch(old: ir.Model, new: ir.Model) -> str:
    """How the inputs or outputs of both differ, empty if they do not; inputs without a type or rank cannot be made up."""
    for what, ours, theirs in (
        ("inputs", old.graph.inputs, new.graph.inputs),
        ("outputs", old.graph.outputs, new.graph.outputs),
    ):
        a, b = ([(value.name, value.dtype) for value in values] for values in (ours, theirs))
        if [name for name, _ in a] != [name for name, _ in b]:
            return f"the {what} are {[name for name, _ in b]} instead of {[name for name, _ in a]}"
        if what == "inputs" and a != b:
            return f"the types of the inputs are {b} instead of {a}"
    return ""
