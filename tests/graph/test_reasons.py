"""Reasons are true: each declined form with its cause, written by hand, and what its hint names changes the outcome.

The zoo's own look-alikes have their causes in `tools/zoo_facts.py`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.graph.attention_text import fused
from tests.graph.form_text import RMS, Form, form_model
from tests.graph.test_missed_forms import GATHERED, HALVES, turned_by

CLIPPED = RMS.replace("{y} =", "{n}_g =") + "  {n}_one = Constant<value = float {{1.0}}>()\n  {y} = Clip({n}_g, , {n}_one)\n"
TURNED = RMS.replace("{y} =", "{n}_g =") + "  {y} = Mul({n}_g, {n}_each)\n"
CENTRED = """
  {n}_mean = ReduceMean<keepdims=1>({x}, last)
  {n}_apart = Sub({x}, {n}_mean)
  {n}_length = ReduceL2<keepdims=1>({n}_apart, last)
  {y} = Div({n}_apart, {n}_length)
"""
LAYER = "  {y} = LayerNormalization<axis=-1>({x}, {n}_gain)\n"
OVER_HEADS = "  {n}_first = Constant<value = int64[1] {{1}}>()\n" + RMS.replace("({n}_sq, last)", "({n}_sq, {n}_first)")
CLAMP = """
  low = Constant<value = float {{{low}}}>()
  high = Constant<value = float {{0.5}}>()
  clipped = Clip(logits, low, high)
  p = Softmax<axis=-1>(clipped)
"""
TILED_WHOLE = "  {n}_times = Constant<value = int64[4] {{1, 2, 1, 1}}>()\n  {y} = Tile({x}, {n}_times)\n"
CHANGED = RMS.replace("{y} =", "{n}_g =") + "  {y} = Sin({n}_g)\n"


@dataclasses.dataclass(frozen=True)
class Case:
    """A form that is declined, a part of the reason, a part of the hint, and the form with what the hint names done."""

    declined: Form
    cause: str
    hint: str
    mended: Form


def per_position(*sides):
    """Factors for each position of some sides, and for each value of the others."""
    inputs = "".join(f", float[batch,1,seq,1] {side}_each" for side in sides)
    weights = tuple((f"{side}_each", np.linspace(0.5, 1.5, 16)) for side in "qk" if side not in sides)
    return Form(prepare=TURNED, inputs=inputs, weights=weights)


CASES = {
    "a matrix that scales": Case(turned_by(0.5 * HALVES), "does more than turn pairs", "one 1 or -1", turned_by(HALVES)),
    "heads in blocks": Case(
        Form(kv_heads=2, repeat=TILED_WHOLE), "modulo", "repeat_interleave", Form(kv_heads=2, repeat=GATHERED)
    ),
    "clipped": Case(Form(prepare=CLIPPED), "clipped between norm and attention", "without the clipping", Form()),
    "keys by position": Case(
        per_position("q", "k"), "a factor of their own for each position", "multiply the queries instead", per_position("q")
    ),
    "centred and L2": Case(
        Form(prepare=CENTRED), "centred and then divided by their L2", "as LayerNorm does", Form(prepare=LAYER)
    ),
    "over heads": Case(
        Form(prepare=OVER_HEADS),
        "normalised over the heads",
        "over the last axis",
        Form(),
    ),
    "an operator between": Case(Form(prepare=CHANGED), "Sin stands between its ReduceMean", "move it in front", Form()),
    "another function of the logits": Case(
        Form(softmax="  r = Relu(logits)\n  p = Softmax<axis=-1>(r)\n"), "Relu stands between its logits", "leave it out", Form()
    ),
    "a softmax by hand": Case(
        Form(softmax="  l = LogSoftmax<axis=-1>(logits)\n  p = Exp(l)\n"), "by hand, with LogSoftmax", "one Softmax", Form()
    ),
    "the other axis": Case(
        Form(softmax="  p = Softmax<axis=-2>(logits)\n"), "does not run over the keys", "softmax over the keys", Form()
    ),
    "no softmax": Case(Form(softmax="  p = Identity(logits)\n"), "linear attention", "use a softmax", Form()),
    "clipped to one side": Case(
        Form(softmax=CLAMP.format(low="0")), "one symmetric clamp", "clip to -c and c", Form(softmax=CLAMP.format(low="-0.5"))
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_reason_is_the_cause_and_the_hint_helps(name):
    case = CASES[name]
    _, report = fused(form_model(case.declined), prove=False)
    (miss,) = report.declined
    assert case.cause in miss.reason, miss.reason
    assert case.hint in miss.hint, miss.hint
    assert miss.node and not report.fused and not report.plain
    _, mended = fused(form_model(case.mended), prove=False)
    assert len(mended.fused) == 1 and not mended.declined
