"""Forms that are declined beside the same forms with what their hints name: each pair says what a hint is worth."""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np

from tests.graph.form_text import RMS, Form

NORMED: Final = RMS.replace("{y} =", "{n}_g =")
ROUNDED: Final = "  {n}_half = Cast<to=16>({n}_g)\n  {y} = Cast<to=1>({n}_half)\n"
ON_PROJECTIONS: Final = """
  q_s = Transpose<perm=[0, 2, 1, 3]>({q})
  q_3 = Reshape(q_s, o_dims)
  k_s = Transpose<perm=[0, 3, 1, 2]>({k})
  k_3 = Reshape(k_s, o_dims)
  scores = Identity(q_3)
"""
CALL: Final = """
  v_s = Transpose<perm=[0, 2, 1, 3]>({v})
  v_3 = Reshape(v_s, o_dims)
  OPERATOR
  o_4 = Reshape(o_3, q_dims)
  o = Transpose<perm=[0, 2, 1, 3]>(o_4)
"""
MICROSOFT: Final = "com.microsoft"


@dataclasses.dataclass(frozen=True)
class HintCase:
    """A form that is declined, a part of the hint, and the form with what the hint names done."""

    declined: Form
    hint: str
    mended: Form


def operator(text: str, *, inputs: str = "", domain: str = MICROSOFT, opset: int = 23) -> Form:
    """An attention operator that makes o_3 of q_3, k_3 and v_3 (B, S, H*D)."""
    return Form(
        product=ON_PROJECTIONS,
        softmax="",
        weighed=CALL.replace("OPERATOR", f"o_3 = {text}"),
        inputs=inputs,
        domains=(domain,) if domain else (),
        opset=opset,
    )


def multi_head(more: str = "", inputs: str = "") -> Form:
    return operator(f"com.microsoft.MultiHeadAttention<num_heads=4>(q_3, k_3, v_3{more})", inputs=inputs)


def group_query(more: str = "", *, attributes: str = "", inputs: str = "") -> Form:
    names = "num_heads=4, kv_num_heads=4" + attributes
    text = f"com.microsoft.GroupQueryAttention<{names}>(q_3, k_3, v_3, , , held_rows, total{more})"
    return operator(text, inputs=", int32[batch] held_rows, int32 total" + inputs)


def standard(more: str = "", *, heads: str = "q_num_heads=4, kv_num_heads=4", inputs: str = "") -> Form:
    return operator(f"Attention<{heads}>(q_3, k_3, v_3{more})", inputs=inputs, domain="", opset=24)


def with_lines(form: Form, call: str, lines: str) -> Form:
    """`form` with more lines around its operator's `call`."""
    return dataclasses.replace(form, weighed=CALL.replace("OPERATOR", lines.replace("CALLED", call)))


OF_LOGITS: Final = "o_1, , , held = CALLED\n  of_logits = ReduceMean<keepdims=0>(held)\n  o_3 = Add(o_1, of_logits)"
GROUPED_CALL: Final = (
    "com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=4, qk_output=1>(q_3, k_3, v_3, , , held_rows, total)"
)
PACKED: Final = """parts = Constant<value = int64[5] {{0, 0, 4, 1, 16}}>()
  q_5 = Reshape(q_3, parts)
  k_5 = Reshape(k_3, parts)
  v_5 = Reshape(v_3, parts)
  packed = Concat<axis=3>(q_5, k_5, v_5)
  o_3 = CALLED"""
MASK: Final = ", float[batch,1,seq,seq] mask"
EACH_KEY: Final = ", float[batch,1,1,seq] each"
CAP: Final = "  {y}_s = Div({x}, scale)\n  {y}_t = Tanh({y}_s)\n  {y} = Mul({y}_t, scale)\n"
SOFTMAX: Final = "  p = Softmax<axis=-1>(last_logits)\n"
PIECES: Final = """
  two = Constant<value = int64[1] {{2}}>()
  behind = Constant<value = int64[1] {{-2}}>()
  k_s = Transpose<perm=[0, 1, 3, 2]>({k})
  q_5 = Unsqueeze({q}, behind)
  k_5 = Unsqueeze(k_s, two)
  each_product = Mul(q_5, k_5)
  scores = ReduceSum<keepdims=0>(each_product, last)
"""
THREE: Final = """
  k_s = Transpose<perm=[0, 1, 3, 2]>({k})
  scores = Einsum<equation="bhqd,bhkd,d->bhqk">({q}, k_s, third)
"""
GATED: Final = NORMED + "  {n}_most = ReduceMax<keepdims=1>({n}_g, last)\n  {y} = Mul({n}_g, {n}_most)\n"
SHIFTED: Final = (
    NORMED
    + """
  {n}_a, {n}_b = Split<axis=-1, num_outputs=2>({n}_g)
  {n}_m = Neg({n}_b)
  {n}_turned = Concat<axis=-1>({n}_m, {n}_a)
  {n}_x = Mul({n}_g, cos)
  {n}_z = Mul({n}_turned, sin)
  {n}_sum = Add({n}_x, {n}_z)
  {y} = Add({n}_sum, shift)
"""
)
FIRST_SHIFTED: Final = SHIFTED.replace("{y} = Add({n}_sum, shift)", "{y} = Identity({n}_sum)").replace(
    "{n}_a, {n}_b = Split<axis=-1, num_outputs=2>({n}_g)",
    "{n}_h = Add({n}_g, shift)\n  {n}_a, {n}_b = Split<axis=-1, num_outputs=2>({n}_h)",
).replace("Mul({n}_g, cos)", "Mul({n}_h, cos)")  # fmt: skip
TABLES: Final = ", float[seq,16] cos, float[seq,16] sin"
SHIFT: Final = (("shift", np.linspace(-0.4, 0.6, 16)),)
SINK_INPUT: Final = ", float[1,4,1,1] sink"
SINK: Final = """
  one_each = Constant<value = int64[4] {2, 4, 5, 1}>()
  column = Expand(sink, one_each)
  joined = Concat<axis=-1>(logits, column)
"""


def cut(logits: str, columns: int) -> str:
    """A softmax, and as many of its last columns cut off."""
    return f"""
  p_all = Softmax<axis=-1>({logits})
  none = Constant<value = int64[1] {{0}}>()
  until = Constant<value = int64[1] {{-{columns}}}>()
  p = Slice(p_all, none, until, last)
"""


TURNED: Final = NORMED + "  {y} = com.microsoft.RotaryEmbeddingATTRIBUTES({n}_g, PLACES, cosines, sines)\n"
PLACES: Final = ", int64[batch,seq] places, int64[1] first"
ROWS: Final = (
    ("cosines", np.cos(np.linspace(0, 3, 160)).reshape(20, 8)),
    ("sines", np.sin(np.linspace(0, 3, 160)).reshape(20, 8)),
)


def rotated(attributes: str = "", places: str = "places") -> Form:
    """With onnxruntime's operator, which reads rows of tables at positions."""
    prepare = TURNED.replace("ATTRIBUTES", attributes).replace("PLACES", places)
    return Form(prepare=prepare, inputs=PLACES, weights=ROWS, domains=(MICROSOFT,))


GROUPS: Final = """
  {n}_apart = Constant<value = int64[5] {{0, 0, 0, 4, 4}}>()
  {n}_joined = Constant<value = int64[4] {{0, 0, -1, 16}}>()
  {n}_groups = Reshape({x}, {n}_apart)
""" + RMS.replace("{x}", "{n}_groups").replace("{y}", "{n}_normed").replace("{n}_gain", "part") + """
  {y} = Reshape({n}_normed, {n}_joined)
"""  # fmt: skip
DIVIDED: Final = """
  k_s = Transpose<perm=[0, 1, 3, 2]>({k})
  q_length = ReduceL2<keepdims=1>({q}, last)
  k_length = ReduceL2<keepdims=1>(k_s, last)
  k_length_t = Transpose<perm=[0, 1, 3, 2]>(k_length)
  lengths = Mul(q_length, k_length_t)
  products = MatMul({q}, {k})
  scores = Div(products, lengths)
"""
L2: Final = "  {n}_length = ReduceL2<keepdims=1>({x}, last)\n  {n}_least = Max({n}_length, eps)\n  {y} = Div({x}, {n}_least)\n"
OTHER_ORDER: Final = "  {n}_i = Constant<value = int64[4] {{0, 0, 1, 1}}>()\n  {y} = Gather<axis=1>({x}, {n}_i)\n"
OTHER_VALUES: Final = """
  other = Constant<value = int64[4] {{0, 2, 1, 3}}>()
  v_o = Gather<axis=1>({v}, other)
  o = MatMul(p, v_o)
"""
HINT_CASES: Final = {
    "scaled after the mask": HintCase(
        Form(softmax="  m = Add(logits, mask)\n  last_logits = Mul(m, eps)\n" + SOFTMAX, inputs=MASK),
        "scale first",
        Form(softmax="  m = Mul(logits, eps)\n  last_logits = Add(m, mask)\n" + SOFTMAX, inputs=MASK),
    ),
    "capped after the mask": HintCase(
        Form(softmax="  m = Add(logits, mask)\n" + CAP.format(x="m", y="last_logits") + SOFTMAX, inputs=MASK),
        "cap the logits before the mask is added",
        Form(softmax=CAP.format(x="logits", y="m") + "  last_logits = Add(m, mask)\n" + SOFTMAX, inputs=MASK),
    ),
    "a factor for each key": HintCase(
        Form(softmax="  last_logits = Mul(logits, each)\n" + SOFTMAX, inputs=EACH_KEY),
        "multiply the queries instead, after their norm",
        Form(product="  q_w = Mul({q}, each)\n  scores = MatMul(q_w, {k})\n", inputs=", float[batch,1,seq,1] each"),
    ),
    "probabilities used elsewhere": HintCase(
        Form(weighed="  all_p = ReduceMean<keepdims=1>(p, last)\n  o_p = MatMul(p, {v})\n  o = Add(o_p, all_p)\n"),
        "without returning the attention probabilities",
        Form(),
    ),
    "a gate": HintCase(Form(prepare=GATED), "a gate on queries or keys is not QK-Norm attention", Form()),
    "shifted behind the rotary embedding": HintCase(
        Form(prepare=SHIFTED, inputs=TABLES, weights=SHIFT),
        "add it before the rotary embedding",
        Form(prepare=FIRST_SHIFTED, inputs=TABLES, weights=SHIFT),
    ),
    "products of single values": HintCase(Form(product=PIECES), "write the scores as a matrix product", Form()),
    "an Einsum of three": HintCase(
        Form(product=THREE, inputs=", float[16] third"),
        "with a softmax over the last axis",
        Form(product="  q_w = Mul({q}, third)\n  scores = MatMul(q_w, {k})\n", inputs=", float[16] third"),
    ),
    "an operator that is not read": HintCase(
        operator("com.microsoft.DecoderMaskedMultiHeadAttention<num_heads=4>(q_3, k_3, v_3)"),
        "build the file with MultiHeadAttention",
        multi_head(),
    ),
    "an operator of a vendor": HintCase(
        operator("vendor.FlashAttention(q_3, k_3, v_3)", domain="vendor"), "export to ONNX's own operators", standard()
    ),
    "a padded cache": HintCase(
        standard(", , , , lengths", inputs=", int64[batch] lengths"),
        "hide the padding with a mask instead",
        standard(", mask", inputs=MASK),
    ),
    "logits are returned": HintCase(
        with_lines(standard(), "Attention<q_num_heads=4, kv_num_heads=4>(q_3, k_3, v_3)", OF_LOGITS),
        "without the output qk_matmul_output",
        standard(),
    ),
    "heads are not named": HintCase(standard(heads="is_causal=1"), "give q_num_heads and kv_num_heads", standard()),
    "a bias of projections": HintCase(
        multi_head(", bias", ", float[192] bias"),
        "add the bias in front of it, before the norms",
        dataclasses.replace(multi_head(), project="  {y} = Add({x}, ahead)\n", weights=(("ahead", np.linspace(-0.5, 1, 64)),)),
    ),
    "a mask of padded keys": HintCase(
        multi_head(", , padded", ", int32[batch,seq] padded"),
        "give the mask as its attention_bias",
        multi_head(", , , mask", MASK),
    ),
    "a past length": HintCase(
        multi_head(", , , , , , past", ", int32[1] past"), "build the file with a cache that grows", multi_head()
    ),
    "a cache of beams": HintCase(
        multi_head(", , , , , , , beams", ", int32[batch,1,seq] beams"), "without beam search inside", multi_head()
    ),
    "a bias of the logits": HintCase(
        group_query(", , , , mask", inputs=MASK), "write the bias as a mask of MultiHeadAttention", multi_head(", , , mask", MASK)
    ),
    "a quantised cache": HintCase(
        group_query(", , , , , , steps", inputs=", float[1] steps"), "a cache of the model's own type", group_query()
    ),
    "chunks padded on the right": HintCase(
        group_query(", , , , , , , , , , news", inputs=", int64[batch] news"), "without query_seqlens", group_query()
    ),
    "positions of its own": HintCase(
        group_query(", , , at", inputs=", int64[batch,seq] at"), "leave the position ids out", group_query()
    ),
    "a window that drops keys": HintCase(
        group_query(attributes=", sliding_window_cache=1, local_window_size=4"),
        "a cache for the whole sequence",
        group_query(attributes=", local_window_size=4"),
    ),
    "a smooth softmax": HintCase(
        group_query(attributes=", smooth_softmax=1"),
        "give it a head_sink of zeros",
        dataclasses.replace(group_query(", , , , , zeros"), weights=(("zeros", np.zeros(4)),)),
    ),
    "packed operands": HintCase(
        with_lines(multi_head(), "com.microsoft.MultiHeadAttention<num_heads=4>(packed)", PACKED),
        "as three inputs",
        multi_head(),
    ),
    "scaled after the sink": HintCase(
        Form(softmax=SINK + "  joined_2 = Mul(joined, scale)\n" + cut("joined_2", 1), inputs=SINK_INPUT, dims="2,5"),
        "append sinks last",
        Form(
            softmax=SINK.replace("(logits", "(scaled").replace("  one_each", "  scaled = Mul(logits, scale)\n  one_each", 1)
            + cut("joined", 1),
            inputs=SINK_INPUT,
            dims="2,5",
        ),
    ),
    "a sink that is not cut off": HintCase(
        Form(
            softmax=SINK + "  p = Softmax<axis=-1>(joined)\n",
            weighed="  o = MatMul(p, longer)\n",
            inputs=SINK_INPUT + ", float[2,4,6,16] longer",
            dims="2,5",
        ),
        "cut exactly that one off behind the softmax",
        Form(softmax=SINK + cut("joined", 1), inputs=SINK_INPUT, dims="2,5"),
    ),
    "logits of the operator": HintCase(
        with_lines(group_query(), GROUPED_CALL, OF_LOGITS), "without the output output_qk", group_query()
    ),
    "no lengths of rows": HintCase(
        operator("com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=4>(q_3, k_3, v_3)"),
        "give it seqlens_k and its total length",
        group_query(),
    ),
    "heads mixed by an Einsum": HintCase(
        Form(weighed='  o = Einsum<equation="bhqk,bgkd->bgqd">(p, {v})\n'), "operands of four axes", Form()
    ),
    "a rotary operator that scales": HintCase(rotated("<scale=2.0>"), "leave out scale and is_packed_batching", rotated()),
    "positions from an offset": HintCase(rotated(places="first"), "give it positions of two axes", rotated()),
    "normalised with the sum in front": HintCase(
        Form(
            prepare="  {y} = com.microsoft.SkipSimplifiedLayerNormalization<epsilon=0.001>({x}, {x}, {n}_gain)\n",
            domains=(MICROSOFT,),
        ),
        "without the fusion of skip connections",
        Form(prepare="  {n}_whole = Add({x}, {x})\n" + RMS.replace("{x}", "{n}_whole")),
    ),
    "logits divided by norms": HintCase(
        Form(prepare="  {y} = Identity({x})\n", product=DIVIDED),
        "normalise queries and keys before their product",
        Form(prepare=L2),
    ),
    "a rounding behind the norm": HintCase(
        Form(prepare=NORMED + ROUNDED),
        "leave the rounding out",
        Form(prepare=RMS),
    ),
    "a weight of groups that is an input": HintCase(
        Form(prepare=GROUPS, inputs=", float[4] part"),
        "make the weight of the norm an initializer",
        Form(prepare=GROUPS, weights=(("part", np.linspace(0.5, 1.5, 4)),)),
    ),
    "values repeated in another order": HintCase(
        Form(
            kv_heads=2,
            repeat=OTHER_ORDER,
            weighed=OTHER_VALUES,
        ),
        "repeat the heads of keys and values alike",
        Form(kv_heads=2, repeat=OTHER_ORDER),
    ),
}
