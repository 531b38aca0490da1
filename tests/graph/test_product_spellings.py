"""The products of an attention: heads folded into the batch, and Einsum with its axes in any order."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from tests.graph.attention_text import NO_ROTARY, Spelling, attention_model, fused

MERGED = "  o_t = Transpose<perm=[0, 2, 1, 3]>(o)\n  y = Reshape(o_t, o_dims)\n"
HEADS_LAST = "  y = Reshape(o, o_dims)\n"


def check(spelling):
    model, report = fused(attention_model(spelling))
    assert not report.declined and not report.refused
    (attention,) = report.fused
    assert attention.note == ""
    assert not any(node.op_type in ("Softmax", "MatMul", "Einsum") for node in model.graph)
    return model, attention.spec


def einsum(result, equation, first, second):
    return f'  {result} = Einsum<equation="{equation}">({first}, {second})\n'


SCALED = "  logits = Mul(scores, scale)\n"
EINSUMS = {
    "heads second": (
        einsum("scores", "bhqd,bhkd->bhqk", "q_done", "k_all"),
        einsum("o", "bhqk,bhkd->bhqd", "p", "v_all") + MERGED,
    ),
    "keys transposed": (
        einsum("scores", "bhid,bhdj->bhij", "q_done", "k_last"),
        einsum("o", "bhij,bhjd->bihd", "p", "v_all") + HEADS_LAST,
    ),
    "keys first": (
        einsum("scores", "bhkd,bhqd->bhqk", "k_all", "q_done"),
        einsum("o", "bhkd,bhqk->bqhd", "v_all", "p") + HEADS_LAST,
    ),
    "spaces and capital letters": (
        einsum("scores", "B h i D, B h j D -> B h i j", "q_done", "k_all"),
        einsum("o", "z h i j, z h j e -> z i h e", "p", "v_all") + HEADS_LAST,
    ),
    "only the scores": (
        einsum("scores", "bhqd,bhkd->bhqk", "q_done", "k_all"),
        "  o = MatMul(p, v_all)\n" + MERGED,
    ),
    "only the values": (
        "  scores = MatMul(q_done, k_last)\n",
        einsum("o", "bhqk,bhkd->bqhd", "p", "v_all") + HEADS_LAST,
    ),
}


@pytest.mark.parametrize("name", EINSUMS)
def test_einsum(name):
    scores, weighed = EINSUMS[name]
    _, spec = check(Spelling(scores=scores + SCALED, weighed=weighed))
    assert (spec.attention.q_num_heads, spec.attention.kv_num_heads) == (6, 2)


def test_einsum_with_one_head_of_keys_for_all_queries():
    text = """<ir_version: 10, opset_import: ["" : 20]>
attention (float[batch,seq,48] q_in, float[batch,seq,8] k_in, float[batch,seq,8] v_in, float[8] w) => (float[batch,seq,48] y)
{
  shape = Constant<value = int64[4] {0, 0, 6, 8}>()
  flat = Constant<value = int64[3] {0, 0, 48}>()
  q = Reshape(q_in, shape)
  qn = LayerNormalization<axis=-1>(q, w)
  kn = LayerNormalization<axis=-1>(k_in, w)
  scores = Einsum<equation="bqhd,bkd->bhqk">(qn, kn)
  p = Softmax<axis=-1>(scores)
  o = Einsum<equation="bhqk,bkd->bqhd">(p, v_in)
  y = Reshape(o, flat)
}
"""
    _, report = fused(ir.from_onnx_text(text))
    (attention,) = report.fused
    assert attention.note == ""
    assert (attention.spec.attention.q_num_heads, attention.spec.attention.kv_num_heads) == (6, 1)


@pytest.mark.parametrize(
    "scores",
    [
        einsum("scores", "bhqd,bhkd->bhkq", "q_done", "k_all"),  # rows of keys
        einsum("scores", "bhqd,bhkd->bqhk", "q_done", "k_all"),  # a softmax over keys, but the mask would lie elsewhere
    ],
)
def test_einsum_with_its_result_in_another_order_is_left_or_proven(scores):
    model, report = fused(attention_model(Spelling(scores=scores + SCALED)))
    assert not report.fused
    assert report.declined or report.refused
    assert any(node.op_type == "Einsum" for node in model.graph)


def test_einsum_over_more_than_the_values_of_a_head_declines():
    scores = einsum("scores", "bhqd,bhkd->bqk", "q_done", "k_all") + "  s4 = Unsqueeze(scores, one1)\n  logits = Mul(s4, scale)\n"
    _, report = fused(attention_model(Spelling(scores=scores)))
    assert not report.fused and report.declined[0].hint


FOLD = """
  folded = Concat<axis=0>(minus1, seq1, size1)
  q3 = Reshape(q_done, folded)
  k3 = Reshape(k_all, folded)
  v3 = Reshape(v_all, folded)
  k3_last = Transpose<perm=[0, 2, 1]>(k3)
"""
UNFOLD = "  o3_dims = Concat<axis=0>(batch1, heads1, seq1, size1)\n  o = Reshape(o3, o3_dims)\n" + MERGED
FOLDED_SCORES = FOLD + "  scores = MatMul(q3, k3_last)\n" + SCALED
WEIGHED = "  o3 = MatMul(p, v3)\n" + UNFOLD
SPLIT = "  s4_dims = Concat<axis=0>(batch1, heads1, seq1, seq1)\n"
MERGE = "  s3_dims = Concat<axis=0>(minus1, seq1, seq1)\n"


def test_heads_folded_into_the_batch():
    _, spec = check(Spelling(scores=FOLDED_SCORES, weighed=WEIGHED))
    assert (spec.attention.q_num_heads, spec.attention.kv_num_heads) == (6, 2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_heads_folded_into_the_batch_in_half_precision(dtype):
    check(Spelling(scores=FOLDED_SCORES, weighed=WEIGHED, dtype=dtype, rotary=NO_ROTARY))


def test_mask_on_logits_that_are_unfolded_for_it():
    mask = SPLIT + MERGE + "  l4 = Reshape(logits, s4_dims)\n  b4 = Add(l4, bias_in)\n  masked = Reshape(b4, s3_dims)\n"
    model, _ = check(Spelling(scores=FOLDED_SCORES, weighed=WEIGHED, mask=mask, extra_inputs=", float[batch,1,seq,seq] bias_in"))
    node = next(node for node in model.graph if node.op_type == "QKNormAttention")
    assert node.inputs[10].name == "bias_in"


def masked_and_folded(shape, mask="  masked = Add(logits, bias_in)\n"):
    dims = ",".join(f"d{index}" if not isinstance(dim, int) else str(dim) for index, dim in enumerate(shape))
    spelling = Spelling(scores=FOLDED_SCORES, weighed=WEIGHED, mask=mask, extra_inputs=f", float[{dims}] bias_in")
    model = attention_model(spelling)
    next(value for value in model.graph.inputs if value.name == "bias_in").shape = ir.Shape(shape)
    result, report = fused(model)
    assert [item.note for item in report.fused] == [""]
    return next(node for node in result.graph if node.op_type == "QKNormAttention").inputs[10]


@pytest.mark.parametrize("shape", [["6*batch", "seq", "seq"], [1, "seq", "seq"], ["seq", "seq"]])
def test_mask_on_folded_logits(shape):
    assert (masked_and_folded(shape).name == "bias_in") == (len(shape) == 2 or shape[0] == 1)


def test_mask_that_is_folded_itself_is_read_from_before():
    fold = MERGE + "  b3 = Reshape(bias_in, s3_dims)\n  masked = Add(logits, b3)\n"
    assert masked_and_folded(["batch", 6, "seq", "seq"], fold).name == "bias_in"


def test_boolean_mask_on_folded_logits():
    mask = "  hidden = Less(bias_in, two)\n  big = Constant<value = float {{-3.0e38}}>()\n  masked = Where(hidden, big, logits)\n"
    assert masked_and_folded(["6*batch", "seq", "seq"], mask) is not None


def test_probabilities_that_are_folded_behind_the_softmax():
    scores = SPLIT + FOLD + "  s3 = MatMul(q3, k3_last)\n  scores = Reshape(s3, s4_dims)\n" + SCALED
    softmax = MERGE + "  p4 = Softmax<axis=-1>(masked)\n  p = Reshape(p4, s3_dims)\n"
    check(Spelling(scores=scores, weighed=WEIGHED, softmax=softmax))


def test_sequence_first_as_torch_multi_head_attention_writes_it():
    norm = "  {y} = LayerNormalization<axis=-1>({x}, w)\n"
    text = f"""<ir_version: 10, opset_import: ["" : 20]>
attention (float[seq,batch,48] q_in, float[seq,batch,48] k_in, float[seq,batch,48] v_in, float[8] w) => (float[seq,batch,48] y)
{{
  minus1 = Constant<value = int64[1] {{-1}}>()
  size1 = Constant<value = int64[1] {{8}}>()
  width1 = Constant<value = int64[1] {{48}}>()
  seq1 = Shape<start=0, end=1>(q_in)
  batch1 = Shape<start=1, end=2>(q_in)
  dims = Concat<axis=0>(seq1, minus1, size1)
  out_dims = Concat<axis=0>(seq1, batch1, width1)
  q3 = Reshape(q_in, dims)
  k3 = Reshape(k_in, dims)
  v3 = Reshape(v_in, dims)
  {norm.format(x="q3", y="qn")}
  {norm.format(x="k3", y="kn")}
  q = Transpose<perm=[1, 0, 2]>(qn)
  k = Transpose<perm=[1, 2, 0]>(kn)
  v = Transpose<perm=[1, 0, 2]>(v3)
  scores = MatMul(q, k)
  p = Softmax<axis=-1>(scores)
  o = MatMul(p, v)
  o_t = Transpose<perm=[1, 0, 2]>(o)
  y = Reshape(o_t, out_dims)
}}
"""
    _, report = fused(ir.from_onnx_text(text))
    (attention,) = report.fused
    assert attention.note == "" and attention.spec.attention.q_num_heads == 6


def test_factor_for_each_folded_head_declines():
    scores = FOLDED_SCORES.replace(SCALED, "  logits = Mul(scores, tau)\n")
    _, report = fused(attention_model(Spelling(scores=scores, weighed=WEIGHED, extra_inputs=", float[rows,1,1] tau")))
    assert not report.fused and "one axis" in report.declined[0].reason and report.declined[0].hint


def test_number_of_heads_that_nothing_says_declines():
    text = """<ir_version: 10, opset_import: ["" : 20]>
attention (float[rows,seq,8] q, float[rows,seq,8] k, float[rows,seq,8] v, float[8] w) => (float[rows,seq,8] y)
{
  qn = LayerNormalization<axis=-1>(q, w)
  kn = LayerNormalization<axis=-1>(k, w)
  kt = Transpose<perm=[0, 2, 1]>(kn)
  scores = MatMul(qn, kt)
  p = Softmax<axis=-1>(scores)
  y = MatMul(p, v)
}
"""
    _, report = fused(ir.from_onnx_text(text))
    assert not report.fused and "how many heads" in report.declined[0].reason and report.declined[0].hint
