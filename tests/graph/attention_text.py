"""Small attention graphs as ONNX text, put together from spellings, so that each spelling is tested alone and in company."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from qknorm_onnx.graph.fusion_report import FusionReport
from qknorm_onnx.graph.passes.attach_bodies import AttachBodiesPass
from qknorm_onnx.graph.passes.fuse import FuseQKNormPass
from qknorm_onnx.graph.passes.prepare import PreparePass
from qknorm_onnx.proof.region_prover import RegionProver

HEADS, KV_HEADS, HEAD_SIZE = 6, 2, 8

# Norms of {x} (B, S, H, D) -> {y}; {w} is a weight (D), {n} a prefix that makes names unique.
RMS = """
  {n}_sq = Pow({x}, two)
  {n}_mean = ReduceMean<keepdims=1>({n}_sq, last)
  {n}_eps = Add({n}_mean, eps)
  {n}_root = Sqrt({n}_eps)
  {n}_inv = Reciprocal({n}_root)
  {n}_hat = Mul({x}, {n}_inv)
  {y} = Mul({n}_hat, {w})
"""

# Rotary of {x} (B, H, S, D) -> {y} with tables `cos` and `sin` (1, 1, S, D).
HALVES = """
  {n}_first = Slice({x}, zero1, half, minus1, one1)
  {n}_second = Slice({x}, half, end, minus1, one1)
  {n}_minus = Neg({n}_second)
  {n}_turned = Concat<axis=-1>({n}_minus, {n}_first)
  {n}_a = Mul({x}, cos)
  {n}_b = Mul({n}_turned, sin)
  {y} = Add({n}_a, {n}_b)
"""
NO_ROTARY = "{y} = Identity({x})\n"

REPEAT = """
  {n}_u = Unsqueeze({x}, two1)
  {n}_dims = Concat<axis=0>(batch1, kv1, group1, seq1, size1)
  {n}_e = Expand({n}_u, {n}_dims)
  {n}_shape = Concat<axis=0>(batch1, heads1, seq1, size1)
  {y} = Reshape({n}_e, {n}_shape)
"""

SCORES = """
  scores = MatMul({q}, {k})
  logits = Mul(scores, scale)
"""
WEIGHED = """
  o = MatMul(p, v_all)
  o_t = Transpose<perm=[0, 2, 1, 3]>(o)
  y = Reshape(o_t, o_dims)
"""
NO_MASK = "masked = Identity(logits)\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spelling:
    """One choice for each part of an attention."""

    q_norm: str = RMS
    k_norm: str = RMS
    rotary: str = HALVES
    q_factor: str = "{y} = Identity({x})\n"
    k_factor: str = "{y} = Identity({x})\n"
    repeat: str = REPEAT
    scores: str = SCORES
    mask: str = NO_MASK
    softmax: str = "p = Softmax<axis=-1>(masked)\n"
    weighed: str = WEIGHED
    before_split: str = "{y} = Identity({x})\n"
    extra_inputs: str = ""
    extra_outputs: str = ""
    tail: str = ""
    constants: str = ""
    opset: int = 20
    dtype: str = "float"
    rotary_first: bool = False


# The parser reads decimal numbers of type float only: others are cast.
TYPE_CODES = {"float": 1, "float16": 10, "bfloat16": 16, "double": 11}
CONSTANTS = """
  two_f = Constant<value = float {{2.0}}>()
  two = Cast<to={K}>(two_f)
  eps_f = Constant<value = float {{0.001}}>()
  eps = Cast<to={K}>(eps_f)
  tiny_f = Constant<value = float {{0.00001}}>()
  tiny = Cast<to={K}>(tiny_f)
  root_size_f = Constant<value = float {{2.8284271247}}>()
  root_size = Cast<to={K}>(root_size_f)
  scale_f = Constant<value = float {{0.3535533845424652}}>()
  scale = Cast<to={K}>(scale_f)
  last = Constant<value = int64[1] {{-1}}>()
  minus1 = Constant<value = int64[1] {{-1}}>()
  zero1 = Constant<value = int64[1] {{0}}>()
  one1 = Constant<value = int64[1] {{1}}>()
  two1 = Constant<value = int64[1] {{2}}>()
  half = Constant<value = int64[1] {{4}}>()
  end = Constant<value = int64[1] {{9223372036854775807}}>()
  heads1 = Constant<value = int64[1] {{6}}>()
  kv1 = Constant<value = int64[1] {{2}}>()
  group1 = Constant<value = int64[1] {{3}}>()
  size1 = Constant<value = int64[1] {{8}}>()
  batch1 = Shape<start=0, end=1>(q_in)
  seq1 = Shape<start=1, end=2>(q_in)
"""


TABLES = """
  angles2 = Concat<axis=-1>(angles, angles)
  cos = Cos(angles2)
  sin = Sin(angles2)
"""


def attention_model(spelling: Spelling) -> ir.Model:
    """A model q_in (B, S, 48), k_in, v_in (B, S, 16), angles (S, 4) -> y (B, S, 48)."""
    t = spelling.dtype
    body = CONSTANTS.format(K=TYPE_CODES[t]) + spelling.constants
    body += TABLES
    for side, heads in (("q", "heads1"), ("k", "kv1"), ("v", "kv1")):
        body += spelling.before_split.format(x=f"{side}_in", y=f"{side}_ready", n=f"{side}_pre", w=f"{side}_hidden_weight")
        body += f"  {side}_dims = Concat<axis=0>(batch1, seq1, {heads}, size1)\n"
        body += f"  {side}_split = Reshape({side}_ready, {side}_dims)\n"
    for side, norm, factor in (("q", spelling.q_norm, spelling.q_factor), ("k", spelling.k_norm, spelling.k_factor)):
        body += _prepared(side, norm, spelling.rotary, rotary_first=spelling.rotary_first)
        body += factor.format(x=f"{side}_rot", y=f"{side}_done", n=f"{side}_f", w=f"{side}_factor")
    body += spelling.repeat.format(x="k_done", y="k_all", n="kr")
    body += "  v_t = Transpose<perm=[0, 2, 1, 3]>(v_split)\n"
    body += spelling.repeat.format(x="v_t", y="v_all", n="vr")
    body += "  k_last = Transpose<perm=[0, 1, 3, 2]>(k_all)\n"
    body += spelling.scores.format(q="q_done", k="k_last", n="s")
    body += spelling.mask.format(x="logits", y="masked", n="m")
    body += spelling.softmax
    body += "  o_dims = Concat<axis=0>(batch1, seq1, minus1)\n" + spelling.weighed
    body += spelling.tail
    inputs = f"{t}[batch,seq,48] q_in, {t}[batch,seq,16] k_in, {t}[batch,seq,16] v_in, {t}[seq,4] angles"
    inputs += spelling.extra_inputs
    text = f"""<ir_version: 10, opset_import: ["" : {spelling.opset}]>
attention ({inputs}) => ({t}[batch,seq,48] y{spelling.extra_outputs})
<{t}[8] q_weight, {t}[8] k_weight, {t}[6,8] q_head_weight, {t}[2,8] k_head_weight, {t}[8] q_bias, {t}[8] k_bias,
 {t}[48] q_hidden_weight, {t}[16] k_hidden_weight, {t}[16] v_hidden_weight, {t}[6,1,1] q_factor, {t}[2,1,1] k_factor,
 {t}[8] ones, {t}[8] zeros, {t}[6,6,6] unused, {t}[1,6,1,1] sinks>
{{
{body}
}}
"""
    return with_weights(text)


def _prepared(side: str, norm: str, rotary: str, *, rotary_first: bool) -> str:
    transpose = "  {y} = Transpose<perm=[0, 2, 1, 3]>({x})\n"
    names = {"n": side, "w": f"{side}_weight"}
    if rotary_first:
        return (
            transpose.format(x=f"{side}_split", y=f"{side}_t")
            + rotary.format(x=f"{side}_t", y=f"{side}_turned", n=f"{side}_r")
            + norm.format(x=f"{side}_turned", y=f"{side}_rot", **names)
        )
    return (
        norm.format(x=f"{side}_split", y=f"{side}_normed", **names)
        + transpose.format(x=f"{side}_normed", y=f"{side}_t")
        + rotary.format(x=f"{side}_t", y=f"{side}_rot", n=f"{side}_r")
    )


def with_weights(text: str) -> ir.Model:
    """A model of ONNX text; random values for initializers that it only declares, unused ones dropped."""
    model = ir.from_onnx_text(declared_as_inputs(text))
    generator = np.random.default_rng(7)
    graph = model.graph
    for value in [item for item in graph.inputs if item.name in INITIALIZERS]:
        graph.inputs.remove(value)
        if not value.uses():
            continue
        array = 0.5 + generator.random(tuple(int(dim) for dim in value.shape or ()))
        array = {"ones": np.ones_like(array), "zeros": np.zeros_like(array)}.get(value.name or "", array)
        assert value.dtype is not None
        value.const_value = ir.tensor(array.astype(value.dtype.numpy()), name=value.name)
        graph.register_initializer(value)
    return model


INITIALIZERS = frozenset(
    [f"{side}_{kind}" for side in "qkv" for kind in ("weight", "head_weight", "bias", "hidden_weight", "factor")]
    + ["ones", "zeros", "unused", "sinks"]
)


def declared_as_inputs(text: str) -> str:
    """The parser wants values for initializers: they are declared as inputs first."""
    head, rest = text.split(") => (", 1)
    outputs, rest = rest.split("\n<", 1)
    declared, body = rest.split(">\n{", 1)
    return f"{head}, {declared.strip()}) => ({outputs}\n{{{body}"


def fused(model: ir.Model, *, prove: bool = True, buffers_grow: bool = True) -> tuple[ir.Model, FusionReport]:
    """`model` after the passes, with each rewrite proven."""
    copy = model.clone()
    PreparePass()(copy)
    fuse = FuseQKNormPass(RegionProver() if prove else None, buffers_grow=buffers_grow)
    fuse(copy)
    return copy, fuse.report


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs of onnxruntime, with the bodies of canonical nodes attached."""
    import onnxruntime as ort

    copy = model.clone()
    AttachBodiesPass()(copy)
    proto = ir.to_proto(copy).SerializeToString()
    return ort.InferenceSession(proto, providers=["CPUExecutionProvider"]).run(None, feeds)
