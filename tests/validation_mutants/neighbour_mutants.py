"""Faults beside those that once survived: one head, one layer, one row or one length only, and the first step behind a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.canonical.qk_norm_node import read_attention_node
from tests.validation_mutants.graph_edits import (
    Edit,
    NotApplicable,
    attention_nodes,
    constant,
    initializer_edit,
    spec_fields,
    text_edit,
    with_spec,
)
from tests.validation_mutants.text_model import WIDTH, TextForm

Named = Iterator[tuple[str, Edit]]

LAST: Final = slice(-1, None)
FIRST: Final = slice(0, 1)
NUMBERS: Final = {f"n{number}": np.array(number) for number in (0, 1, 2, 4, 8, 16, 63, 64)}
AXES: Final = {
    "ax0": np.array([0]), "ax1": np.array([1]), "ax2": np.array([2]), "ax3": np.array([3]), "ax02": np.array([0, 2]),
    "ax12": np.array([1, 2]), "ax013": np.array([0, 1, 3]), "first": np.array([0]), "second": np.array([1]),
    "last": np.array([-1]), "end": np.array([2**40]), "low": np.array([-(2**40)]), "back": np.array([-1]),
}  # fmt: skip
FLOATS: Final = {name: np.float32(value) for name, value in {
    "wrong": 1.01, "right": 1.0, "tiny": 1e-6, "small": 0.01, "zero_f": 0.0, "two_f": 2.0, "minus_two": -2.0, "milli": 1e-3
}.items()}  # fmt: skip
CONSTANTS: Final = {**NUMBERS, **AXES, **FLOATS}


def _text(text: str, **place: str) -> Edit:
    """`text_edit` with those of `CONSTANTS` that it names."""
    return text_edit(text, constants={name: value for name, value in CONSTANTS.items() if name in text}, **place)


def _both(*edits: Edit) -> Edit:
    def edit(model: ir.Model) -> None:
        for one in edits:
            one(model)

    return edit


def _gains(form: TextForm) -> Named:
    def changed(place: int, factor: float) -> Callable[[Any], Any]:
        def change(array: Any) -> Any:
            array.reshape(-1)[place] *= factor
            return array

        return change

    yield "gain of q negative in one channel", initializer_edit(changed(3, -1.0), lambda n, a: "q_norm" in n and a.size > 1)
    yield "gain of k 0.1 % off in its last", initializer_edit(changed(-1, 1.001), lambda n, a: "k_norm" in n and a.size > 1)
    if form.sink:
        yield "sink of one head lost", initializer_edit(lambda a: np.where(np.arange(a.size) == 2, -40, a), _is_sink)
        yield "sink 1 % off", initializer_edit(lambda a: 1.01 * a, _is_sink)


def _is_sink(name: str, array: Any) -> bool:
    del array
    return "sink" in name


def _heads(form: TextForm) -> Named:
    size, wide = form.head_size, form.heads * form.head_size

    def q(name: str, array: Any) -> bool:
        return array.shape == (WIDTH, wide) and wide != 2 * WIDTH

    def o(name: str, array: Any) -> bool:
        return array.shape == (wide, WIDTH) and wide != 2 * WIDTH

    order = np.arange(wide).reshape(form.heads, size)[[0, 2, 1, *range(3, form.heads)]].ravel()
    if form.kv_heads not in (1, form.heads):
        yield (
            "groups of query heads mixed",
            _both(initializer_edit(lambda a: a[:, order], q), initializer_edit(lambda a: a[order], o)),
        )
    yield (
        "channels of one head of q backwards",
        initializer_edit(lambda a: np.concatenate([a[:, :-size], a[:, -size:][:, ::-1]], 1), q),
    )
    yield (
        "result of one head 1 % off",
        initializer_edit(lambda a: np.concatenate([a[:size], 1.01 * a[size : 2 * size], a[2 * size :]]), o),
    )


def _layers(form: TextForm) -> Named:
    if form.layers == 1:
        return
    yield "scale of the last layer 1 % off", spec_fields("attention", nodes=LAST, scale=lambda s: 1.01 * s)
    yield "cap in the last layer", spec_fields("attention", nodes=LAST, softcap=5.0)
    yield "window lost in the last layer", spec_fields("attention", nodes=LAST, left_window_size=-1)
    yield "window one more in the last layer", spec_fields("attention", nodes=LAST, left_window_size=lambda w: w + 1)
    yield "first layer not causal", spec_fields("attention", nodes=FIRST, is_causal=False, right_window_size=-1)
    yield (
        "epsilon of the last layer times 10",
        spec_fields("norm", nodes=LAST, q_epsilon=lambda e: 10 * e, k_epsilon=lambda e: 10 * e),
    )
    for name in ("k_norm_weight", "attention_bias"):
        yield (
            f"{name} lost in the last layer",
            with_spec(lambda spec: spec, lambda given, name=name: dataclasses.replace(given, **{name: None}), nodes=LAST),
        )


def _scales(form: TextForm) -> Named:
    yield "scale at most 4", spec_fields("attention", scale=lambda s: min(s, 4.0))
    if form.softcap:
        yield "cap 0.1 % off", spec_fields("attention", softcap=lambda c: 1.001 * c)


def _masks(form: TextForm) -> Named:
    yield "hidden keys only pushed down", _soft_mask
    if not form.mask:
        return
    ones = "zero = Sub(x, x); one = Add(zero, n1)"
    rows, keys = "s = Shape(x); b = Gather(s, n0); r = Range(n0, b, n1)", "s = Shape(x); b = Gather(s, n1); r = Range(n0, b, n1)"
    pick = "y = Where(u, one, x)"
    new = "t = Shape(tokens); l = Gather(t, n1); k = Sub(b, l)"
    edits = {
        "ignored in the second row": f"{ones}; {rows}; c = Equal(r, n1); u = Unsqueeze(c, ax1); {pick}",
        "ignored for a batch of 1": f"{ones}; {rows}; u = Equal(b, n1); {pick}",
        "ignored for an even batch": f"{ones}; {rows}; m = Mod(b, n2); u = Equal(m, n0); {pick}",
        "hides the key before a hidden one": "a = Slice(x, second, end, ax1); z = Slice(x, last, end, ax1); "
        "n = Concat(a, z, axis=1); y = Mul(x, n)",
    }
    if form.past:
        edits["ignored on cached keys"] = f"{ones}; {keys}; {new}; c = Less(r, k); u = Unsqueeze(c, ax0); {pick}"
        edits["ignored on new keys"] = f"{ones}; {keys}; {new}; c = GreaterOrEqual(r, k); u = Unsqueeze(c, ax0); {pick}"
    for name, text in edits.items():
        yield f"mask {name}", _text(text, input="mask")


def _soft_mask(model: ir.Model) -> None:
    """What a mask hides has 5 less in its logits, and is not gone."""
    low, none = (constant(model, np.float32(value), f"mutant_{value}") for value in (-5.0, 0.0))
    for node in attention_nodes(model):
        _, given = read_attention_node(node)
        bias = given.attention_bias
        if bias is None:
            raise NotApplicable
        soft = ir.node("Where", [bias, none, low]) if bias.dtype == ir.DataType.BOOL else ir.node("Max", [bias, low])
        soft.outputs[0].type, soft.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), bias.shape
        soft.outputs[0].name = f"{node.name}_soft"
        model.graph.insert_before(node, soft)
        node.replace_input_with(list(node.inputs).index(bias), soft.outputs[0])


def _caches(form: TextForm) -> Named:
    if not form.past:
        return
    first = "past.0.key"
    keys = "s = Shape(x); n = Gather(s, n2); r = Range(n0, n, n1)"
    masked = "f = Cast(c, to=1); u = Unsqueeze(f, ax013); y = Mul(x, u)"
    yield (
        "cached keys normalised again",
        _text("q = Mul(x, x); m = ReduceMean(q, ax3, keepdims=1); e = Add(m, tiny); r = Sqrt(e); y = Div(x, r)", input=first),
    )
    yield "cached keys of the batch backwards", _text("y = Slice(x, last, low, ax0, back)", input=first)
    if form.kv_heads > 1:
        yield "cached values of the heads backwards", _text("y = Slice(x, last, low, ax1, back)", input="past.0.value")
    yield (
        "cached keys before the last 16 zero",
        _text(f"{keys}; k = Sub(n, n16); c = GreaterOrEqual(r, k); {masked}", input=first),
    )
    yield "present keys and values swapped", _swapped("present.0.key", "present.0.value")
    yield (
        "new values missing in the present",
        _text(f"{keys}; t = Shape(tokens); l = Gather(t, n1); k = Sub(n, l); c = Less(r, k); {masked}", output="present.0.value"),
    )
    yield (
        "present keys of the second row the first's",
        _text("a = Slice(x, first, second, ax0); z = Shape(x); y = Expand(a, z)", output="present.0.key"),
    )


def _swapped(one: str, other: str) -> Edit:
    """Two outputs of one shape exchanged, each under the other's name."""

    def edit(model: ir.Model) -> None:
        places = {str(value.name): place for place, value in enumerate(model.graph.outputs)}
        if not {one, other} <= set(places):
            raise NotApplicable
        a, b = (model.graph.outputs[places[name]] for name in (one, other))
        a.name = f"{one}_before"
        b.name, a.name = one, other
        model.graph.outputs[places[one]], model.graph.outputs[places[other]] = b, a

    return edit


def _positions(form: TextForm) -> Named:
    if not form.positions:
        return
    edits = {
        "modulo 64": "y = Mod(x, n64)",
        "no more than 63": "y = Min(x, n63)",
        "of the last row for all": "f = Slice(x, last, end, ax0); s = Shape(x); y = Expand(f, s)",
    }
    if form.past:
        past = "s = Shape(past.0.key); p = Gather(s, n2)"
        edits["one late behind a cache"] = f"{past}; g = Greater(p, n0); i = Cast(g, to=7); y = Add(x, i)"
        edits["one late without a cache"] = f"{past}; g = Equal(p, n0); i = Cast(g, to=7); y = Add(x, i)"
    for name, text in edits.items():
        yield f"positions {name}", _text(text, input="positions")


def _sizes(form: TextForm) -> Named:
    """The first output is 1 % off, in some rows, at some tokens, or at some sizes only."""
    output = "logits" if form.past else "output"
    pick = "f = Where(c, wrong, right); y = Mul(x, f)"
    batch, length = "s = Shape(tokens); n = Gather(s, n0)", "s = Shape(tokens); n = Gather(s, n1)"
    conditions = {
        "at lengths that are a multiple of 4": f"{length}; m = Mod(n, n4); c = Equal(m, n0)",
        "at lengths that are a multiple of 8": f"{length}; m = Mod(n, n8); c = Equal(m, n0)",
        "at lengths that are a multiple of 16": f"{length}; m = Mod(n, n16); c = Equal(m, n0)",
        "of an odd batch": f"{batch}; m = Mod(n, n2); c = Equal(m, n1)",
        "of a batch that is a multiple of 4": f"{batch}; m = Mod(n, n4); c = Equal(m, n0)",
    }
    if form.past:
        past = "z = Shape(past.0.key); p = Gather(z, n2); g = Greater(p, n0)"
        conditions["of one token behind a cache"] = f"{length}; {past}; o = Equal(n, n1); c = And(o, g)"
        conditions["of several tokens behind a cache"] = f"{length}; {past}; o = Greater(n, n1); c = And(o, g)"
        conditions["of a past that is a multiple of 8"] = f"{past}; m = Mod(p, n8); e = Equal(m, n0); c = And(e, g)"
    for name, condition in conditions.items():
        yield f"wrong result {name}", _text(f"{condition}; {pick}", output=output)
    rows = "s = Shape(x); b = Gather(s, n0); r = Range(n0, b, n1)"
    yield (
        "wrong result of the second row",
        _text(
            f"{rows}; c = Equal(r, n1); f = Where(c, wrong, right); d = Unsqueeze(f, {'ax1' if form.pooled else 'ax12'}); "
            "y = Mul(x, d)",
            output=output,
        ),
    )
    if not form.pooled:
        tokens = "s = Shape(x); b = Gather(s, n1); r = Range(n0, b, n1)"
        spread = "f = Where(c, wrong, right); d = Unsqueeze(f, ax02); y = Mul(x, d)"
        yield "wrong result of the first token", _text(f"{tokens}; c = Equal(r, n0); {spread}", output=output)
        yield (
            "wrong result of the last token of odd lengths",
            _text(
                f"{tokens}; i = Sub(b, n1); l = Equal(r, i); m = Mod(b, n2); o = Equal(m, n1); c = And(l, o); {spread}",
                output=output,
            ),
        )


def _values(form: TextForm) -> Named:
    output = "logits" if form.past else "output"
    yield "result no larger than 2", _text("y = Clip(x, minus_two, two_f)", output=output)
    yield "result below 0.01 is zero", _text("a = Abs(x); c = Less(a, small); y = Where(c, zero_f, x)", output=output)
    if not form.tokens:
        yield "zeros of x read as 0.001", _text("c = Equal(x, zero_f); y = Where(c, milli, x)", input="tokens")
        yield "mean of x removed", _text("m = ReduceMean(x, last, keepdims=1); y = Sub(x, m)", input="tokens")


def _types(form: TextForm) -> Named:
    if form.past:
        yield "cached values in bfloat16", _text("a = Cast(x, to=16); y = Cast(a, to=1)", input="past.0.value")
        yield "present keys in float16", _text("a = Cast(x, to=10); y = Cast(a, to=1)", output="present.0.key")


# By the kind of fault that they are counted with.
NEIGHBOURS: Final[Mapping[str, Callable[[TextForm], Named]]] = MappingProxyType(
    {
        "gain": _gains, "heads": _heads, "layer": _layers, "scale": _scales, "mask": _masks, "cache": _caches,
        "positions": _positions, "size": _sizes, "value": _values,
        "type": _types,
    }
)  # fmt: skip
