"""Masks composed at random: whatever is recognised in them, the described mask is the mask of the graph."""

from __future__ import annotations

import numpy as np
import pytest

from qknorm_onnx.graph.recognise.masks.mask import MaskContext, recognise_mask
from tests.graph.mask_text import SIZE, build, check_described, recognised


def random_condition(rng: np.random.Generator, name: str, depth: int) -> str:
    """Statements that define the boolean `name` from comparisons of positions, at random."""
    if depth == 0 or rng.random() < 0.25:
        comparison = rng.choice(["Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal"])
        left, right = [("k", "q"), ("q", "k"), ("d", "z"), ("z", "d"), ("e", "z"), ("k", "z"), ("g", "h")][rng.integers(7)]
        shift = rng.integers(-3, 6)
        return (
            (f"{name}z = Constant<value_int = {shift}>() {name}s = Add({right}, {name}z) {name} = {comparison}({left}, {name}s) ")
            .replace("(z,", f"({name}z,")
            .replace(" Add(z,", f" Add({name}z,")
        )
    first, second = random_condition(rng, name + "l", depth - 1), random_condition(rng, name + "r", depth - 1)
    kind = rng.choice(["And", "And", "And", "Or", "Xor", "Where", "Not", "Trilu"])
    last = {
        "Not": f"{name} = Not({name}l) ",
        "Where": f"{name}f = Constant<value = bool {{{rng.integers(2)}}}>() {name} = Where({name}l, {name}r, {name}f) ",
        "Trilu": (
            f"{name}c = Cast<to = 1>({name}l) {name}e = Expand({name}c, sq) "
            f"{name}t = Trilu<upper = {rng.integers(2)}>({name}e, one) {name} = Cast<to = 9>({name}t) "
        ),
    }
    return first + second + last.get(str(kind), f"{name} = {kind}({name}l, {name}r) ")


@pytest.mark.parametrize("seed", range(150))
def test_random_masks_are_never_misread(seed: int) -> None:
    rng = np.random.default_rng(seed)
    body = (
        "z = Constant<value_int = 0>() e = Abs(d) g = Div(k, four) h = Div(q, four) "
        + random_condition(rng, "x", int(rng.integers(1, 4)))
        + ("y = Or(x, true) w = And(y, x) " if rng.random() < 0.3 else "w = Identity(x) ")
        + ("u = Expand(w, sq) m = Where(u, seen, lowest)" if rng.random() < 0.5 else "m = Expand(w, sq)")
    )
    mask, proto = build(body)
    fragment = recognise_mask(mask, context=MaskContext(), query_length=SIZE, key_length=SIZE)
    check_described(body, fragment, proto)


def test_random_masks_hold_some_that_are_recognised_and_some_that_are_not() -> None:
    found = []
    for seed in range(150):
        rng = np.random.default_rng(seed)
        prelude = "z = Constant<value_int = 0>() e = Abs(d) g = Div(k, four) h = Div(q, four) "
        condition = random_condition(rng, "x", int(rng.integers(1, 4)))
        found.append(recognised(f"{prelude}{condition} w = Identity(x) m = Expand(w, sq)").recognised)
    assert 15 < sum(found) < 135
