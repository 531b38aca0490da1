"""Masks spelled by hand: what each is recognised as, and that the described mask is the mask of the graph."""

from __future__ import annotations

import math
import time

import numpy as np
import onnx_ir as ir
import pytest

from qknorm_onnx.graph.recognise.masks.mask import MaskContext, recognise_mask
from qknorm_onnx.graph.symbolic.terms import Dimension, Linear, form_of
from tests.graph.mask_text import SIZE, TOTAL, build, check_described, recognised

# body -> (is_causal, left, right, alignment, residual values)
SPELLINGS: dict[str, tuple[str, tuple[bool, int, int, str], list[str]]] = {
    "plain": ("m = And(true, causal)", (True, -1, -1, "both"), []),
    "greater or equal": ("m = GreaterOrEqual(q, k)", (True, -1, -1, "both"), []),
    "not greater": ("a = Greater(k, q) m = Not(a)", (True, -1, -1, "both"), []),
    "difference": ("m = GreaterOrEqual(d, zero)", (True, -1, -1, "both"), []),
    "less than next": ("a = Add(q, one) m = Less(k, a)", (True, -1, -1, "both"), []),
    "floats": ("a = Cast<to = 1>(q) b = Cast<to = 1>(k) m = LessOrEqual(b, a)", (True, -1, -1, "both"), []),
    "double negation of union": ("a = Not(causal) b = Not(near) c = Or(a, b) m = Not(c)", (True, 3, -1, "both"), []),
    "window": ("m = And(causal, near)", (True, 3, -1, "both"), []),
    "window of Hugging Face": ("a = Sub(q, four) b = Greater(k, a) m = And(b, causal)", (True, 3, -1, "both"), []),
    "window off by one": ("a = Sub(q, four) b = GreaterOrEqual(k, a) m = And(b, causal)", (True, 4, -1, "both"), []),
    "two windows": ("a = LessOrEqual(d, one) b = And(a, near) m = And(b, causal)", (True, 1, -1, "both"), []),
    "both sides": ("a = Abs(d) m = LessOrEqual(a, four)", (False, 4, 4, "both"), []),
    "both sides, strict": ("a = Abs(d) m = Less(a, four)", (False, 3, 3, "both"), []),
    "diagonal": ("m = Equal(q, k)", (True, 0, -1, "both"), []),
    "from itself on": ("m = GreaterOrEqual(k, q)", (False, 0, -1, "both"), []),
    "look ahead": ("a = Add(q, four) m = LessOrEqual(k, a)", (False, -1, 4, "both"), []),
    "all true": (
        "a = GreaterOrEqual(q, zero) c = Concat<axis = 0>(v1, v1, sv, sv) m = Expand(a, c)",
        (False, -1, -1, "none"),
        [],
    ),
    "cached": ("m = And(true, cached)", (True, -1, -1, "lower_right"), []),
    "cached window": ("a = Sub(qp, four) b = Greater(kt, a) m = And(b, cached)", (True, 3, -1, "lower_right"), []),
    "cached, sliced": (
        "a = Unsqueeze(j, v1) b = Slice(a, pv, sv2, v0) sv2 = Identity(tv) m = LessOrEqual(kt, b)",
        (True, -1, -1, "lower_right"),
        [],
    ),
    "upper left with cache": ("m = LessOrEqual(kt, q)", (True, -1, -1, "upper_left"), []),
    "four dimensions": ("a = Unsqueeze(causal, v01) m = Identity(a)", (True, -1, -1, "both"), []),
    "transposed twice": ("a = Transpose(causal) m = Transpose(a)", (True, -1, -1, "both"), []),
    "triangle of ones": (
        (
            "c = Concat<axis = 0>(sv, sv) a = ConstantOfShape<value = float[1] {1.0}>(c) b = Trilu<upper = 0>(a) "
            "e = Equal(b, seen) m = Where(e, minus_infinity, seen)"
        ),
        (True, -1, -1, "both"),
        [],
    ),
    "triangle of infinities": (
        "c = Concat<axis = 0>(sv, sv) a = ConstantOfShape<value = float[1] {-inf}>(c) m = Trilu(a, one)",
        (True, -1, -1, "both"),
        [],
    ),
    "triangle with past": (
        "c = Concat<axis = 0>(sv, tv) a = ConstantOfShape<value = float[1] {-inf}>(c) e = Add(p, one) m = Trilu(a, e)",
        (True, -1, -1, "lower_right"),
        [],
    ),
    "added": ("m = Where(causal, seen, lowest)", (True, -1, -1, "both"), []),
    "added, hidden first": ("a = Not(causal) m = Where(a, minus_infinity, seen)", (True, -1, -1, "both"), []),
    "one minus mask": ("a = Cast<to = 1>(causal) b = Sub(unit, a) m = Mul(b, lowest)", (True, -1, -1, "both"), []),
    "masked fill of inverted": (
        "a = Cast<to = 1>(causal) b = Sub(unit, a) c = Cast<to = 9>(b) m = Where(c, lowest, b)",
        (True, -1, -1, "both"),
        [],
    ),
    "and padding": ("a = Unsqueeze(causal, v01) m = And(a, pad4)", (True, -1, -1, "both"), ["pad4"]),
    "and padding, added": (
        "a = Unsqueeze(causal, v01) b = And(a, pad4) c = Unsqueeze(b, v0) e = Squeeze(c, v0) m = Where(b, seen, lowest)",
        (True, -1, -1, "both"),
        ["pad4"],
    ),
    "expanded and": (
        (
            "bv = Shape<start = 0, end = 1>(ids) a = Unsqueeze(causal, v01) b = And(a, pad4) "
            "c = Concat<axis = 0>(bv, v1, sv, sv) m = Expand(b, c)"
        ),
        (True, -1, -1, "both"),
        ["pad4"],
    ),
    "unsqueezed and": ("a = Unsqueeze(padding, v1) b = And(causal, a) m = Unsqueeze(b, v1)", (True, -1, -1, "both"), ["a"]),
    "padding over rank": ("a = Unsqueeze(padding, v1) b = And(a, causal) m = Unsqueeze(b, v1)", (True, -1, -1, "both"), ["a"]),
    "padding hidden": ("n = Not(pad4) c = Not(causal) o = Or(c, n) m = Not(o)", (True, -1, -1, "both"), ["pad4"]),
    "sum of two masks": (
        "a = Where(causal, seen, lowest) b = Where(pad4, seen, minus_infinity) m = Add(a, b)",
        (True, -1, -1, "both"),
        ["pad4"],
    ),
    "fill within fill": ("b = Where(pad4, seen, lowest) m = Where(causal, b, lowest)", (True, -1, -1, "both"), ["pad4"]),
    "mask and bias": ("a = Where(causal, seen, minus_infinity) m = Add(alibi, a)", (True, -1, -1, "both"), ["alibi"]),
    "bias where seen": ("m = Where(causal, alibi, minus_infinity)", (True, -1, -1, "both"), ["alibi"]),
    "where as and": ("f = Constant<value = bool {0}>() a = Where(causal, near, f) m = And(a, true)", (True, 3, -1, "both"), []),
    "padding alone under all true": ("a = GreaterOrEqual(q, zero) m = And(a, pad4)", (False, -1, -1, "none"), ["pad4"]),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    body, (is_causal, left, right, alignment), residual = SPELLINGS[name]
    body = "tv = Reshape(t, last) " + body
    if name == "cached, sliced":  # the parser wants definitions before uses
        body = "tv = Reshape(t, last) a = Unsqueeze(j, v1) b = Slice(a, pv, tv, v0) m = LessOrEqual(kt, b)"
    mask, proto = build(body)
    keys = TOTAL if "kt" in body or "cached" in body or "tv)" in body.removeprefix("tv = Reshape(t, last)") else SIZE
    fragment = recognise_mask(mask, context=MaskContext(), query_length=SIZE, key_length=keys)
    found = (fragment.is_causal, fragment.left_window_size, fragment.right_window_size, fragment.alignment)
    assert found == (is_causal, left, right, alignment), fragment.reasons
    assert fragment.recognised
    assert [term.value.name for term in fragment.residual] == residual
    check_described(body, fragment, proto)


NEGATIVES: dict[str, tuple[str, str]] = {
    "strictly before": ("m = Less(k, q)", "own position"),
    "window without itself": ("a = Less(zero, d) m = And(true, a)", "own position"),
    "positions of the caller": (
        "a = Unsqueeze(position_ids, v1) b = Unsqueeze(position_ids, v2) m = LessOrEqual(a, b)",
        "'position_ids' (a graph input)",
    ),
    "segments of the caller": (
        "c = CumSum(position_ids, one) a = Unsqueeze(c, v1) b = Unsqueeze(c, v2) m = Equal(a, b)",
        "(CumSum of 'position_ids')",
    ),
    "swapped sum": ("a = Add(q, k) m = LessOrEqual(a, four)", "no band"),
    "twice as fast": ("a = Add(q, q) m = LessOrEqual(k, a)", "no band"),
    "chunks": ("a = Div(q, four) b = Div(k, four) m = Equal(a, b)", "chunk"),
    "padding only": ("m = Identity(pad4)", "'padding' (a graph input)"),
    "another offset in each batch row": (
        (
            "bv = Shape<start = 0, end = 1>(ids) b = Squeeze(bv) r = Range(zero, b, one) r3 = Unsqueeze(r, v12) a = Add(q, r3) "
            "m = LessOrEqual(k, a)"
        ),
        "batch rows",
    ),
    "prefix": ("a = Less(k, four) m = Or(causal, a)", "no band"),
    "first keys only": ("a = Less(k, four) m = Expand(a, sq)", "same for every query"),
    "a weak bias": ("w = Constant<value_float = -100.0>() m = Where(causal, seen, w)", "not known"),
    "a bias": ("m = Add(alibi, seen)", "not known"),
    "inverted fill": ("m = Where(causal, lowest, lowest)", "not known"),
    "hides all": ("f = Constant<value = bool {0}>() m = And(causal, f)", "hides every key"),
    "window and nothing more": ("a = Abs(d) b = Less(four, a) m = And(b, true)", "no band"),
}


@pytest.mark.parametrize("name", NEGATIVES)
def test_negative(name: str) -> None:
    body, reason = NEGATIVES[name]
    mask, proto = build(body)
    fragment = recognise_mask(mask, context=MaskContext(), query_length=SIZE, key_length=SIZE)
    assert not fragment.is_causal or name == "hides all"
    if name != "hides all":
        assert not fragment.recognised
        assert [term.value.name for term in fragment.residual] == ["m"]
    assert any(reason in text for text in fragment.reasons), fragment.reasons
    check_described(body, fragment, proto)


def test_segments_of_contiguous_positions_are_dropped_and_of_others_kept() -> None:
    """The packed-sequence term of transformers: a cumulative sum over jumps in the positions."""
    jumps = (
        "w = Unsqueeze({positions}, v0) f = Slice(w, v0, v1, v1) g = Sub(f, one) c = Concat<axis = -1>(g, w) "
        "n = Add(s, one) nv = Reshape(n, last) hi = Slice(c, v1, nv, v1) lo = Slice(c, v0, sv, v1) e = Sub(hi, lo) "
        "x = Equal(e, one) y = Not(x) z = Cast<to = 7>(y) cs = CumSum(z, one) csq = Squeeze(cs, v0) "
        "a = Unsqueeze(csq, v1) b = Unsqueeze(csq, v0) u = Equal(a, b) m = And(causal, u)"
    )
    dropped = recognised(jumps.format(positions="i"))
    assert dropped.is_causal
    assert not dropped.residual
    row = "gp = Gather<axis = 0>(position_ids, zero)"
    kept = recognised(row + jumps.format(positions="gp"))
    assert kept.is_causal
    assert [term.value.name for term in kept.residual] == ["u"]
    two = "ii = Mul(i, four)"
    stepped = recognised(two + jumps.format(positions="ii"))
    assert [term.value.name for term in stepped.residual] in ([], ["u"])
    _, proto = build(two + jumps.format(positions="ii"))
    check_described("", stepped, proto)


def test_the_callers_lengths_are_compared() -> None:
    mask, _ = build("m = And(true, causal)")
    context = MaskContext()
    size = form_of(Dimension("S"))
    assert recognise_mask(mask, context=context, query_length=size, key_length=size).is_causal
    for lengths in ({"query_length": form_of(Dimension("N"))}, {"key_length": form_of(Dimension("N"))}):
        fragment = recognise_mask(mask, context=context, **lengths)
        assert not fragment.recognised
        assert "not proven equal" in fragment.reasons[0]
        assert [term.value.name for term in fragment.residual] == ["m"]


def test_one_static_query_row_is_not_taken_for_all_queries() -> None:
    """A mask of one row, `key <= past`, is causality for one query, and hides new keys from every query where there are more."""
    body = "a = LessOrEqual(kt, p) m = And(a, true)"
    mask, _ = build(body)
    one_query = recognise_mask(mask, context=MaskContext(), query_length=Linear(1))
    assert one_query.is_causal
    assert one_query.query_offset == form_of(Dimension("P"))
    more = recognise_mask(mask, context=MaskContext(), query_length=form_of(Dimension("S")))
    assert not more.recognised


def test_an_offset_from_an_input_is_told_and_not_called_aligned() -> None:
    fragment = recognised("a = Add(q, past_length) m = LessOrEqual(kt, a)")
    assert fragment.alignment == "other"
    assert str(fragment.query_offset) == "past_length[]"
    assert not fragment.rows_never_empty


def test_masked_fill_of_scores_passes_the_hidden_condition() -> None:
    mask, _ = build("m = Not(causal)")
    fragment = recognise_mask(mask, context=MaskContext(), negated=True, fill_value=-math.inf)
    assert fragment.is_causal
    assert fragment.fill == "-inf"
    mask, _ = build("m = Not(pad4)")
    fragment = recognise_mask(mask, context=MaskContext(), negated=True, fill_value=-math.inf)
    assert [(term.value.name, term.negated, term.fill_value) for term in fragment.residual] == [("m", True, -math.inf)]


@pytest.mark.parametrize(
    ("fill", "kind"),
    [("-inf", "-inf"), ("-3.4028235e+38", "finfo_min"), ("-1e9", "large_negative")],
)
def test_the_fill_is_told(fill: str, kind: str) -> None:
    assert recognised(f"w = Constant<value_float = {fill}>() m = Where(causal, seen, w)").fill == kind


def test_rows_never_empty() -> None:
    assert recognised("m = And(causal, near)").rows_never_empty
    assert recognised("m = And(cached, true)").rows_never_empty
    assert not recognised("m = And(causal, pad4)").rows_never_empty
    far = recognised("a = LessOrEqual(kt, q) b = Sub(q, kt) c = Less(b, four) m = And(a, c)")
    assert far.alignment == "upper_left"
    assert far.rows_never_empty  # T = P + S is never smaller than S


@pytest.mark.parametrize("offset", [0, 3])
def test_static_tables(offset: int) -> None:
    """A mask folded to a constant: the lower right corner of a table counts as a cache of `offset` keys."""
    table = np.tri(5, 5 + offset, offset, bool)
    for array in (table, np.where(table, 0, np.finfo(np.float32).min).astype(np.float32)):
        value = ir.Value(name="m", const_value=ir.tensor(array[None, None]), type=ir.TensorType(ir.tensor(array).dtype))
        fragment = recognise_mask(value, context=MaskContext())
        assert fragment.is_causal
        assert fragment.alignment == ("lower_right" if offset else "both")
        assert fragment.query_offset == Linear(offset)
    table[2, 0] = False
    value = ir.Value(name="m", const_value=ir.tensor(table), type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape(table.shape))
    assert not recognise_mask(value, context=MaskContext()).recognised


def test_half_masks() -> None:
    body = "a = Cast<to = 10>(lowest) z = Cast<to = 10>(seen) m = Where(causal, z, a)"
    mask, _ = build(body)
    mask.type = ir.TensorType(ir.DataType.FLOAT16)
    fragment = recognise_mask(mask, context=MaskContext())
    assert fragment.is_causal
    assert fragment.fill == "-inf"  # the smallest float32 is no float16


def test_a_mask_shared_by_many_layers_is_read_once() -> None:
    mask, _ = build("x = And(causal, near) y = And(x, pad4) m = Where(y, seen, lowest)")
    context = MaskContext()
    start = time.process_time()
    fragments = [recognise_mask(mask, context=context) for _ in range(28)]
    assert time.process_time() - start < 0.2
    assert len(set(fragments)) == 1
