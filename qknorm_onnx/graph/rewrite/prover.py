"""The contract between the fusing pass and whoever proves its rewrites (`qknorm_onnx.proof`, which needs a runtime)."""

from __future__ import annotations

import dataclasses
from typing import Literal, Protocol

import onnx_ir as ir

Verdict = Literal["proven", "refused", "unverified"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proof:
    """Outcome of running the old and the new subgraph on the same inputs.

    `max_difference` is max|new - old| / max|old| over the outputs and cases; `reason` is a sentence, empty when proven.
    `note` says what is unusual about a proof: it was made in float32, or with an operator written out.
    """

    verdict: Verdict
    max_difference: float = 0.0
    reason: str = ""
    note: str = ""


class Prover(Protocol):
    """Compares two models with the same inputs and outputs (names, order, types)."""

    def prove(self, old: ir.Model, new: ir.Model) -> Proof:
        """Run both on random inputs of several sizes. Must not change either model."""
        ...
