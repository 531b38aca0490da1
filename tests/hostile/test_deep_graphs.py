"""Long chains in front of, behind and inside an attention are walked, or not read; nothing calls itself until Python gives up."""

from __future__ import annotations

import random
import sys

import pytest

from qknorm_onnx.inspection import inspect_model
from tests.hostile.deep_graphs import OPERATORS, places, with_chain

CASES = [(place, operator) for place in places() for operator in OPERATORS]
# Between the products and the softmax every reader stops somewhere.
INSIDE = [(place, operator) for place in ("scores", "logits", "masked", "p") for operator in OPERATORS[::4]]
SOME = [*random.Random(12).sample([case for case in CASES if case not in INSIDE], 24), *INSIDE]


def attention_is_named(place: str, operator: str, length: int) -> bool:
    """Whether the attention around a chain is seen: read, declined with a reason, or taken for plain attention."""
    found = inspect_model(with_chain(place, operator, length))
    return bool(found.recognised.fused or found.present.declined or found.present.plain)


@pytest.mark.parametrize(("place", "operator"), SOME)
def test_chains_longer_than_pythons_stack(place, operator):
    length = sys.getrecursionlimit() + 200
    assert attention_is_named(place, operator, length)


@pytest.mark.slow
@pytest.mark.parametrize("place", places())
def test_chains_of_every_operator_in_every_place(place):
    for operator in OPERATORS:
        assert attention_is_named(place, operator, 5000), operator
