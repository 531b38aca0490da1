"""Sizes as text and back, products and quotients in one form, and shapes that follow from those of the inputs."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qknorm_onnx.graph.passes.derive_shapes import DeriveShapesPass
from qknorm_onnx.graph.symbolic.dimensions import dim_of_form, form_of_dim
from qknorm_onnx.graph.symbolic.products import product_of, quotient_of
from qknorm_onnx.graph.symbolic.terms import Apply, Dimension, Linear, form_of

NAMES = ["b", "seq", "past.0.key", "batch-size"]
SYMBOLS = st.sampled_from(NAMES).map(lambda name: form_of(Dimension(name)))
LEAVES = st.one_of(SYMBOLS, st.integers(1, 9).map(Linear))


def _grown(forms: st.SearchStrategy[Linear]) -> st.SearchStrategy[Linear]:
    pairs = st.tuples(forms, forms)
    return st.one_of(
        pairs.map(lambda pair: pair[0] + pair[1]),
        pairs.map(product_of),
        pairs.map(lambda pair: quotient_of(*pair) or Linear(1)),
        pairs.filter(lambda pair: bool(pair[0].terms and pair[1].terms)).map(lambda pair: form_of(Apply("minimum", pair))),
    )


FORMS = st.recursive(LEAVES, _grown, max_leaves=6)


def value(form: Linear, sizes: dict[str, int]) -> float:
    """A form at given sizes; quotients are fractions, so that equal forms have equal values."""
    total = float(form.constant)
    for atom, factor in form.terms:
        if isinstance(atom, Dimension):
            total += factor * sizes[atom.name]
            continue
        assert isinstance(atom, Apply)
        parts = [value(part, sizes) for part in atom.arguments]
        product = 1.0
        for part in parts:
            product *= part
        found = {"product": product, "quotient": parts[0] / parts[1], "minimum": min(parts)}
        total += factor * found[atom.function]
    return total


@given(FORMS)
def test_text_reads_back_as_the_same_size(form: Linear) -> None:
    text = dim_of_form(form)
    assert text is None or form_of_dim(text) == form


@given(FORMS, FORMS)
def test_products_and_quotients_have_the_right_values(first: Linear, second: Linear) -> None:
    sizes = dict(zip(NAMES, (2, 3, 5, 7), strict=True))
    a, b = value(first, sizes), value(second, sizes)
    assert value(product_of([first, second]), sizes) == pytest.approx(a * b, rel=1e-9)
    quotient = quotient_of(first, second)
    assert quotient is not None and value(quotient, sizes) == pytest.approx(a / b, rel=1e-9)
    assert quotient_of(product_of([first, second]), second) == first


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        ("s = Shape(x) t = Gather<axis=0>(s, v0) c = Concat<axis=0>(t, minus, four) y = Reshape(x, c)", "b,3*n,4"),
        ("s = Shape(x) e = Equal(s, minus) one = ConstantOfShape(v3) t = Where(e, one, s) y = Expand(x, t)", "b,n,12"),
        ("y = Reshape(x, folded)", "(b*n//4),4,12"),
        ("t = Transpose<perm=[1, 0, 2]>(x) y = Reshape(t, rows)", "n,12*b"),
        ("s = Shape(x) f, g, h = Split<axis=0, num_outputs=3>(s) c = Concat<axis=0>(f, g, minus) y = Reshape(x, c)", "b,n,12"),
        ("s = Size(x) u = Unsqueeze(s, v0) y0 = Reshape(x, u) y = Unsqueeze(y0, v0)", "1,12*b*n"),
    ],
)  # fmt: skip
def test_shapes_follow_from_the_inputs(body: str, shape: str) -> None:
    model = ir.from_proto(
        onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        f (float[b, n, 12] x) => (float[] y)
        <int64 zero = {{0}}, int64[1] v0 = {{0}}, int64[1] minus = {{-1}}, int64[1] four = {{4}}, int64[1] v3 = {{3}},
         int64[3] folded = {{-1, 4, 12}}, int64[2] rows = {{0, -1}}>
        {{ {body} }}""")
    )
    model.graph.outputs[0].shape = None
    DeriveShapesPass()(model)
    assert ",".join(str(dim) for dim in model.graph.outputs[0].shape or ()) == shape
