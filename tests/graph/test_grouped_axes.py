"""Grouped-query attention with heads as two axes, K heads of keys and G query heads for each, that are never made one."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import qknorm_onnx as qk
from tests.graph.attention_text import RMS, Spelling, attention_model, fused, run

SAME = "{y} = Identity({x})\n"
LAYER = "  {y} = LayerNormalization<axis=-1, epsilon=0.001>({x}, {w})\n"
SPLIT = """
  group_dims = Concat<axis=0>(batch1, kv1, group1, seq1, size1)
  q5 = Reshape({q}, group_dims)
"""
KEYS = "  k5 = Unsqueeze(k_all, two1)\n  k5t = Transpose<perm=[0, 1, 2, 4, 3]>(k5)\n  v5 = Unsqueeze(v_all, two1)\n"
SCALED = "  logits = Mul(scores, scale)\n"
MERGED = "  o_t = Transpose<perm=[0, 3, 1, 2, 4]>(o)\n  y = Reshape(o_t, o_dims)\n"
HEADS_LAST = "  y = Reshape(o, o_dims)\n"
PRODUCTS = SPLIT + KEYS + "  scores = MatMul(q5, k5t)\n" + SCALED
WEIGHED = "  o = MatMul(p, v5)\n" + MERGED


def einsum(result, equation, first, second):
    return f'  {result} = Einsum<equation="{equation}">({first}, {second})\n'


EXPANDED = """
  k5 = Unsqueeze(k_all, two1)
  k5e = Expand(k5, group_dims)
  k5t = Transpose<perm=[0, 1, 2, 4, 3]>(k5e)
  v5 = Unsqueeze(v_all, two1)
  v5e = Expand(v5, group_dims)
"""
ROWS = """
  row_dims = Concat<axis=0>(batch1, kv1, minus1, size1)
  q_rows = Reshape({q}, row_dims)
"""
LOGITS = "  l_dims = Concat<axis=0>(batch1, kv1, group1, seq1, minus1)\n"
P_ROWS = "  p_dims = Concat<axis=0>(batch1, kv1, minus1, seq1)\n  p_rows = Reshape(p, p_dims)\n"
OUT_OF_ROWS = "  o_rows = MatMul(p_rows, v_all)\n  o = Reshape(o_rows, group_dims)\n"
FORMS = {
    "matrix products": (PRODUCTS, WEIGHED),
    "einsum": (
        SPLIT + einsum("scores", "bkgqd,bksd->bkgqs", "q5", "k_all") + SCALED,
        einsum("o", "bkgqs,bksd->bkgqd", "p", "v_all") + MERGED,
    ),
    "keys first": (
        SPLIT + einsum("scores", "nHud,nHgtd->nHgtu", "k_all", "q5") + SCALED,
        einsum("o", "nHud,nHgtu->ntHgd", "v_all", "p") + HEADS_LAST,
    ),
    "heads last": (
        SPLIT
        + "  q_last = Transpose<perm=[0, 3, 1, 2, 4]>(q5)\n  k_heads = Transpose<perm=[0, 2, 1, 3]>(k_all)\n"
        + "  v_heads = Transpose<perm=[0, 2, 1, 3]>(v_all)\n"
        + einsum("scores", "bskgd,btkd->bkgst", "q_last", "k_heads")
        + SCALED,
        einsum("o", "bkgst,btkd->bskgd", "p", "v_heads") + HEADS_LAST,
    ),
    "groups in front": (
        SPLIT + "  q_g = Transpose<perm=[0, 2, 1, 3, 4]>(q5)\n" + einsum("scores", "bghnd,bhsd->bghns", "q_g", "k_all") + SCALED,
        einsum("o", "bghns,bhsd->bnhgd", "p", "v_all") + HEADS_LAST,
    ),
    "expanded": (
        SPLIT + EXPANDED + "  scores = MatMul(q5, k5t)\n" + SCALED,
        "  o = MatMul(p, v5e)\n" + MERGED,
    ),
    "one of each": (
        SPLIT + KEYS + "  scores = MatMul(q5, k5t)\n" + SCALED,
        einsum("o", "bkgqs,bksd->bqkgd", "p", "v_all") + HEADS_LAST,
    ),
    "query heads as rows": (
        SPLIT + ROWS + LOGITS + "  s_rows = MatMul(q_rows, k_last)\n  scores = Reshape(s_rows, l_dims)\n" + SCALED,
        P_ROWS + OUT_OF_ROWS + MERGED,
    ),
    "query heads as rows, no mask": (
        SPLIT + ROWS + "  scores = MatMul(q_rows, k_last)\n" + SCALED,
        "  o_rows = MatMul(p, v_all)\n  o = Reshape(o_rows, group_dims)\n" + MERGED,
    ),
    "logits made four axes": (
        PRODUCTS.replace(SCALED, "") + "  l4 = Concat<axis=0>(batch1, heads1, seq1, minus1)\n  s4 = Reshape(scores, l4)\n"
        "  logits = Mul(s4, scale)\n",
        LOGITS + "  p5 = Reshape(p, l_dims)\n  o = MatMul(p5, v5)\n" + MERGED,
    ),
}


def spelling(form, **changes):
    scores, weighed = FORMS[form]
    scores = scores.replace("{q}", "q_done")
    return Spelling(scores=scores.replace("{", "{{").replace("}", "}}"), weighed=weighed, repeat=SAME, **changes)


def feeds_of(model, batch, length, random):
    sizes = {"batch": batch, "seq": length}
    feeds = {}
    for value in model.graph.inputs:
        shape = [dim if isinstance(dim, int) else sizes[dim.value] for dim in value.shape]
        if value.dtype == ir.DataType.BOOL:
            mask = random.random(shape) < 0.6
            mask[..., 0] = True
            feeds[value.name] = mask
        else:
            feeds[value.name] = random.standard_normal(shape).astype(value.dtype.numpy())
    return feeds


def check(source, *, heads=(6, 2)):
    """Fused, proven, and equal in numbers for other batches and lengths; returns the model and the spec."""
    model, report = fused(source)
    assert not report.declined and not report.refused
    (attention,) = report.fused
    assert attention.note == ""
    assert not any(node.op_type in ("Softmax", "MatMul", "Einsum") for node in model.graph)
    assert (attention.spec.attention.q_num_heads, attention.spec.attention.kv_num_heads) == heads
    random = np.random.default_rng(3)
    for batch, length in ((1, 7), (3, 4), (2, 1)):
        feeds = feeds_of(source, batch, length, random)
        (old,), (new,) = run(source, feeds), run(model, feeds)
        assert old.shape == new.shape
        if old.dtype == np.float32:
            np.testing.assert_allclose(new, old, rtol=0, atol=2e-6 * np.abs(old).max())
    return model, attention.spec


@pytest.mark.parametrize("form", FORMS)
def test_form(form):
    _, spec = check(attention_model(spelling(form)))
    assert spec.norm.q_kind == "rms" and spec.rotary.order == "after_norm"


@pytest.mark.parametrize("form", ["matrix products", "heads last", "query heads as rows"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(form, dtype):
    model, report = fused(attention_model(spelling(form, dtype=dtype, rotary=SAME)))
    assert [item.note for item in report.fused] == [""] and not any(node.op_type == "Softmax" for node in model.graph)


CAUSAL = """
  one_s = Constant<value = int64 {{1}}>()
  zero_s = Constant<value = int64 {{0}}>()
  axis0 = Constant<value = int64[1] {{0}}>()
  seq_s = Squeeze(seq1, axis0)
  positions = Range(zero_s, seq_s, one_s)
  rows = Unsqueeze(positions, one1)
  later = Greater(positions, rows)
  low = Constant<value = float {{-inf}}>()
  masked = Where(later, low, logits)
""".replace("{{-inf}}", "{{-3.4028234663852886e38}}")
FIVE = "  five = Constant<value = int64[2] {{1, 2}}>()\n"
MASKS = {
    "causal": (CAUSAL, "", True),
    "added, for all heads": ("  b5 = Unsqueeze(bias_in, one1)\n  masked = Add(logits, b5)\n", "[batch,1,seq,seq]", False),
    "added, rows and columns": ("  masked = Add(logits, bias_in)\n", "[seq,seq]", False),
    "added, no batch": ("  masked = Add(logits, bias_in)\n", "[1,seq,seq]", False),
    "added, five axes": ("  masked = Add(bias_in, logits)\n", "[batch,1,1,seq,seq]", False),
    "added, one row": ("  masked = Add(logits, bias_in)\n", "[batch,1,1,1,seq]", False),
    "added, each head": ("  masked = Add(logits, bias_in)\n", "[2,3,seq,seq]", False),
    "added, each head of keys": ("  masked = Add(logits, bias_in)\n", "[batch,2,1,seq,seq]", False),
    "added, each head of a group": ("  masked = Add(logits, bias_in)\n", "[3,1,seq]", False),
    "boolean, five axes": (
        "  low = Constant<value = float {{-3.0e38}}>()\n  masked = Where(hidden_in, low, logits)\n",
        "[batch,1,1,1,seq]",
        False,
    ),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("form", ["matrix products", "query heads as rows"])
def test_mask(name, form):
    mask, shape, is_causal = MASKS[name]
    kind = "bool" if "hidden_in" in mask else "float"
    extra = f", {kind}{shape} {'hidden_in' if kind == 'bool' else 'bias_in'}" if shape else ""
    _, spec = check(attention_model(spelling(form, mask=mask, extra_inputs=extra)))
    assert spec.attention.is_causal == is_causal


def test_masks_on_logits_with_the_groups_in_front():
    mask = "  masked = Add(logits, bias_in)\n"
    check(attention_model(spelling("groups in front", mask=mask, extra_inputs=", float[batch,3,2,seq,seq] bias_in")))
    check(attention_model(spelling("groups in front", mask=mask, extra_inputs=", float[3,1,seq,1] bias_in")))


@pytest.mark.parametrize("norm", [RMS, LAYER])
def test_queries_normalised_while_their_heads_are_two_axes(norm):
    scores, weighed = FORMS["matrix products"]
    own = "  q_five = Reshape(q_t, group_dims)\n" + norm.format(x="q_five", y="q5", n="q5n", w="q_weight")
    scores = scores.replace("  q5 = Reshape({q}, group_dims)\n", own)
    identity = Spelling(q_norm=SAME, rotary=SAME, scores=scores, weighed=weighed, repeat=SAME)
    _, spec = check(attention_model(identity))
    assert spec.norm.q_kind in ("rms", "layer")


def test_factor_of_all_logits_and_soft_cap():
    cap = "  c = Div(logits, twenty)\n  t = Tanh(c)\n  masked = Mul(t, twenty)\n"
    constants = "  twenty = Constant<value = float {20.0}>()\n"
    _, spec = check(attention_model(spelling("einsum", mask=cap, constants=constants)))
    assert spec.attention.softcap == 20.0


def multi_query(kv):
    text = f"""<ir_version: 10, opset_import: ["" : 20]>
attention (float[batch,seq,48] q_in, float[batch,seq,{8 * kv}] k_in, float[batch,seq,{8 * kv}] v_in, float[8] w)
  => (float[batch,seq,48] y)
{{
  q_shape = Constant<value = int64[5] {{0, 0, {kv}, {6 // kv}, 8}}>()
  k_shape = Constant<value = int64[5] {{0, 0, {kv}, 1, 8}}>()
  flat = Constant<value = int64[3] {{0, 0, 48}}>()
  q = Reshape(q_in, q_shape)
  k = Reshape(k_in, k_shape)
  v = Reshape(v_in, k_shape)
  qn = LayerNormalization<axis=-1>(q, w)
  kn = LayerNormalization<axis=-1>(k, w)
  qt = Transpose<perm=[0, 2, 3, 1, 4]>(qn)
  kt = Transpose<perm=[0, 2, 3, 4, 1]>(kn)
  vt = Transpose<perm=[0, 2, 3, 1, 4]>(v)
  scores = MatMul(qt, kt)
  p = Softmax<axis=-1>(scores)
  o = MatMul(p, vt)
  ot = Transpose<perm=[0, 3, 1, 2, 4]>(o)
  y = Reshape(ot, flat)
}}
"""
    return ir.from_onnx_text(text)


@pytest.mark.parametrize("kv", [1, 2, 3, 6])
def test_other_ratios(kv):
    check(multi_query(kv), heads=(6, kv))


def test_one_head_of_keys_broadcast_along_four_axes():
    text = """<ir_version: 10, opset_import: ["" : 20]>
attention (float[batch,seq,48] q_in, float[batch,seq,8] k_in, float[batch,seq,8] v_in, float[8] w) => (float[batch,seq,48] y)
{
  q_shape = Constant<value = int64[4] {0, 0, 6, 8}>()
  flat = Constant<value = int64[3] {0, 0, 48}>()
  axis = Constant<value = int64[1] {1}>()
  q = Reshape(q_in, q_shape)
  qn = LayerNormalization<axis=-1>(q, w)
  kn = LayerNormalization<axis=-1>(k_in, w)
  qt = Transpose<perm=[0, 2, 1, 3]>(qn)
  k4 = Unsqueeze(kn, axis)
  kt = Transpose<perm=[0, 1, 3, 2]>(k4)
  v4 = Unsqueeze(v_in, axis)
  scores = MatMul(qt, kt)
  p = Softmax<axis=-1>(scores)
  o = MatMul(p, v4)
  ot = Transpose<perm=[0, 2, 1, 3]>(o)
  y = Reshape(ot, flat)
}
"""
    check(ir.from_onnx_text(text), heads=(6, 1))


# Look-alikes


TILED = SPLIT.replace("kv1, group1", "group1, kv1") + "  q5t = Transpose<perm=[0, 2, 1, 3, 4]>(q5)\n"


def declines(source, *words):
    model, report = fused(source)
    assert not report.fused and not report.refused and not report.plain
    (miss,) = report.declined
    assert miss.hint and miss.node and all(word in miss.reason for word in words), miss
    assert any(node.op_type == "Softmax" for node in model.graph)


def tiled(**changes):
    scores = TILED.format(q="q_done") + KEYS + "  scores = MatMul(q5t, k5t)\n" + SCALED
    weighed = "  o = MatMul(p, v5)\n  o_t = Transpose<perm=[0, 3, 2, 1, 4]>(o)\n  y = Reshape(o_t, o_dims)\n"
    return attention_model(Spelling(scores=scores, weighed=weighed, repeat=SAME, **changes))


def test_query_heads_that_read_key_heads_in_turn_decline():
    declines(tiled(), "modulo")


def test_without_norms_they_are_plain():
    for source in (tiled(q_norm=SAME, k_norm=SAME), attention_model(spelling("einsum", q_norm=SAME, k_norm=SAME))):
        _, report = fused(source)
        assert not report.fused and not report.declined and len(report.plain) == 1


def test_output_whose_heads_are_put_back_in_the_other_order_is_refused_or_its_own():
    """The attention itself is grouped-query attention; what happens to its output is kept."""
    scores, _ = FORMS["matrix products"]
    weighed = "  o = MatMul(p, v5)\n  o_t = Transpose<perm=[0, 3, 2, 1, 4]>(o)\n  y = Reshape(o_t, o_dims)\n"
    check(attention_model(Spelling(scores=scores.replace("{q}", "q_done"), weighed=weighed, repeat=SAME)))


def test_norm_over_the_values_of_a_group_declines():
    scores, weighed = FORMS["matrix products"]
    own = """
  q_five = Reshape(q_t, group_dims)
  q_sl = Transpose<perm=[0, 1, 3, 2, 4]>(q_five)
  q_sq = Mul(q_sl, q_sl)
  axes34 = Constant<value = int64[2] {{3, 4}}>()
  q_mean = ReduceMean<keepdims=1>(q_sq, axes34)
  q_eps = Add(q_mean, eps)
  q_root = Sqrt(q_eps)
  q_hat = Div(q_sl, q_root)
  q5 = Transpose<perm=[0, 1, 3, 2, 4]>(q_hat)
"""
    scores = scores.replace("  q5 = Reshape({q}, group_dims)\n", own)
    source = attention_model(Spelling(q_norm=SAME, rotary=SAME, scores=scores, weighed=weighed, repeat=SAME))
    declines(source, "their query heads")


def test_weight_for_each_head_while_heads_are_two_axes_declines():
    scores, weighed = FORMS["matrix products"]
    own = "  q_five = Reshape(q_t, group_dims)\n" + RMS.format(x="q_five", y="q5", n="q5n", w="group_weight")
    scores = scores.replace("  q5 = Reshape({q}, group_dims)\n", own)
    extra = ", float[2,3,1,8] group_weight"
    source = attention_model(Spelling(q_norm=SAME, rotary=SAME, scores=scores, weighed=weighed, repeat=SAME, extra_inputs=extra))
    declines(source, "two axes")


def test_softmax_over_the_queries_declines():
    scores, weighed = FORMS["einsum"]
    scores = scores.replace("{q}", "q_done").replace(SCALED, "  flipped = Transpose<perm=[0, 1, 2, 4, 3]>(scores)\n")
    scores += "  logits = Mul(flipped, scale)\n"
    _, report = fused(attention_model(Spelling(scores=scores, weighed=weighed, repeat=SAME)))
    assert not report.fused and report.declined and report.declined[0].hint


def windows():
    """(B, windows, heads, S, D): independent windows, which are no heads; rows of the batch in truth."""
    return ir.from_onnx_text("""<ir_version: 10, opset_import: ["" : 20]>
attention (float[batch,4,seq,48] q_in, float[batch,4,seq,48] k_in, float[batch,4,seq,48] v_in, float[8] w)
  => (float[batch,4,seq,48] y)
{
  shape = Constant<value = int64[5] {0, 0, 0, 6, 8}>()
  flat = Constant<value = int64[4] {0, 0, 0, 48}>()
  q = Reshape(q_in, shape)
  k = Reshape(k_in, shape)
  v = Reshape(v_in, shape)
  qn = LayerNormalization<axis=-1>(q, w)
  kn = LayerNormalization<axis=-1>(k, w)
  qt = Transpose<perm=[0, 1, 3, 2, 4]>(qn)
  kt = Transpose<perm=[0, 1, 3, 4, 2]>(kn)
  vt = Transpose<perm=[0, 1, 3, 2, 4]>(v)
  scores = MatMul(qt, kt)
  p = Softmax<axis=-1>(scores)
  o = MatMul(p, vt)
  ot = Transpose<perm=[0, 1, 3, 2, 4]>(o)
  y = Reshape(ot, flat)
}
""")


def test_windows_as_an_axis_of_their_own_are_no_heads():
    declines(windows(), "apart")


torch = pytest.importorskip("torch")


class Ported(torch.nn.Module):
    """As ports of JAX code write it: (B, S, K, G, D) throughout, einsum, a mask of five axes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.q, self.k, self.v = torch.nn.Linear(32, 64), torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
        self.q_norm, self.k_norm = torch.nn.RMSNorm(8, eps=1e-6), torch.nn.RMSNorm(8, eps=1e-6)
        for norm in (self.q_norm, self.k_norm):
            torch.nn.init.uniform_(norm.weight, 0.5, 1.5)

    def forward(self, x, seen):
        q, k, v = (layer(x).unflatten(-1, (-1, 8)) for layer in (self.q, self.k, self.v))
        q, k = self.q_norm(q), self.k_norm(k)
        q = q.unflatten(2, (4, 2)) * 8**-0.5
        logits = torch.einsum("btkgh,bskh->bkgts", q, k)
        logits = torch.where(seen[:, None, None], logits, torch.finfo(logits.dtype).min)
        return torch.einsum("bkgts,bskh->btkgh", logits.softmax(-1), v).flatten(2)


def test_port_of_jax_code():
    module = Ported().eval()
    seen = torch.ones(2, 5, 5, dtype=torch.bool).tril()
    shapes = {"x": {0: "batch", 1: "seq"}, "seen": {0: "batch", 1: "seq", 2: "seq"}}
    program = qk.export(module, (torch.randn(2, 5, 32), seen), dynamic_shapes=shapes)
    (attention,) = program.report.fused
    assert attention.note == "" and attention.spec.attention.q_num_heads == 8 and attention.spec.attention.kv_num_heads == 4
    session = qk.create_session(program)
    for batch, length in ((1, 9), (3, 4)):
        x, seen = torch.randn(batch, length, 32), torch.rand(batch, length, length) < 0.5
        seen[..., 0] = True
        (y,) = session.run(None, {"x": x.numpy(), "seen": seen.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(y), module(x, seen), rtol=0, atol=2e-6)
