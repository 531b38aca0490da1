"""Forms of one meaning that are read alike: gains of full size, norms of groups, copied heads, one head, half-turn matrices."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.graph.attention_text import fused, run
from tests.graph.form_text import RMS, SAME, Form, form_model

GENERATOR = np.random.default_rng(11)
GAIN = 0.5 + GENERATOR.random(16)


def assert_fused(form: Form, *, sizes=(3, 7), **feeds):
    """One attention, proven, and right at other sizes than the proof's; its spec."""
    model = form_model(form)
    after, report = fused(model)
    assert len(report.fused) == 1 and not report.declined and not report.refused, report
    (entry,) = report.fused
    assert not entry.note
    kv = form.kv_heads * form.size
    widths = {"q_in": form.heads * form.size, "k_in": kv, "v_in": kv}
    feeds |= {name: GENERATOR.standard_normal((*sizes, width)).astype(np.float32) for name, width in widths.items()}
    np.testing.assert_allclose(run(after, feeds)[0], run(model, feeds)[0], rtol=1e-4, atol=1e-5)
    return entry.spec


def assert_declined(form: Form, reason: str):
    _, report = fused(form_model(form), prove=False)
    assert not report.fused and len(report.declined) == 1, report
    assert reason in report.declined[0].reason, report.declined[0].reason
    return report.declined[0]


ONES = """
  {n}_shape = Shape({x})
  {n}_ones = ConstantOfShape<value = float[1] {{{number}}}>({n}_shape)
"""
OPERATOR = "  {y} = RMSNormalization<axis=-1, epsilon=0.001>({x}, {n}_ones)\n"
EXPANDED = "  {n}_shape = Shape({x})\n  {n}_ones = Expand({n}_gain, {n}_shape)\n"
HATS = RMS.replace("Mul({n}_hat, {n}_gain)", "Mul({n}_hat, {n}_ones)")


@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize("number", [1.0, 1.7])
def test_a_norm_without_weight_is_written_with_a_shape_of_one_number(opset, number):
    prepare = ONES.replace("{number}", str(number)) + OPERATOR
    spec = assert_fused(Form(kv_heads=2, prepare=prepare, repeat=STACKED, opset=opset))
    assert spec.attention.scale == pytest.approx(0.31 * number**2)
    assert spec.norm.q_kind == spec.norm.k_kind == "rms"


@pytest.mark.parametrize("norm", [OPERATOR, HATS, HATS.replace("({n}_hat, {n}_ones)", "({n}_ones, {n}_hat)")])
def test_a_gain_that_is_expanded_to_full_size_is_the_small_one(norm):
    spec = assert_fused(Form(prepare=EXPANDED + norm, opset=23))
    assert spec.attention.scale == pytest.approx(0.31)


@pytest.mark.parametrize("norm", [OPERATOR, HATS])
@pytest.mark.parametrize("per_head", [False, True])
def test_a_constant_gain_with_one_row_for_all_tokens_is_that_row(norm, per_head):
    rows = {"q": (2, 4, 5, 16), "k": (2, 4, 5, 16)}
    weights = [
        (f"{side}_ones", np.broadcast_to(0.5 + GENERATOR.random((1, 4 if per_head else 1, 1, 16)), shape).copy())
        for side, shape in rows.items()
    ]
    assert_fused(Form(kv_heads=4, prepare=norm, opset=23, weights=tuple(weights), dims="2,5"), sizes=(2, 5))


def test_a_constant_gain_that_differs_between_tokens_is_no_gain():
    weights = tuple((f"{side}_ones", 0.5 + GENERATOR.random((2, 4, 5, 16))) for side in "qk")
    form = Form(kv_heads=4, prepare=OPERATOR, opset=23, weights=weights, dims="2,5")
    assert_declined(form, "a factor of their own for each position")


L2 = """
  {n}_length = ReduceL2<keepdims=1>({x}, last)
  {n}_least = Max({n}_length, eps)
  {y} = Div({x}, {n}_least)
"""
LAYER = "  {y} = LayerNormalization<axis=-1, epsilon=0.001>({x}, part_gain)\n"
LAYER_WITH_BIAS = "  {y} = LayerNormalization<axis=-1, epsilon=0.001>({x}, part_gain, part_bias)\n"


def in_groups(norm, split="0, 0, 0, 4, 4", joined="0, 0, -1, 16"):
    """`norm` of groups of {x}, which two Reshapes take apart and join."""
    rank = split.count(",") + 1
    before = f"""
  {{n}}_apart = Constant<value = int64[{rank}] {{{{{split}}}}}>()
  {{n}}_joined = Constant<value = int64[{joined.count(",") + 1}] {{{{{joined}}}}}>()
  {{n}}_groups = Reshape({{x}}, {{n}}_apart)
"""
    inner = norm.replace("{x}", "{n}_groups").replace("{y}", "{n}_normed")
    return before + inner + "  {y} = Reshape({n}_normed, {n}_joined)\n"


def with_gain(norm, name):
    return norm.replace("{y}", "{n}_bare") + f"  {{y}} = Mul({{n}}_bare, {name})\n"


WEIGHTLESS = RMS.replace("{y} = Mul({n}_hat, {n}_gain)", "{y} = Identity({n}_hat)")
PARTS = tuple((name, 0.5 + GENERATOR.random(shape)) for name, shape in (("part_gain", 4), ("part_bias", 4), ("own_gain", (4, 4))))


@pytest.mark.parametrize(
    ("norm", "kind"),
    [
        (L2, "l2"),
        (WEIGHTLESS, "rms"),
        (with_gain(WEIGHTLESS, "part_gain"), "rms"),
        (with_gain(WEIGHTLESS, "own_gain"), "rms"),
        (with_gain(L2, "part_gain"), "l2"),
        (LAYER, "layer"),
        (LAYER_WITH_BIAS, "layer"),
    ],
)
def test_groups_behind_the_transposition_of_heads(norm, kind):
    spec = assert_fused(Form(heads=4, kv_heads=2, prepare=in_groups(norm), weights=PARTS, repeat=TILED))
    assert (spec.norm.q_kind, spec.norm.k_kind, spec.norm.axis, spec.norm.groups) == (kind, kind, "head", 4)


def test_two_groups_of_eight():
    spec = assert_fused(Form(kv_heads=4, prepare=in_groups(L2, split="0, 0, 0, 2, 8")))
    assert spec.norm.groups == 2


def test_groups_of_heads_in_front_of_their_split():
    project = in_groups(WEIGHTLESS, split="0, 0, -1, 32", joined="0, 0, -1")
    spec = assert_fused(Form(heads=4, kv_heads=4, project=project, prepare=SAME))
    assert (spec.norm.axis, spec.norm.groups) == ("hidden", 2)


def test_groups_inside_heads_in_front_of_their_split():
    project = in_groups(with_gain(WEIGHTLESS, "part_gain"), split="0, 0, -1, 4", joined="0, 0, -1")
    spec = assert_fused(Form(heads=4, kv_heads=4, project=project, prepare=SAME, weights=PARTS))
    assert (spec.norm.axis, spec.norm.groups) == ("head", 4)


JOINED = "  {n}_rows = Constant<value = int64[4] {{0, 4, -1, 16}}>()\n  {y} = Reshape({n}_c, {n}_rows)\n"
APART = "  {n}_two = Constant<value = int64[1] {{2}}>()\n  {n}_u = Unsqueeze({x}, {n}_two)\n"
TILED = APART + "  {n}_times = Constant<value = int64[5] {{1, 1, 2, 1, 1}}>()\n  {n}_c = Tile({n}_u, {n}_times)\n" + JOINED
STACKED = APART + "  {n}_c = Concat<axis=2>({n}_u, {n}_u)\n" + JOINED
HALVED = "  {n}_a, {n}_b = Split<axis=1, num_outputs=2>({x})\n"
LISTED = HALVED + "  {y} = Concat<axis=1>({n}_a, {n}_a, {n}_b, {n}_b)\n"
SLICED = """
  {n}_0 = Constant<value = int64[1] {{0}}>()
  {n}_1 = Constant<value = int64[1] {{1}}>()
  {n}_2 = Constant<value = int64[1] {{2}}>()
  {n}_a = Slice({x}, {n}_0, {n}_1, {n}_1)
  {n}_b = Slice({x}, {n}_1, {n}_2, {n}_1)
  {y} = Concat<axis=1>({n}_a, {n}_a, {n}_b, {n}_b)
"""
GATHERED = "  {n}_i = Constant<value = int64[4] {{0, 0, 1, 1}}>()\n  {y} = Gather<axis=1>({x}, {n}_i)\n"


@pytest.mark.parametrize("repeat", [TILED, STACKED, LISTED, SLICED, GATHERED])
def test_copied_heads(repeat):
    spec = assert_fused(Form(kv_heads=2, repeat=repeat))
    assert (spec.attention.q_num_heads, spec.attention.kv_num_heads) == (4, 2)


@pytest.mark.parametrize(
    "repeat",
    [
        "  {n}_times = Constant<value = int64[4] {{1, 4, 1, 1}}>()\n  {y} = Tile({x}, {n}_times)\n",
        "  {n}_shape = Constant<value = int64[4] {{1, 4, 1, 1}}>()\n  {y} = Expand({x}, {n}_shape)\n",
        "  {y} = Concat<axis=1>({x}, {x}, {x}, {x})\n",
    ],
)
def test_one_head_of_keys_copied_for_all_queries(repeat):
    spec = assert_fused(Form(kv_heads=1, repeat=repeat))
    assert (spec.attention.q_num_heads, spec.attention.kv_num_heads) == (4, 1)


TILED_BY_UNBIND = (
    HALVED
    + """
  {n}_one = Constant<value = int64[1] {{1}}>()
  {n}_p = Squeeze({n}_a, {n}_one)
  {n}_q = Squeeze({n}_b, {n}_one)
  {n}_0 = Unsqueeze({n}_p, {n}_one)
  {n}_1 = Unsqueeze({n}_q, {n}_one)
  {y} = Concat<axis=1>({n}_0, {n}_1, {n}_0, {n}_1)
"""
)
TILED_CHUNKS = HALVED + "  {n}_c = Concat<axis=1>({n}_a, {n}_b)\n  {y} = Concat<axis=1>({n}_c, {n}_c)\n"


@pytest.mark.parametrize(
    "repeat",
    [
        TILED_BY_UNBIND,
        TILED_CHUNKS,
        LISTED.replace("{n}_a, {n}_a, {n}_b, {n}_b", "{n}_a, {n}_b, {n}_a, {n}_b"),
        "  {n}_times = Constant<value = int64[4] {{1, 2, 1, 1}}>()\n  {y} = Tile({x}, {n}_times)\n",
    ],
)
def test_copies_in_another_order_are_another_attention(repeat):
    assert_declined(Form(kv_heads=2, repeat=repeat), "")


@pytest.mark.parametrize("order", ["0, 1, 0, 1", "0, 0, 0, 1"])
def test_heads_gathered_in_another_order_stay_outside_of_the_node(order):
    spec = assert_fused(Form(kv_heads=2, repeat=GATHERED.replace("0, 0, 1, 1", order)))
    assert (spec.attention.kv_num_heads, spec.norm.q_kind, spec.norm.k_kind) == (4, "rms", "none")


GAINED = RMS.replace("{y} =", "{n}_g =")
ROTARY = (
    GAINED
    + """
  {n}_a, {n}_b = Split<axis=-1, num_outputs=2>({n}_g)
  {n}_m = Neg({n}_b)
  {n}_turned = Concat<axis=-1>({n}_m, {n}_a)
  {n}_x = Mul({n}_g, cos)
  {n}_z = Mul({n}_turned, sin)
  {y} = Add({n}_x, {n}_z)
"""
)
BY_WAY_OF_THREE_AXES = """
  three = Constant<value = int64[3] {{{{2, 5, {size}}}}}>()
  four = Constant<value = int64[4] {{{{2, 1, {size}, 5}}}}>()
  back = Transpose<perm = [0, 1, 3, 2]>({{k}})
  flat = Reshape(back, three)
  turned_keys = Transpose<perm = [0, 2, 1]>(flat)
  keys = Reshape(turned_keys, four)
  scores = MatMul({{q}}, keys)
"""


@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize("fixed", [False, True])
def test_one_single_head_with_a_rotary_embedding(size, fixed):
    """torch's own product folds batch and heads: with fixed sizes a single head is then not told from the axis beside it."""
    tables = f", float[5,{size}] cos, float[5,{size}] sin" if fixed else f", float[seq,{size}] cos, float[seq,{size}] sin"
    form = Form(heads=1, kv_heads=1, size=size, prepare=ROTARY, inputs=tables)
    if fixed:
        form = dataclasses.replace(form, dims="2,5", product=BY_WAY_OF_THREE_AXES.format(size=size))
    sizes = (2, 5) if fixed else (3, 7)
    feeds = {name: GENERATOR.standard_normal((sizes[1], size)).astype(np.float32) for name in ("cos", "sin")}
    spec = assert_fused(form, sizes=sizes, **feeds)
    assert spec.rotary.order == "after_norm"


def turn(pairs):
    """The matrix P of size 16 for which x @ P turns each pair (a, b) to (-b, a)."""
    matrix = np.zeros((16, 16))
    for a, b in pairs:
        matrix[b, a], matrix[a, b] = -1, 1
    return matrix


HALVES = turn((i, i + 8) for i in range(8))
NEIGHBOURS = turn((2 * i, 2 * i + 1) for i in range(8))
MATRIX = (
    GAINED
    + """
  {n}_turned = MatMul({n}_g, turn)
  {n}_x = Mul({n}_g, cos)
  {n}_z = Mul({n}_turned, sin)
  {y} = Add({n}_x, {n}_z)
"""
)


def turned_by(matrix, product="MatMul({n}_g, turn)"):
    tables = ", float[seq,16] cos, float[seq,16] sin"
    prepare = MATRIX.replace("MatMul({n}_g, turn)", product)
    return Form(kv_heads=4, prepare=prepare, inputs=tables, weights=(("turn", matrix),))


@pytest.mark.parametrize(("matrix", "interleaved"), [(HALVES, False), (-HALVES, False), (NEIGHBOURS, True)])
def test_a_rotary_embedding_as_a_product_with_a_matrix(matrix, interleaved):
    feeds = {name: GENERATOR.standard_normal((7, 16)).astype(np.float32) for name in ("cos", "sin")}
    spec = assert_fused(turned_by(matrix), **feeds)
    assert (spec.rotary.order, spec.rotary.interleaved) == ("after_norm", interleaved)


@pytest.mark.parametrize(
    ("equation", "operands"),
    [
        ("bhsd,de->bhse", "{n}_g, turn"),
        ("bhsd, ed -> bhse", "{n}_g, turn"),
        ("de,bhsd->bhse", "turn, {n}_g"),
        ("ij,abcj->abci", "turn, {n}_g"),
    ],
)
def test_a_rotary_embedding_as_an_einsum_with_a_matrix(equation, operands):
    feeds = {name: GENERATOR.standard_normal((7, 16)).astype(np.float32) for name in ("cos", "sin")}
    spec = assert_fused(turned_by(HALVES, f'Einsum<equation="{equation}">({operands})'), **feeds)
    assert (spec.rotary.order, spec.rotary.interleaved) == ("after_norm", False)


def test_an_einsum_that_moves_axes_too_is_no_product_with_a_matrix():
    form = dataclasses.replace(turned_by(HALVES, 'Einsum<equation="bhsd,de->bshe">({n}_g, turn)'), dims="4,4")
    assert_declined(form, "")


def test_a_table_of_ones_and_minus_ones_is_no_sign_of_the_rotary_embedding():
    """cos = 1 or -1 as a constant row, which a table may be, and not what turns halves: it is not taken for a sign of x."""
    row = np.where(np.arange(16) % 3, 1.0, -1.0)
    form = dataclasses.replace(turned_by(HALVES), weights=(("turn", HALVES), ("cos", row)), inputs=", float[seq,16] sin")
    assert_declined(form, "")


@pytest.mark.parametrize("matrix", [0.5 * HALVES, HALVES + np.eye(16), GENERATOR.standard_normal((16, 16)), np.abs(HALVES)])
def test_a_matrix_that_is_no_turn_is_declined_for_what_it_is(matrix):
    miss = assert_declined(turned_by(matrix), "a constant matrix that does more than turn pairs")
    assert "one 1 or -1 for each value" in miss.hint  # which the test above does
