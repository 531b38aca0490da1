"""Wrong models: each a named change of an honest export."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.validation_mutants.graph_edits import Edit, initializer_edit, spec_fields, text_edit, with_spec, without_input
from tests.validation_mutants.text_model import VOCABULARY, WIDTH, TextForm


@dataclasses.dataclass(frozen=True)
class Mutant:
    kind: str
    name: str
    edit: Edit


def mutants(form: TextForm) -> Iterator[Mutant]:
    """All that the form may have; an edit raises NotApplicable where there is nothing to change."""
    groups = {
        "norm": _norms(form), "epsilon": _epsilons(form), "gain": _gains(form), "rotary": _rotaries(form), "scale": _scales(),
        "cap": _caps(form), "window": _windows(form), "mask": _masks(form), "cache": _caches(form), "heads": _heads(form),
        "weights": _weights(), "embedding": _embeddings(form), "positions": _positions(form), "size": _sizes(form),
        "type": _types(form),
    }  # fmt: skip
    for kind, edits in groups.items():
        for name, edit in edits:
            yield Mutant(kind, name, edit)


Named = Iterator[tuple[str, Edit]]


def _norms(form: TextForm) -> Named:
    def dropped(side: str) -> Edit:
        fields: dict[str, Any] = {f"{side}_kind": "none", f"{side}_epsilon": 0.0}

        def change(spec: Any) -> Any:
            norm = dataclasses.replace(spec.norm, **fields)
            order = spec.rotary
            return dataclasses.replace(spec, norm=norm, rotary=order)

        gone = {f"{side}_norm_weight": None, f"{side}_norm_bias": None}
        return with_spec(change, lambda given: dataclasses.replace(given, **gone))

    yield "norm of q lost", dropped("q")
    yield "norm of k lost", dropped("k")
    for kind in ("rms", "layer"):
        yield f"norm is {kind}", spec_fields("norm", q_kind=kind, k_kind=kind)
        yield f"norm of k is {kind}", spec_fields("norm", k_kind=kind)
    yield "norm is l2", spec_fields("norm", q_kind="l2", k_kind="l2", epsilon_mode="clamp")
    yield "norm in two groups", spec_fields("norm", groups=2)


def _epsilons(form: TextForm) -> Named:
    yield "epsilon 0", spec_fields("norm", q_epsilon=0.0, k_epsilon=0.0)
    yield "epsilon of k 0", spec_fields("norm", k_epsilon=0.0)
    yield "epsilon times 10", spec_fields("norm", q_epsilon=lambda e: 10 * e, k_epsilon=lambda e: 10 * e)
    yield "epsilon a tenth", spec_fields("norm", q_epsilon=lambda e: e / 10, k_epsilon=lambda e: e / 10)
    yield "epsilon of q times 2", spec_fields("norm", q_epsilon=lambda e: 2 * e)
    yield "epsilon 1e-3", spec_fields("norm", q_epsilon=1e-3, k_epsilon=1e-3)
    yield "epsilon 1e-5", spec_fields("norm", q_epsilon=1e-5, k_epsilon=1e-5)
    for mode in ("inside_sqrt", "clamp", "outside_sqrt"):
        yield f"epsilon {mode}", spec_fields("norm", epsilon_mode=mode)


def _gains(form: TextForm) -> Named:
    yield "gain of q lost", without_input("q_norm_weight")
    yield "gain of k lost", without_input("k_norm_weight")
    if form.kv_heads == form.heads or form.norm_axis == "head" and form.norm != "layer":
        yield "gains of q and k swapped", with_spec(
            lambda spec: spec,
            lambda given: dataclasses.replace(given, q_norm_weight=given.k_norm_weight, k_norm_weight=given.q_norm_weight),
        )
    for name, change in {
        "one more": lambda a: a + 1,
        "backwards": lambda a: a[..., ::-1],
        "1 % off in one value": _one_off,
        "in float16": lambda a: a.astype(np.float16),
        "absent from the first value": lambda a: np.where(np.arange(a.size).reshape(a.shape) == 0, 1, a),
    }.items():
        yield f"gain of q {name}", initializer_edit(change, lambda n, a: "q_norm" in n and a.size > 1)
        yield f"gain of k {name}", initializer_edit(change, lambda n, a: "k_norm" in n and a.size > 1)


def _one_off(array: Any) -> Any:
    array.reshape(-1)[array.size // 2] *= 1.01
    return array


def _rotaries(form: TextForm) -> Named:
    if form.rotary == "none":
        return
    yield "rotary lost", with_spec(
        lambda spec: dataclasses.replace(spec, rotary=type(spec.rotary)()),
        lambda given: dataclasses.replace(given, cos=None, sin=None),
    )
    yield "rotary pairs", spec_fields("rotary", interleaved=lambda old: not old)
    yield "rotary on the other side of the norm", spec_fields(
        "rotary", order=lambda old: "before_norm" if old == "after_norm" else "after_norm"
    )
    yield "rotary of cos and sin swapped", with_spec(
        lambda spec: spec, lambda given: dataclasses.replace(given, cos=given.sin, sin=given.cos)
    )
    half = form.head_size // 2
    inverse = (10000.0 ** (-np.arange(half) / half)).astype(np.float32)

    def is_frequencies(name: str, array: Any) -> bool:
        return array.size == half and np.allclose(array.ravel(), inverse, rtol=1e-5)

    yield "rotary base 500000", initializer_edit(lambda a: (5e5 ** (-np.arange(half) / half)).reshape(a.shape), is_frequencies)
    yield "rotary frequencies negative", initializer_edit(lambda a: -a, is_frequencies)
    yield "rotary frequency 1 % off", initializer_edit(_one_off, is_frequencies)
    yield "rotary frequencies in bfloat16", initializer_edit(_in_bfloat16, is_frequencies)


def _in_bfloat16(array: Any) -> Any:
    bits = array.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def _scales() -> Named:
    for name, change in {
        "1": lambda s: 1.0,
        "1 % off": lambda s: 1.01 * s,
        "0.01 % off": lambda s: 1.0001 * s,
        "squared": lambda s: s * s,
        "negative": lambda s: -s,
        "of the square root of 2": lambda s: s * 2**0.5,
    }.items():
        yield f"scale {name}", spec_fields("attention", scale=change)


def _caps(form: TextForm) -> Named:
    if form.softcap:
        yield "cap lost", spec_fields("attention", softcap=0.0)
        yield "cap doubled", spec_fields("attention", softcap=lambda c: 2 * c)
        yield "cap 1 % off", spec_fields("attention", softcap=lambda c: 1.01 * c)
    else:
        yield "cap added", spec_fields("attention", softcap=5.0)
    yield "logits clamped", spec_fields("attention", logit_clamp=1.0)
    if form.sink:
        yield "sink lost", without_input("head_sink")
        yield "sink negative", initializer_edit(lambda a: -a, lambda n, a: "sink" in n)
        yield "sink of another head", initializer_edit(lambda a: np.roll(a, 1), lambda n, a: "sink" in n)


def _windows(form: TextForm) -> Named:
    for window in (2, 5, 17, 33, 100, 300):
        if not form.window or window < form.window:
            yield f"window of {window} added", spec_fields("attention", left_window_size=window - 1)
    if not form.causal:
        yield "causal", spec_fields("attention", is_causal=True)
        yield "right window of 3 added", spec_fields("attention", right_window_size=3)
    yield "not causal", spec_fields("attention", is_causal=False)
    yield "window lost", spec_fields("attention", left_window_size=-1, right_window_size=-1)
    yield "window one more", spec_fields("attention", left_window_size=lambda w: w + 1 if w > 0 else w)
    yield "window one less", spec_fields("attention", left_window_size=lambda w: w - 1 if w > 0 else w)
    yield "mask of visibility lost", without_input("attention_bias")


ONES = "zero = Sub(x, x); one = Add(zero, unit)"


def _masks(form: TextForm) -> Named:
    if not form.mask:
        return
    unit = {"unit": np.array(1), "axis": np.array([1]), "start": np.array([0]), "last": np.array([-1]), "end": np.array([2**40]),
            "second": np.array([1]), "axis0": np.array([0]), "axis_1": np.array(1)}  # fmt: skip
    edits = {
        "ignored": f"{ONES}; y = Identity(one)",
        "read at its last key only": f"{ONES}; a = Slice(one, start, last, axis); b = Slice(x, last, end, axis); y = Concat(a, b, axis=1)",
        "read at its first key only": f"{ONES}; a = Slice(x, start, second, axis); b = Slice(one, second, end, axis); "
        "y = Concat(a, b, axis=1)",
        "of the first row for all": "a = Slice(x, start, second, axis0); s = Shape(x); y = Expand(a, s)",
        "of the last row for all": "a = Slice(x, last, end, axis0); s = Shape(x); y = Expand(a, s)",
        "one key late": "a = Slice(x, last, end, axis); b = Slice(x, start, last, axis); y = Concat(a, b, axis=1)",
        "taken for a length": f"{ONES}; n = ReduceSum(x, axis, keepdims=1); c = CumSum(one, axis_1); l = LessOrEqual(c, n); "
        "y = Cast(l, to=7)",
        "of the left only": f"c = CumSum(x, axis_1); {ONES}; z = Sub(c, c); l = Greater(c, z); y = Cast(l, to=7)",
        "of the right only": f"c = CumSum(x, axis_1, reverse=1); z = Sub(c, c); l = Greater(c, z); y = Cast(l, to=7)",
        "inverted": f"{ONES}; y = Sub(one, x)",
        "ignored where a row hides less than half": f"{ONES}; n = ReduceSum(x, axis, keepdims=1); a = ReduceSum(one, axis, keepdims=1); "
        "n2 = Add(n, n); l = Greater(n2, a); g = Where(l, one, x); y = Identity(g)",
    }
    for name, text in edits.items():
        yield f"mask {name}", text_edit(text, input="mask", constants=unit)


def _caches(form: TextForm) -> Named:
    if not form.past:
        return
    scalars = {"f": np.float32(1.01), "start": np.array([0]), "last": np.array([-1]), "end": np.array([2**40]), "axis": np.array([2]),
               "second": np.array([1])}  # fmt: skip
    first = "past.0.key"
    yield "cached keys are zero", text_edit("y = Sub(x, x)", input=first)
    yield "cached values are zero", text_edit("y = Sub(x, x)", input="past.0.value")
    yield "cached keys 1 % off", text_edit("y = Mul(x, f)", input=first, constants=scalars)
    yield "first cached value zero", text_edit(
        "a = Slice(x, start, second, axis); z = Sub(a, a); b = Slice(x, second, end, axis); y = Concat(z, b, axis=2)",
        input="past.0.value",
        constants=scalars,
    )
    yield "cached keys one place late", text_edit(
        "a = Slice(x, last, end, axis); b = Slice(x, start, last, axis); y = Concat(a, b, axis=2)", input=first, constants=scalars
    )
    yield "cached keys and values swapped", with_spec(
        lambda spec: spec, lambda given: dataclasses.replace(given, past_key=given.past_value, past_value=given.past_key)
    )
    yield "present keys 1 % off", text_edit("y = Mul(x, f)", output="present.0.key", constants=scalars)
    yield "present values lose the last entry", text_edit(
        "y = Slice(x, start, last, axis)", output="present.0.value", constants=scalars
    )
    yield "present keys are backwards", text_edit(
        "y = Slice(x, last, low, axis, back)",
        output="present.0.key",
        constants={**scalars, "low": np.array([-(2**40)]), "back": np.array([-1])},
    )


def _is_projection(rows: int, columns: int) -> Any:
    return lambda name, array: array.shape == (rows, columns)


def _heads(form: TextForm) -> Named:
    wide, narrow, size = form.heads * form.head_size, form.kv_heads * form.head_size, form.head_size
    yield "heads of q rolled", initializer_edit(lambda a: np.roll(a, size, 1), _is_projection(WIDTH, wide))
    yield "heads of the result rolled", initializer_edit(lambda a: np.roll(a, size, 0), _is_projection(wide, WIDTH))
    yield "heads and their values mixed", initializer_edit(
        lambda a: a.reshape(WIDTH, -1, size).swapaxes(1, 2).reshape(a.shape), _is_projection(WIDTH, wide)
    )
    if narrow != wide:
        yield "heads of k and v rolled", initializer_edit(lambda a: np.roll(a, size, 1), _is_projection(WIDTH, narrow))
        yield "first key head for all", initializer_edit(
            lambda a: np.tile(a[:, :size], (1, form.kv_heads)), _is_projection(WIDTH, narrow)
        )
    yield "last head of the result is zero", initializer_edit(
        lambda a: np.concatenate([a[:-size], 0 * a[-size:]]), _is_projection(wide, WIDTH)
    )


def _weights() -> Named:
    def matrix(name: str, array: Any) -> bool:
        return array.ndim == 2 and WIDTH in array.shape and VOCABULARY not in array.shape

    yield "weights in bfloat16", initializer_edit(_in_bfloat16, matrix)
    yield "weights in float16", initializer_edit(lambda a: a.astype(np.float16), matrix)
    yield "weights in 8 bits", initializer_edit(lambda a: np.round(a / np.abs(a).max() * 127) * np.abs(a).max() / 127, matrix)
    yield "one weight of each product off", initializer_edit(_one_off, matrix)
    yield "weights of the MLP doubled", initializer_edit(lambda a: 2 * a, lambda n, a: a.shape == (2 * WIDTH, WIDTH))
    yield "bias of the MLP lost", initializer_edit(lambda a: 0 * a, lambda n, a: n.endswith("up.bias"))
    yield "bias of the MLP 1e-4 off", initializer_edit(lambda a: a * 1.0001, lambda n, a: n.endswith("down.bias"))
    yield "gain of a block's norm backwards", initializer_edit(lambda a: a[::-1], lambda n, a: n.endswith("block_norm.weight"))
    yield "gain of the last norm lost", initializer_edit(lambda a: 0 * a + 1, lambda n, a: n == "norm.weight")


def _embeddings(form: TextForm) -> Named:
    def rows(name: str, array: Any) -> bool:
        return array.shape == (VOCABULARY, WIDTH)

    def changed(row: int, change: Any) -> Edit:
        def edit(array: Any) -> Any:
            array[row] = change(array)
            return array

        return initializer_edit(edit, rows)

    if form.tokens:
        yield "row 0 is zero", changed(0, lambda a: 0)
        yield "last row is the first", changed(-1, lambda a: a[0])
        yield "row 1 is row 2", changed(1, lambda a: a[2])
        yield "row 211 is 1 % off", changed(211, lambda a: a[211] * 1.01)
        yield "one value of row 299 is off", changed(299, lambda a: a[299] + np.eye(WIDTH)[3] * 0.1)
        yield "rows 250 and 251 swapped", initializer_edit(
            lambda a: a[[*range(250), 251, 250, *range(252, VOCABULARY)]], rows
        )
        yield "rows from 256 on are zero", initializer_edit(lambda a: np.where(np.arange(VOCABULARY)[:, None] < 256, a, 0), rows)
        yield "last column of the head off", initializer_edit(
            lambda a: np.concatenate([a[:, :-1], 1.01 * a[:, -1:]], 1), lambda n, a: a.shape == (WIDTH, VOCABULARY)
        )
        bounds = {"least": np.array(1), "most": np.array(VOCABULARY - 2)}
        yield "token 0 read as 1", text_edit("y = Max(x, least)", input="tokens", constants=bounds)
        yield "last token read as the one before", text_edit("y = Min(x, most)", input="tokens", constants=bounds)
    if form.learned_positions:
        places = lambda n, a: a.shape[-1] == WIDTH and a.shape[0] not in (VOCABULARY, WIDTH, 2 * WIDTH, 32)  # noqa: E731
        yield "position 0 is zero", initializer_edit(lambda a: np.concatenate([0 * a[:1], a[1:]]), places)
        yield "last position is zero", initializer_edit(lambda a: np.concatenate([a[:-1], 0 * a[:1]]), places)
        yield "positions 70 and 71 swapped", initializer_edit(
            lambda a: a[[*range(70), 71, 70, *range(72, len(a))]], places
        )


def _positions(form: TextForm) -> Named:
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


def _sizes(form: TextForm) -> Named:
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
        yield f"wrong result {name}", text_edit(
            f"{rows}; {condition}; f = Where(c, wrong, right); {shaped}", output=output, constants={**numbers, **axes}
        )
    if not form.pooled:
        tokens = "s = Shape(x); b = Gather(s, n1); r = Range(n0, b, n1); i = Sub(b, n1)"
        for name, condition in {"of the last token": "c = Equal(r, i)", "of tokens from the 21st on": "c = Greater(r, n20)"}.items():
            yield f"wrong result {name}", text_edit(
                f"{tokens}; {condition}; f = Where(c, wrong, right); {shaped}",
                output=output,
                constants={**numbers, "axes": np.array([0, 2])},
            )


def _types(form: TextForm) -> Named:
    output = "logits" if form.past else "output"
    for name, number in {"float16": 10, "bfloat16": 16}.items():
        yield f"result through {name}", text_edit(f"a = Cast(x, to={number}); y = Cast(a, to=1)", output=output)
    yield "result through float64", text_edit("a = Cast(x, to=11); y = Cast(a, to=1)", output=output)
    if form.tokens:
        for name, number in {"uint8": 2, "int32": 6}.items():
            yield f"tokens through {name}", text_edit(f"a = Cast(x, to={number}); y = Cast(a, to=7)", input="tokens")
    else:
        yield "x through float16", text_edit("a = Cast(x, to=10); y = Cast(a, to=1)", input="tokens")
        yield "x clamped to 10", text_edit(
            "y = Clip(x, low, high)", input="tokens", constants={"low": np.float32(-10), "high": np.float32(10)}
        )
    if form.mask:
        yield "mask through uint8", text_edit("a = Cast(x, to=2); y = Cast(a, to=7)", input="mask")
