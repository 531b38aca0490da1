"""Lowering as an onnx_ir pass, for people's own pipelines."""

from __future__ import annotations

import onnx_ir as ir

from qknorm_onnx.lowering.registry import LoweringOutcome, lower


class LowerPass(ir.passes.InPlacePass):
    """Lowers every canonical node to `target`; after the call `outcomes` says what became of each.

    Raises as `registry.lower`.
    """

    def __init__(self, *, target: str, provider: str = "cpu") -> None:
        super().__init__()
        self.target = target
        self.provider = provider
        self.outcomes: tuple[LoweringOutcome, ...] = ()

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Lower; `modified` says whether a node was replaced."""
        self.outcomes = lower(model, target=self.target, provider=self.provider)
        return ir.passes.PassResult(model, modified=any(outcome.target != "custom-op" for outcome in self.outcomes))
