"""Each spelling of a rotary embedding is read by what it computes, and the rewrite is proven."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from qknorm_onnx.spec.qk_norm_spec import RotarySpec
from tests.graph.attention_text import HALVES, NO_ROTARY, Spelling, attention_model, fused, run

AFTER = "after_norm"
TURN_SPLIT = """
  {n}_first, {n}_second = Split<axis=-1, num_outputs=2>({x})
  {n}_minus = Neg({n}_second)
  {n}_turned = Concat<axis=-1>({n}_minus, {n}_first)
  {n}_a = Mul(cos, {x})
  {n}_b = Mul({n}_turned, sin)
  {y} = Add({n}_b, {n}_a)
"""
TURN_BACKWARDS = HALVES.replace("Neg({n}_second)", "Neg({n}_first)").replace(
    "Concat<axis=-1>({n}_minus, {n}_first)", "Concat<axis=-1>({n}_second, {n}_minus)"
)
NEIGHBOURS = """
  {n}_even = Slice({x}, zero1, end, minus1, two1)
  {n}_odd = Slice({x}, one1, end, minus1, two1)
  {n}_minus = Neg({n}_odd)
  {n}_minus1 = Unsqueeze({n}_minus, minus1)
  {n}_even1 = Unsqueeze({n}_even, minus1)
  {n}_stack = Concat<axis=-1>({n}_minus1, {n}_even1)
  {n}_shape = Shape({x})
  {n}_turned = Reshape({n}_stack, {n}_shape)
  {n}_a = Mul({x}, cos_n)
  {n}_b = Mul({n}_turned, sin_n)
  {y} = Add({n}_a, {n}_b)
"""
NEIGHBOUR_TABLES = """
  angles1 = Unsqueeze(angles, minus1)
  angles_rep = Concat<axis=-1>(angles1, angles1)
  table_shape = Concat<axis=0>(seq1, size1)
  angles_n = Reshape(angles_rep, table_shape)
  cos_n = Cos(angles_n)
  sin_n = Sin(angles_n)
"""
COMPLEX = """
  {n}_shape = Shape({x})
  {n}_lead = Slice({n}_shape, zero1, minus1)
  {n}_pairs = Concat<axis=0>({n}_lead, half, two1)
  {n}_p = Reshape({x}, {n}_pairs)
  {n}_re = Gather<axis=-1>({n}_p, zero0)
  {n}_im = Gather<axis=-1>({n}_p, one0)
  {n}_rc = Mul({n}_re, cos_half)
  {n}_is = Mul({n}_im, sin_half)
  {n}_rs = Mul({n}_re, sin_half)
  {n}_ic = Mul({n}_im, cos_half)
  {n}_or = Sub({n}_rc, {n}_is)
  {n}_oi = Add({n}_rs, {n}_ic)
  {n}_or1 = Unsqueeze({n}_or, minus1)
  {n}_oi1 = Unsqueeze({n}_oi, minus1)
  {n}_both = Concat<axis=-1>({n}_or1, {n}_oi1)
  {y} = Reshape({n}_both, {n}_shape)
"""
HALF_TABLES = """
  zero0 = Constant<value = int64 {0}>()
  one0 = Constant<value = int64 {1}>()
  cos_half = Cos(angles)
  sin_half = Sin(angles)
"""
FIRST_PART = """
  {n}_in = Slice({x}, zero1, half, minus1)
  {n}_rest = Slice({x}, half, end, minus1)
  {n}_first = Slice({n}_in, zero1, two1, minus1)
  {n}_second = Slice({n}_in, two1, end, minus1)
  {n}_minus = Neg({n}_second)
  {n}_turned = Concat<axis=-1>({n}_minus, {n}_first)
  {n}_a = Mul({n}_in, cos_part)
  {n}_b = Mul({n}_turned, sin_part)
  {n}_s = Add({n}_a, {n}_b)
  {y} = Concat<axis=-1>({n}_s, {n}_rest)
"""
LAST_PART = FIRST_PART.replace("Slice({x}, zero1, half", "Slice({x}, SWAP").replace(
    "Slice({x}, half, end", "Slice({x}, zero1, half"
)
LAST_PART = LAST_PART.replace("SWAP", "half, end").replace("({n}_s, {n}_rest)", "({n}_rest, {n}_s)")
PART_TABLES = """
  angles_part = Slice(angles, zero1, two1, one1)
  angles_part2 = Concat<axis=-1>(angles_part, angles_part)
  cos_part = Cos(angles_part2)
  sin_part = Sin(angles_part2)
"""
# Both halves of the head turn on their own (two axes of an image), each with its own angles.
SECTIONS = """
  {n}_l, {n}_h = Split<axis=-1, num_outputs=2>({x})
  {n}_l1, {n}_l2 = Split<axis=-1, num_outputs=2>({n}_l)
  {n}_lm = Neg({n}_l2)
  {n}_lt = Concat<axis=-1>({n}_lm, {n}_l1)
  {n}_la = Mul({n}_l, cos_part)
  {n}_lb = Mul({n}_lt, sin_part)
  {n}_ls = Add({n}_la, {n}_lb)
  {n}_h1, {n}_h2 = Split<axis=-1, num_outputs=2>({n}_h)
  {n}_hm = Neg({n}_h2)
  {n}_ht = Concat<axis=-1>({n}_hm, {n}_h1)
  {n}_ha = Mul({n}_h, cos_two)
  {n}_hb = Mul({n}_ht, sin_two)
  {n}_hs = Add({n}_ha, {n}_hb)
  {y} = Concat<axis=-1>({n}_ls, {n}_hs)
"""
SECTION_TABLES = (
    PART_TABLES
    + """
  angles_two = Slice(angles, two1, end, one1)
  angles_two2 = Concat<axis=-1>(angles_two, angles_two)
  cos_two = Cos(angles_two2)
  sin_two = Sin(angles_two2)
"""
)

SPELLINGS = {
    "halves": (HALVES, "", RotarySpec(order=AFTER)),
    "halves by Split": (TURN_SPLIT, "", RotarySpec(order=AFTER)),
    "halves, turned backwards": (TURN_BACKWARDS, "", RotarySpec(order=AFTER)),
    "neighbours": (NEIGHBOURS, NEIGHBOUR_TABLES, RotarySpec(order=AFTER, interleaved=True)),
    "complex numbers written out": (COMPLEX, HALF_TABLES, RotarySpec(order=AFTER, interleaved=True)),
    "first part of the head": (FIRST_PART, PART_TABLES, RotarySpec(order=AFTER, embedding_dim=4)),
    "last part of the head": (LAST_PART, PART_TABLES, RotarySpec(order=AFTER, embedding_dim=4, offset=4)),
    "two sections": (SECTIONS, SECTION_TABLES, RotarySpec(order=AFTER, sections=2)),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling_is_read_and_proven(name):
    rotary, tables, expected = SPELLINGS[name]
    model, report = fused(attention_model(Spelling(rotary=rotary, constants=tables)))
    assert not report.declined and not report.refused
    (attention,) = report.fused
    assert attention.note == ""
    assert attention.spec.rotary == expected
    node = next(node for node in model.graph if node.op_type == "QKNormAttention")
    rotated = expected.embedding_dim or 8
    assert [node.inputs[index].shape[-1] for index in (8, 9)] == [rotated // 2] * 2


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling_in_front_of_the_norm(name):
    rotary, tables, expected = SPELLINGS[name]
    _, report = fused(attention_model(Spelling(rotary=rotary, constants=tables, rotary_first=True)))
    (attention,) = report.fused
    assert attention.note == ""
    assert attention.spec.rotary.order == "before_norm"
    assert attention.spec.rotary.embedding_dim == expected.embedding_dim


def test_tables_whose_halves_differ_stay_wide():
    tables = """
  doubled = Add(angles, angles)
  wide = Concat<axis=-1>(angles, doubled)
  cos_w = Cos(wide)
  sin_w = Sin(wide)
"""
    rotary = HALVES.replace("cos)", "cos_w)").replace("sin)", "sin_w)")
    model, report = fused(attention_model(Spelling(rotary=rotary, constants=tables)))
    assert report.fused[0].note == ""
    node = next(node for node in model.graph if node.op_type == "QKNormAttention")
    assert [node.inputs[index].shape[-1] for index in (8, 9)] == [8, 8]


def test_tables_that_are_inputs_stay_wide():
    rotary = HALVES.replace("cos)", "cos_in)").replace("sin)", "sin_in)")
    inputs = ", float[batch,1,seq,8] cos_in, float[batch,1,seq,8] sin_in"
    model, report = fused(attention_model(Spelling(rotary=rotary, extra_inputs=inputs)))
    assert report.fused[0].note == ""
    node = next(node for node in model.graph if node.op_type == "QKNormAttention")
    assert [node.inputs[index].shape[-1] for index in (8, 9)] == [8, 8]


def test_operator_with_tables_for_one_batch():
    rotary = "  {y} = RotaryEmbedding<interleaved=0>({x}, cos_one, sin_one)\n"
    tables = "  angles_b = Unsqueeze(angles, zero1)\n  cos_one = Cos(angles_b)\n  sin_one = Sin(angles_b)\n"
    _, report = fused(attention_model(Spelling(rotary=rotary, constants=tables, opset=23)), prove=False)
    assert report.fused[0].spec.rotary == RotarySpec(order=AFTER)


def test_something_that_only_looks_like_a_rotary_embedding_is_left_outside():
    # both halves with the same sign: no rotation
    rotary = HALVES.replace("Neg({n}_second)", "Identity({n}_second)")
    model, report = fused(attention_model(Spelling(rotary=rotary)))
    assert not report.fused
    assert report.declined and "Add" in report.declined[0].reason
    assert not any(node.op_type == "QKNormAttention" for node in model.graph)


def test_first_tokens_are_skipped():
    inner = HALVES.replace("{x}", "{n}_others").replace("{y}", "{n}_done")
    inner = inner.replace("cos)", "cos_rest)").replace("sin)", "sin_rest)")
    tokens = "  {n}_head = Slice({x}, zero1, two1, two1)\n  {n}_others = Slice({x}, two1, end, two1)\n"
    rotary = tokens + inner + "  {y} = Concat<axis=2>({n}_head, {n}_done)\n"
    tables = """
  angles_rest = Slice(angles, two1, end, zero1)
  rest2 = Concat<axis=-1>(angles_rest, angles_rest)
  cos_rest = Cos(rest2)
  sin_rest = Sin(rest2)
"""
    old = attention_model(Spelling(rotary=rotary, constants=tables))
    for node in old.graph:  # exporters write these shapes; ONNX cannot infer them
        heads = {"q_rot": 6, "k_rot": 2}.get(node.outputs[0].name)
        if heads is not None:
            node.outputs[0].shape = ir.Shape(["batch", heads, "seq", 8])
            node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    model, report = fused(old, prove=False)
    assert report.fused[0].spec.rotary == RotarySpec(order=AFTER)
    generator = np.random.default_rng(0)
    shapes = {"q_in": (3, 7, 48), "k_in": (3, 7, 16), "v_in": (3, 7, 16), "angles": (7, 4)}
    feeds = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    assert run(model, feeds)[0] == pytest.approx(run(old, feeds)[0], abs=1e-5)


@pytest.mark.parametrize("proper", [True, False])
def test_constant_matrices(proper):
    rotary = """
  {n}_shape = Shape({x})
  {n}_lead = Slice({n}_shape, zero1, minus1)
  {n}_pairs = Concat<axis=0>({n}_lead, half, one1, two1)
  {n}_p = Reshape({x}, {n}_pairs)
  {n}_m = Mul({n}_p, matrices)
  {n}_sum = ReduceSum<keepdims=0>({n}_m, last)
  {y} = Reshape({n}_sum, {n}_shape)
"""
    model = attention_model(Spelling(rotary=rotary, extra_inputs=", float[5,4,2,2] matrices"))
    angles = np.random.default_rng(1).random((5, 4)).astype(np.float32)
    rows = [[np.cos(angles), -np.sin(angles)], [np.sin(angles) if proper else -np.sin(angles), np.cos(angles)]]
    value = next(item for item in model.graph.inputs if item.name == "matrices")
    model.graph.inputs.remove(value)
    value.const_value = ir.tensor(np.stack([np.stack(row, -1) for row in rows], -2), name="matrices")
    model.graph.register_initializer(value)
    result, report = fused(model, prove=False)
    if not proper:
        assert not report.fused and report.declined
        return
    assert report.fused[0].spec.rotary == RotarySpec(order=AFTER, interleaved=True)
    generator = np.random.default_rng(0)
    shapes = {"q_in": (3, 5, 48), "k_in": (3, 5, 16), "v_in": (3, 5, 16), "angles": (5, 4)}
    feeds = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    assert run(result, feeds)[0] == pytest.approx(run(model, feeds)[0], abs=1e-5)


def test_only_q_is_rotated():
    model = attention_model(Spelling(rotary=NO_ROTARY, q_factor=HALVES))
    _, report = fused(model)
    (attention,) = report.fused
    assert attention.note == "" and not attention.spec.has_norm  # prepared apart: one node has one rotary for both
