"""Every op rule against the op itself: the term that is found, evaluated at concrete sizes, is what the op computes."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from qknorm_onnx.graph.symbolic.algebra import at_least_zero, both, either, is_zero, negate, proven_nonnegative, settle
from qknorm_onnx.graph.symbolic.expression import IndexReader
from qknorm_onnx.graph.symbolic.terms import (
    FALSE,
    TRUE,
    Apply,
    AtLeastZero,
    Both,
    Dimension,
    Either,
    Flag,
    Index,
    IsZero,
    Known,
    Linear,
    Not,
    Read,
    Real,
    Select,
    form_of,
    index,
)

HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'
PRELUDE = """
    zero = Constant<value_int = 0>()
    one = Constant<value_int = 1>()
    two = Constant<value_int = 2>()
    minus_one = Constant<value_int = -1>()
    v0 = Constant<value_ints = [0]>()
    v1 = Constant<value_ints = [1]>()
    v2 = Constant<value_ints = [2]>()
    v01 = Constant<value_ints = [0, 1]>()
    last = Constant<value_ints = [-1]>()
    huge = Constant<value_ints = [9223372036854775807]>()
    vs = Shape<start = 1, end = 2>(ids)
    vb = Shape<start = 0, end = 1>(ids)
    s = Squeeze(vs)
    b = Squeeze(vb)
    p_v = Shape<start = 2, end = 3>(past)
    p = Squeeze(p_v)
    t = Add(p, s)
    i = Range(zero, s, one)
    j = Range(zero, t, one)
    row = Unsqueeze(i, v1)
    column = Unsqueeze(j, v0)
    positions = Add(i, p)
"""


def build(body: str, result: str = "y") -> tuple[ir.Model, onnx.ModelProto]:
    text = (
        f"{HEADER}g (int64[B, S] ids, float[B, H, P, D] past, float[B, S] weights) => (int64[N] {result}) {{ {PRELUDE} {body} }}"
    )
    proto = onnx.parser.parse_model(text)
    del proto.graph.output[0].type.tensor_type.shape.dim[:]
    proto.graph.output[0].ClearField("type")
    return ir.from_proto(proto), proto


def run(proto: onnx.ModelProto, names: list[str], batch: int, queries: int, past: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    feeds = {
        "ids": rng.integers(0, 9, (batch, queries)),
        "past": rng.normal(size=(batch, 2, past, 3)).astype(np.float32),
        "weights": rng.normal(size=(batch, queries)).astype(np.float32),
    }
    feeds["weights"][0, 0] = np.nan
    model = onnx.ModelProto()
    model.CopyFrom(proto)
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return dict(zip(names, ReferenceEvaluator(model).run(None, feeds), strict=True)) | feeds


class Evaluation:
    """Terms at concrete sizes; elements of leaves are looked up in `arrays`."""

    def __init__(self, sizes: dict[str, int], arrays: dict[str, np.ndarray]) -> None:
        self.sizes, self.arrays = sizes, arrays

    def form(self, form: Linear, at: tuple[int, ...]) -> int:
        return form.constant + sum(factor * self.atom(atom, at) for atom, factor in form.terms)

    def atom(self, atom: object, at: tuple[int, ...]) -> int:
        if isinstance(atom, Index):
            return at[atom.axis]
        if isinstance(atom, Dimension):
            return self.sizes[atom.name]
        if isinstance(atom, Read):
            return self.read(atom, at)
        assert isinstance(atom, Apply)
        values = [self.form(argument, at) for argument in atom.arguments]
        functions = {
            "quotient": lambda: values[0] // values[1],
            "remainder": lambda: values[0] % values[1],
            "absolute": lambda: abs(values[0]),
            "maximum": lambda: max(values),
            "minimum": lambda: min(values),
            "product": lambda: values[0] * values[1],
        }
        value = functions[atom.function]()
        assert value >= 0 or not atom.nonnegative
        return value

    def read(self, read: Read, at: tuple[int, ...]) -> object:
        return self.arrays[read.value.name][tuple(self.form(part, at) for part in read.indices)]

    def element(self, term: object, at: tuple[int, ...]) -> object:
        if isinstance(term, Linear):
            return self.form(term, at)
        if isinstance(term, Real):
            return term.value
        if isinstance(term, Known):
            return term.value
        if isinstance(term, Select):
            return self.element(term.when_true if self.element(term.condition, at) else term.when_false, at)
        if isinstance(term, AtLeastZero):
            return self.form(term.form, at) >= 0
        if isinstance(term, IsZero):
            return self.form(term.form, at) == 0
        if isinstance(term, Flag):
            return self.read(term.read, at)
        if isinstance(term, Not):
            return not self.element(term.operand, at)
        assert isinstance(term, (Both, Either))
        return (all if isinstance(term, Both) else any)(self.element(part, at) for part in term.operands)


def leaves(term: object) -> set[str]:
    if isinstance(term, Read):
        return {term.value.name} | {name for part in term.indices for name in leaves(part)}
    parts: tuple[object, ...] = ()
    if isinstance(term, Linear):
        parts = tuple(atom for atom, _ in term.terms)
    elif isinstance(term, Apply):
        parts = term.arguments
    elif isinstance(term, Select):
        parts = (term.condition, term.when_true, term.when_false)
    elif isinstance(term, (AtLeastZero, IsZero)):
        parts = (term.form,)
    elif isinstance(term, Flag):
        parts = (term.read,)
    elif isinstance(term, Not):
        parts = (term.operand,)
    elif isinstance(term, (Both, Either)):
        parts = tuple(term.operands)
    return {name for part in parts for name in leaves(part)}


SIZES = [(2, 3, 4), (1, 5, 0), (3, 1, 2), (2, 4, 1)]

# body, whether the term must be free of leaves
RULES = {
    "range": ("y = Identity(positions)", True),
    "range down": ("m = Sub(s, one) y = Range(m, minus_one, minus_one)", True),
    "unsqueeze": ("a = Unsqueeze(positions, v01) y = Unsqueeze(a, last)", True),
    "squeeze all": ("a = Unsqueeze(positions, v01) y = Squeeze(a, v0)", True),
    "transpose": ("a = Sub(row, column) y = Transpose<perm = [1, 0]>(a)", True),
    "broadcast": ("y = Add(row, column)", True),
    "expand": ("c = Concat<axis = 0>(vb, vs) a = Unsqueeze(i, v0) y = Expand(a, c)", True),
    "reshape ones": ("c = Concat<axis = 0>(v1, vs, v1, v1) y = Reshape(i, c)", True),
    "reshape infer": ("c = Concat<axis = 0>(v1, last) y = Reshape(i, c)", True),
    "reshape scalar": ("y = Reshape(t, last)", True),
    "reshape copies": ("a = Unsqueeze(i, v0) c = Constant<value_ints = [1, 0, 1]>() y = Reshape(a, c)", True),
    "concat shape": ("y = Concat<axis = 0>(vb, v1, vs, p_v)", True),
    "concat grid": ("a = Sub(row, column) u = Unsqueeze(a, last) c = Neg(u) y = Concat<axis = -1>(u, c, u)", True),
    "concat goes on": ("f = Sub(v0, v1) y = Concat<axis = 0>(f, i)", True),
    "concat breaks": ("f = Add(v0, v1) y = Concat<axis = 0>(f, i)", True),
    "concat appended": ("y = Concat<axis = 0>(i, vs)", True),
    "concat of many before": ("n = Neg(p) f = Expand(n, p_v) y = Concat<axis = 0>(f, i)", False),
    "concat of two ranges": ("y = Concat<axis = 0>(i, j)", True),
    "slice from": ("y = Slice(positions, v1, huge, v0)", True),
    "slice to": ("y = Slice(j, v0, vs, v0)", True),
    "slice past": ("y = Slice(j, p_v, huge, v0)", True),
    "slice shape": ("c = Shape(past) y = Slice(c, v1, last)", False),
    "slice too long": ("c = Constant<value_ints = [100]>() y = Slice(i, v0, c)", True),
    "slice negative end": ("y = Slice(j, v0, last)", False),
    "slice negative start": ("y = Slice(j, last, huge)", False),
    "slice step": ("y = Slice(j, v0, huge, v0, v2)", False),
    "gather": ("y = Gather<axis = 0>(j, i)", True),
    "gather rows": ("c = Concat<axis = 0>(vb, vs) y = Gather<axis = 1>(ids, row)", False),
    "gather negative": ("y = Gather<axis = 0>(j, minus_one)", False),
    "gather component": ("c = Shape(past) y = Gather<axis = 0>(c, two)", True),
    "gather unknown place": ("a = Mod(ids, one) y = Gather<axis = 0>(j, a)", False),
    "gather_nd": (
        (
            "r = Range(zero, b, one) q = Unsqueeze(r, v1) c = Concat<axis = 0>(vb, vs) qe = Expand(q, c) "
            "qu = Unsqueeze(qe, last) "
            "ke = Expand(i, c) ku = Unsqueeze(ke, last) places = Concat<axis = -1>(qu, ku) y = GatherND(ids, places)"
        ),
        False,
    ),
    "gather_elements": ("y = GatherElements<axis = 0>(j, i)", True),
    "constant of shape": ("c = Concat<axis = 0>(vs, p_v) y = ConstantOfShape<value = float[1] {3.0}>(c)", True),
    "cumsum zero": ("a = Sub(i, i) y = CumSum(a, zero)", True),
    "cumsum ones": ("a = ConstantOfShape<value = int64[1] {1}>(vs) y = CumSum(a, zero)", True),
    "cumsum reverse exclusive": (
        "a = ConstantOfShape<value = int64[1] {2}>(vs) y = CumSum<reverse = 1, exclusive = 1>(a, zero)",
        True,
    ),
    "cumsum unknown": ("y = CumSum(ids, one)", False),
    "trilu upper": ("c = Concat<axis = 0>(vs, vs) a = ConstantOfShape<value = float[1] {2.0}>(c) y = Trilu(a, one)", True),
    "trilu lower": ("c = Concat<axis = 0>(vs, p_v) a = ConstantOfShape<value = float[1] {2.0}>(c) y = Trilu<upper = 0>(a)", True),
    "trilu of positions": ("a = Sub(row, column) y = Trilu<upper = 0>(a, p)", True),
    "comparisons": (
        (
            "a = Less(column, row) c = LessOrEqual(row, column) d = Greater(row, column) e = GreaterOrEqual(row, column) "
            "f = Equal(row, column) g = Or(a, f) h = Xor(c, d) k = And(g, h) l = Not(e) y = Or(k, l)"
        ),
        True,
    ),
    "booleans equal": ("a = Less(column, row) c = Greater(row, two) y = Equal(a, c)", True),
    "comparison with fraction": (
        "f = Cast<to = 1>(row) c = Constant<value_float = 1.5>() a = Less(f, c) d = GreaterOrEqual(c, f) y = And(a, d)",
        True,
    ),
    "fraction above": ("f = Cast<to = 1>(row) c = Constant<value_float = 1.5>() y = GreaterOrEqual(c, f)", True),
    "fraction below": ("f = Cast<to = 1>(row) c = Constant<value_float = 1.5>() y = LessOrEqual(c, f)", True),
    "fraction never equal": ("f = Cast<to = 1>(row) c = Constant<value_float = 1.5>() y = Equal(c, f)", True),
    "comparison with infinity": ("f = Cast<to = 1>(row) c = Constant<value_float = -inf>() y = Greater(f, c)", True),
    "where numbers": ("a = Less(column, row) c = Where(a, row, column) y = Add(c, one)", True),
    "where booleans": ("a = Less(column, row) c = Greater(row, two) d = Less(column, two) y = Where(a, c, d)", True),
    "one minus mask": (
        (
            "a = Less(column, row) f = Cast<to = 1>(a) o = Constant<value_float = 1.0>() d = Sub(o, f) "
            "m = Constant<value_float = -3.4028235e+38>() y = Mul(d, m)"
        ),
        True,
    ),
    "cast back": ("a = Less(column, row) c = Cast<to = 7>(a) y = Cast<to = 9>(c)", True),
    "arithmetic": ("a = Mul(row, two) c = Sub(a, column) d = Neg(c) y = Add(d, t)", True),
    "division": ("c = Constant<value_int = 3>() a = Div(row, c) d = Div(column, c) y = Sub(a, d)", True),
    "division exact": ("a = Mul(row, two) y = Div(a, two)", True),
    "division negative": ("a = Sub(row, column) c = Constant<value_int = 3>() y = Div(a, c)", False),
    "remainder": ("c = Constant<value_int = 3>() y = Mod(column, c)", True),
    "absolute": ("a = Sub(row, column) y = Abs(a)", True),
    "absolute compared": ("a = Sub(row, column) c = Abs(a) y = LessOrEqual(c, two)", True),
    "sign": ("a = Sub(row, column) y = Sign(a)", True),
    "maximum": ("a = Max(row, column) c = Min(row, column, two) y = Sub(a, c)", True),
    "maximum compared": ("a = Max(row, column) c = Min(row, column) d = Greater(a, two) e = Less(c, one) y = Xor(d, e)", True),
    "is nan": ("f = Cast<to = 1>(row) y = IsNaN(f)", True),
    "floats unknown": ("a = Mul(weights, weights) y = Less(a, weights)", False),
    "float equals itself": ("y = Equal(weights, weights)", False),
    "half": ("f = Cast<to = 10>(row) y = Add(f, f)", False),
    "shape of product": ("a = Transpose<perm = [0, 1, 3, 2]>(past) c = MatMul(past, a) y = Shape(c)", True),
}


@pytest.mark.parametrize("name", RULES)
def test_the_term_is_what_the_op_computes(name: str) -> None:
    body, closed = RULES[name]
    model, proto = build(body)
    tensor = IndexReader().read(model.graph.outputs[0])
    if tensor is None:  # not even the rank is known: only for what no rule covers
        assert not closed
        return
    terms = tensor.components or (tensor.element,)
    names = sorted(set().union(*map(leaves, terms)))
    assert not (closed and names), f"{name}: the term reads {names}"
    for batch, queries, past in SIZES:
        arrays = run(proto, ["y", *(name for name in names if name not in ("ids", "past", "weights", "y"))], batch, queries, past)
        evaluation = Evaluation({"B": batch, "S": queries, "P": past, "H": 2, "D": 3}, arrays)
        extents = tuple(evaluation.form(extent, ()) for extent in tensor.extents)
        assert extents == arrays["y"].shape, (name, batch, queries, past)
        for at in itertools.product(*map(range, extents)):
            term = tensor.components[at[-1]] if tensor.components else tensor.element
            assert evaluation.element(term, at) == arrays["y"][at], (name, batch, queries, past, at)


def test_a_rule_that_looks_into_a_value_is_used_at_all() -> None:
    """The table above would hold for leaves too: where it says so, the term must be free of them."""
    assert sum(closed for _, closed in RULES.values()) > 45


def test_tables_that_are_bands() -> None:
    from qknorm_onnx.graph.symbolic.tensor import constant_tensor

    for rows, columns, lower, upper in [(4, 4, 9, 0), (4, 6, 1, 2), (5, 3, 0, 0), (3, 7, 9, 4), (4, 4, -1, 9)]:
        ahead = np.arange(columns)[None] - np.arange(rows)[:, None]
        table = (ahead <= upper) & (ahead >= -lower)
        found = constant_tensor(table[None], ir.DataType.BOOL)
        assert found is not None
        evaluation = Evaluation({}, {})
        for i, j in itertools.product(range(rows), range(columns)):
            assert evaluation.element(found.element, (0, i, j)) == table[i, j]
    holes = np.tri(5, 5, dtype=bool)
    holes[3, 1] = False
    assert constant_tensor(holes, ir.DataType.BOOL) is None
    assert constant_tensor(np.arange(16.0).reshape(4, 4), ir.DataType.DOUBLE) is None


def test_an_overridable_initializer_is_no_constant() -> None:
    text = f"{HEADER}g (int64[N] x, int64 c) => (int64[N] y) <int64 c = {{3}}> {{ y = Mul(x, c) }}"
    model = ir.from_proto(onnx.parser.parse_model(text))
    tensor = IndexReader().read(model.graph.outputs[0])
    assert tensor is not None
    assert "c" in leaves(tensor.element) or "y" in leaves(tensor.element)


def test_outputs_beside_the_first_have_no_rule() -> None:
    text = f"{HEADER}g (float[2, 3] x, float[3] w) => (float[2, 1] m) {{ y, m, d = LayerNormalization(x, w) }}"
    model = ir.from_proto(onnx.parser.parse_model(text))
    model.graph.outputs[0].shape = None
    assert IndexReader().read(model.graph.outputs[0]) is None


def test_proofs_of_sign() -> None:
    size, other = form_of(Dimension("S")), form_of(Dimension("T"))
    extents = (size, other)
    assert proven_nonnegative(size - index(0).plus(1), extents)
    assert not proven_nonnegative(size - index(1).plus(1), extents)
    assert not proven_nonnegative(other - size, extents)
    assert not proven_nonnegative(size.plus(-1), extents)
    assert settle(at_least_zero(size - index(0)), extents) == TRUE
    assert settle(is_zero(index(0) - size), extents) == FALSE
    assert settle(at_least_zero(index(0) - index(1)), extents) not in (TRUE, FALSE)


def test_logic() -> None:
    condition = at_least_zero(index(0) - index(1))
    other = is_zero(index(0))
    assert both(condition, TRUE) == condition
    assert both(condition, FALSE) == FALSE
    assert either(condition, TRUE) == TRUE
    assert both(other, negate(other)) == FALSE
    assert either(other, negate(other)) == TRUE
    assert negate(negate(condition)) == condition
    assert negate(both(condition, other)) == either(negate(condition), negate(other))


def test_a_deep_chain_does_not_exhaust_the_stack() -> None:
    body = "a0 = Identity(i) " + " ".join(f"a{n + 1} = Add(a{n}, one)" for n in range(3000)) + " y = Identity(a3000)"
    model, _ = build(body)
    tensor = IndexReader().read(model.graph.outputs[0])
    assert tensor is not None
    assert tensor.element == index(0).plus(3000)
