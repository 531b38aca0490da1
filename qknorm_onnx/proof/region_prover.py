"""Keeps or refuses a rewrite by running the old and the new subgraph on the same random inputs.

How large a difference is an error follows from what a right rewrite may change. Both sides run in float64, so rounding in
the arithmetic does not count. A right rewrite may fold constants (a scale split into two roots, 1 + w, eps / D, 1 / sqrt(D))
and stores the result as float32: a relative change of up to 2^-24 of each constant. How far such changes carry depends on
the subgraph (a temperature of 100 makes a hundredfold of them), so it is measured: the old subgraph runs again with every
float constant moved by 2^-23 of itself, up or down at random. Four times what that changes, plus 1e-6 of the output's
largest value, is put down to folding; real mistakes (another epsilon, order, window, head) are larger by orders.

float16 and bfloat16 subgraphs are run in their own type besides: against the old one in float64, the new one's error is at
most twice the old one's plus four units of the type, and it is finite wherever the old one is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import onnx_ir as ir

from qknorm_onnx.graph.prover import Proof
from qknorm_onnx.proof.comparison import Comparison
from qknorm_onnx.proof.region_inputs import RegionCase, region_cases
from qknorm_onnx.proof.region_sizes import Relation, SymbolTable
from qknorm_onnx.proof.subgraph_side import Side, SideMaker
from qknorm_onnx.runtime.runner import CannotRunError

_HALF_TYPES: Final = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class RegionProver:
    """Implements `graph.prover.Prover`. One prover for a whole model: layers of equal structure share their sessions."""

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed
        self._sides = SideMaker()

    def prove(self, old: ir.Model, new: ir.Model) -> Proof:
        """Run both on random inputs of several sizes and magnitudes; neither model is changed."""
        mismatch = _interface_mismatch(old, new)
        if mismatch:
            return Proof(verdict="refused", max_difference=float("inf"), reason=mismatch)
        try:
            old_side, new_side = self._sides.make(old, "float64"), self._sides.make(new, "float64")
            table = SymbolTable(old.graph.inputs)
            relation = self._runnable_relation(old.graph.inputs, old_side, table)
        except CannotRunError as error:
            return Proof(verdict="unverified", reason=f"it cannot be run in float64: {error}")
        comparison = Comparison(seed=self._seed)
        for case in region_cases(old.graph.inputs, table, relation, seed=self._seed):
            reason = comparison.in_float64(case, old_side, new_side)
            if reason:
                return Proof(verdict="refused", max_difference=comparison.max_difference, reason=reason)
        if not comparison.compared:
            return Proof(verdict="refused", reason="nothing was compared: the outputs are empty or not finite in every case")
        proven = Proof(verdict="proven", max_difference=comparison.max_difference)
        if not any(value.dtype in _HALF_TYPES for value in old.graph.inputs):
            return proven
        cases = region_cases(old.graph.inputs, table, relation, seed=self._seed, half=True)
        try:
            old_half, new_half = self._sides.make(old, "own type"), self._sides.make(new, "own type")
        except CannotRunError as error:
            return dataclasses.replace(proven, verdict="unverified", reason=f"equal in float64, not run in its type: {error}")
        reasons = (comparison.in_own_type(case, old_side, old_half, new_half) for case in cases)
        worse = next((reason for reason in reasons if reason), "")
        return dataclasses.replace(proven, verdict="refused", reason=worse) if worse else proven

    def _runnable_relation(self, inputs: Sequence[ir.Value], side: Side, table: SymbolTable) -> Relation | None:
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
        raise first or CannotRunError("no sizes fit its symbolic dimensions")


def _refusal(side: Side, case: RegionCase) -> CannotRunError | None:
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
