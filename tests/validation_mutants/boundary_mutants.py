"""Changes at the inputs and outputs of an export: masks, caches, positions, sizes and types."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from tests.validation_mutants.graph_edits import Edit, text_edit, with_spec
from tests.validation_mutants.text_model import TextForm

Named = Iterator[tuple[str, Edit]]

ONES = "zero = Sub(x, x); one = Add(zero, unit)"


def masks(form: TextForm) -> Named:
    if not form.mask:
        return
    unit = {"unit": np.array(1), "axis": np.array([1]), "start": np.array([0]), "last": np.array([-1]), "end": np.array([2**40]),
            "second": np.array([1]), "axis0": np.array([0]), "axis_1": np.array(1)}  # fmt: skip
    edits = {
        "ignored": f"{ONES}; y = Identity(one)",
        "read at its last key only": f"{ONES}; a = Slice(one, start, last, axis); b = Slice(x, last, end, axis); "
        "y = Concat(a, b, axis=1)",
        "read at its first key only": f"{ONES}; a = Slice(x, start, second, axis); b = Slice(one, second, end, axis); "
        "y = Concat(a, b, axis=1)",
        "of the first row for all": "a = Slice(x, start, second, axis0); s = Shape(x); y = Expand(a, s)",
        "of the last row for all": "a = Slice(x, last, end, axis0); s = Shape(x); y = Expand(a, s)",
        "one key late": "a = Slice(x, last, end, axis); b = Slice(x, start, last, axis); y = Concat(a, b, axis=1)",
        "taken for a length": f"{ONES}; n = ReduceSum(x, axis, keepdims=1); c = CumSum(one, axis_1); l = LessOrEqual(c, n); "
        "y = Cast(l, to=7)",
        "of the left only": f"c = CumSum(x, axis_1); {ONES}; z = Sub(c, c); l = Greater(c, z); y = Cast(l, to=7)",
        "of the right only": "c = CumSum(x, axis_1, reverse=1); z = Sub(c, c); l = Greater(c, z); y = Cast(l, to=7)",
        "inverted": f"{ONES}; y = Sub(one, x)",
        "ignored where a row hides less than half": f"{ONES}; n = ReduceSum(x, axis, keepdims=1); "
        "a = ReduceSum(one, axis, keepdims=1); n2 = Add(n, n); l = Greater(n2, a); g = Where(l, one, x); y = Identity(g)",
    }
    for name, text in edits.items():
        yield f"mask {name}", text_edit(text, input="mask", constants=unit)


def caches(form: TextForm) -> Named:
    if not form.past:
        return
    scalars = {"f": np.float32(1.01), "start": np.array([0]), "last": np.array([-1]), "end": np.array([2**40])}
    scalars |= {"axis": np.array([2]), "second": np.array([1])}
    first = "past.0.key"
    yield "cached keys are zero", text_edit("y = Sub(x, x)", input=first)
    yield "cached values are zero", text_edit("y = Sub(x, x)", input="past.0.value")
    yield "cached keys 1 % off", text_edit("y = Mul(x, f)", input=first, constants=scalars)
    yield (
        "first cached value zero",
        text_edit(
            "a = Slice(x, start, second, axis); z = Sub(a, a); b = Slice(x, second, end, axis); y = Concat(z, b, axis=2)",
            input="past.0.value",
            constants=scalars,
        ),
    )
    yield (
        "cached keys one place late",
        text_edit(
            "a = Slice(x, last, end, axis); b = Slice(x, start, last, axis); y = Concat(a, b, axis=2)",
            input=first,
            constants=scalars,
        ),
    )
    yield (
        "cached keys and values swapped",
        with_spec(
            lambda spec: spec, lambda given: dataclasses.replace(given, past_key=given.past_value, past_value=given.past_key)
        ),
    )
    yield "present keys 1 % off", text_edit("y = Mul(x, f)", output="present.0.key", constants=scalars)
    yield (
        "present values lose the last entry",
        text_edit("y = Slice(x, start, last, axis)", output="present.0.value", constants=scalars),
    )
    yield (
        "present keys are backwards",
        text_edit(
            "y = Slice(x, last, low, axis, back)",
            output="present.0.key",
            constants={**scalars, "low": np.array([-(2**40)]), "back": np.array([-1])},
        ),
    )


def positions(form: TextForm) -> Named:
    if not form.positions:
        return
    numbers = {"unit": np.array(1), "axis": np.array(1), "start": np.array([0]), "second": np.array([1]), "axes1": np.array([1]),
               "axes0": np.array([0]), "begin": np.array(3), "most": np.array(9), "two": np.array(2)}  # fmt: skip
    count = "z = Sub(x, x); o = Add(z, unit); c = CumSum(o, axis)"
    edits = {
        "built in": f"{count}; y = Add(c, begin)" if form.past else f"{count}; y = Sub(c, unit)",
        "counted from the first": f"{count}; d = Sub(c, unit); f = Slice(x, start, second, axes1); y = Add(d, f)",
        "counted from 0": "f = Slice(x, start, second, axes1); y = Sub(x, f)",
        "of the first row for all": "f = Slice(x, start, second, axes0); s = Shape(x); y = Expand(f, s)",
        "no more than 9": "y = Min(x, most)",
        "rounded to even": "h = Div(x, two); y = Mul(h, two)",
        "in int8": "a = Cast(x, to=3); b = Cast(a, to=7); y = Abs(b)",
    }
    if not form.learned_positions:
        edits["one late"] = "y = Add(x, unit)"
    for name, text in edits.items():
        yield f"positions {name}", text_edit(text, input="positions", constants=numbers)


def sizes(form: TextForm) -> Named:
    """The first output is 1 % off, in some sizes only."""
    output = "logits" if form.past else "output"
    numbers = {str_name: np.array(number) for str_name, number in
               {"n0": 0, "n1": 1, "n3": 3, "n4": 4, "n17": 17, "n20": 20, "n32": 32, "n2": 2}.items()}  # fmt: skip
    numbers |= {"wrong": np.float32(1.01), "right": np.float32(1.0)}
    batch, length = "s = Shape(tokens); n = Gather(s, n0)", "s = Shape(tokens); n = Gather(s, n1)"
    pick = "f = Where(c, wrong, right); y = Mul(x, f)"
    conditions = {
        "of a batch above 3": f"{batch}; c = Greater(n, n3)",
        "of a batch above 4": f"{batch}; c = Greater(n, n4)",
        "of a batch of 1": f"{batch}; c = Equal(n, n1)",
        "of one token": f"{length}; c = Equal(n, n1)",
        "of more than 17 tokens": f"{length}; c = Greater(n, n17)",
        "of more than 32 tokens": f"{length}; c = Greater(n, n32)",
    }
    if form.past:
        past = "s = Shape(past.0.key); n = Gather(s, n2)"
        conditions["of an empty past"] = f"{past}; c = Equal(n, n0)"
        conditions["of a past of more than 20"] = f"{past}; c = Greater(n, n20)"
    for name, condition in conditions.items():
        yield f"wrong result {name}", text_edit(f"{condition}; {pick}", output=output, constants=numbers)
    rows = "s = Shape(x); b = Gather(s, n0); r = Range(n0, b, n1); i = Sub(b, n1)"
    shaped = "d = Unsqueeze(f, axes); y = Mul(x, d)"
    axes = {"axes": np.array([1] if form.pooled else [1, 2])}
    for name, condition in {"of the last row": "c = Equal(r, i)", "of rows from the fourth on": "c = Greater(r, n2)"}.items():
        yield (
            f"wrong result {name}",
            text_edit(f"{rows}; {condition}; f = Where(c, wrong, right); {shaped}", output=output, constants={**numbers, **axes}),
        )
    if not form.pooled:
        tokens = "s = Shape(x); b = Gather(s, n1); r = Range(n0, b, n1); i = Sub(b, n1)"
        for name, condition in {
            "of the last token": "c = Equal(r, i)",
            "of tokens from the 21st on": "c = Greater(r, n20)",
        }.items():
            yield (
                f"wrong result {name}",
                text_edit(
                    f"{tokens}; {condition}; f = Where(c, wrong, right); {shaped}",
                    output=output,
                    constants={**numbers, "axes": np.array([0, 2])},
                ),
            )


def types(form: TextForm) -> Named:
    output = "logits" if form.past else "output"
    for name, number in {"float16": 10, "bfloat16": 16}.items():
        yield f"result through {name}", text_edit(f"a = Cast(x, to={number}); y = Cast(a, to=1)", output=output)
    yield "result through float64", text_edit("a = Cast(x, to=11); y = Cast(a, to=1)", output=output)
    if form.tokens:
        for name, number in {"uint8": 2, "int32": 6}.items():
            yield f"tokens through {name}", text_edit(f"a = Cast(x, to={number}); y = Cast(a, to=7)", input="tokens")
    else:
        yield "x through float16", text_edit("a = Cast(x, to=10); y = Cast(a, to=1)", input="tokens")
        yield (
            "x clamped to 10",
            text_edit("y = Clip(x, low, high)", input="tokens", constants={"low": np.float32(-10), "high": np.float32(10)}),
        )
    if form.mask:
        yield "mask through uint8", text_edit("a = Cast(x, to=2); y = Cast(a, to=7)", input="mask")
