"""Wrong models: each a named change of an honest export."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.validation_mutants.boundary_mutants import caches, masks, positions, sizes, types
from tests.validation_mutants.graph_edits import Edit, initializer_edit, spec_fields, text_edit, with_spec, without_input
from tests.validation_mutants.neighbour_mutants import NEIGHBOURS
from tests.validation_mutants.text_model import MOST_POSITIONS, VOCABULARY, WIDTH, TextForm


@dataclasses.dataclass(frozen=True)
class Mutant:
    kind: str
    name: str
    edit: Edit


def mutants(form: TextForm) -> Iterator[Mutant]:
    """All that the form may have; an edit raises NotApplicable where there is nothing to change."""
    groups = {
        "norm": _norms(form), "epsilon": _epsilons(form), "gain": _gains(form), "rotary": _rotaries(form), "scale": _scales(),
        "cap": _caps(form), "window": _windows(form), "mask": masks(form), "cache": caches(form), "heads": _heads(form),
        "weights": _weights(), "embedding": _embeddings(form), "positions": positions(form), "size": sizes(form),
        "type": types(form),
    }  # fmt: skip
    beside = {kind: neighbours(form) for kind, neighbours in NEIGHBOURS.items()}
    for kind in dict.fromkeys((*groups, *beside)):
        for name, edit in itertools.chain(groups.get(kind, ()), beside.get(kind, ())):
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
    if form.kv_heads == form.heads or (form.norm_axis == "head" and form.norm != "layer"):
        yield (
            "gains of q and k swapped",
            with_spec(
                lambda spec: spec,
                lambda given: dataclasses.replace(given, q_norm_weight=given.k_norm_weight, k_norm_weight=given.q_norm_weight),
            ),
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
    yield (
        "rotary lost",
        with_spec(
            lambda spec: dataclasses.replace(spec, rotary=type(spec.rotary)()),
            lambda given: dataclasses.replace(given, cos=None, sin=None),
        ),
    )
    yield "rotary pairs", spec_fields("rotary", interleaved=lambda old: not old)
    yield (
        "rotary on the other side of the norm",
        spec_fields("rotary", order=lambda old: "before_norm" if old == "after_norm" else "after_norm"),
    )
    yield (
        "rotary of cos and sin swapped",
        with_spec(lambda spec: spec, lambda given: dataclasses.replace(given, cos=given.sin, sin=given.cos)),
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


def _is_projection(rows: int, columns: int) -> Any:
    return lambda name, array: array.shape == (rows, columns)


def _heads(form: TextForm) -> Named:
    wide, narrow, size = form.heads * form.head_size, form.kv_heads * form.head_size, form.head_size
    yield "heads of q rolled", initializer_edit(lambda a: np.roll(a, size, 1), _is_projection(WIDTH, wide))
    yield "heads of the result rolled", initializer_edit(lambda a: np.roll(a, size, 0), _is_projection(wide, WIDTH))
    yield (
        "heads and their values mixed",
        initializer_edit(lambda a: a.reshape(WIDTH, -1, size).swapaxes(1, 2).reshape(a.shape), _is_projection(WIDTH, wide)),
    )
    if narrow != wide:
        yield "heads of k and v rolled", initializer_edit(lambda a: np.roll(a, size, 1), _is_projection(WIDTH, narrow))
        yield (
            "first key head for all",
            initializer_edit(lambda a: np.tile(a[:, :size], (1, form.kv_heads)), _is_projection(WIDTH, narrow)),
        )
    yield (
        "last head of the result is zero",
        initializer_edit(lambda a: np.concatenate([a[:-size], 0 * a[-size:]]), _is_projection(wide, WIDTH)),
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
        yield "rows 250 and 251 swapped", initializer_edit(lambda a: a[[*range(250), 251, 250, *range(252, VOCABULARY)]], rows)
        yield "rows from 256 on are zero", initializer_edit(lambda a: np.where(np.arange(VOCABULARY)[:, None] < 256, a, 0), rows)
        yield (
            "last column of the head off",
            initializer_edit(
                lambda a: np.concatenate([a[:, :-1], 1.01 * a[:, -1:]], 1), lambda n, a: a.shape == (WIDTH, VOCABULARY)
            ),
        )
        bounds = {"least": np.array(1), "most": np.array(VOCABULARY - 2)}
        yield "token 0 read as 1", text_edit("y = Max(x, least)", input="tokens", constants=bounds)
        yield "last token read as the one before", text_edit("y = Min(x, most)", input="tokens", constants=bounds)
    if form.learned_positions:
        places = lambda n, a: a.shape == (MOST_POSITIONS, WIDTH)  # noqa: E731
        yield "position 0 is zero", initializer_edit(lambda a: np.concatenate([0 * a[:1], a[1:]]), places)
        yield "last position is zero", initializer_edit(lambda a: np.concatenate([a[:-1], 0 * a[:1]]), places)
        yield "positions 70 and 71 swapped", initializer_edit(lambda a: a[[*range(70), 71, 70, *range(72, len(a))]], places)
