"""Attention as ONNX text whose heads, preparations and repeats are given, for forms that differ in nothing else."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

RMS = """
  {n}_sq = Mul({x}, {x})
  {n}_mean = ReduceMean<keepdims=1>({n}_sq, last)
  {n}_eps = Add({n}_mean, eps)
  {n}_root = Sqrt({n}_eps)
  {n}_hat = Div({x}, {n}_root)
  {y} = Mul({n}_hat, {n}_gain)
"""
SAME = "  {y} = Identity({x})\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """One attention: what happens to q, k and v, and what that needs.

    Each spelling makes {y} of {x}; {n} is a prefix of its names. project: of q and k (B, S, H*D). prepare: of q and k
    (B, H, S, D). repeat: of k and v. product: of {q} (B, H, S, D) and {k} (B, H, D, T) -> scores. inputs: more graph inputs.
    weights: initializers by name.
    """

    heads: int = 4
    kv_heads: int = 4
    size: int = 16
    project: str = SAME
    prepare: str = RMS
    repeat: str = SAME
    product: str = "  scores = MatMul({q}, {k})\n"
    softmax: str = "  p = Softmax<axis=-1>(logits)\n"
    weighed: str = "  o = MatMul(p, {v})\n"
    inputs: str = ""
    weights: tuple[tuple[str, np.ndarray], ...] = ()
    opset: int = 20
    domains: tuple[str, ...] = ()
    dims: str = "batch,seq"


def form_model(form: Form) -> ir.Model:
    """q_in (B, S, H*D), k_in, v_in (B, S, K*D) -> y (B, S, H*D); gains of q and k are random."""
    q, kv, d = form.heads, form.kv_heads, form.size
    body = f"""
  last = Constant<value = int64[1] {{-1}}>()
  eps = Constant<value = float {{0.001}}>()
  scale = Constant<value = float {{0.31}}>()
  q_dims = Constant<value = int64[4] {{0, 0, {q}, {d}}}>()
  kv_dims = Constant<value = int64[4] {{0, 0, {kv}, {d}}}>()
  o_dims = Constant<value = int64[3] {{0, 0, {q * d}}}>()
"""
    for side, dims in (("q", "q_dims"), ("k", "kv_dims"), ("v", "kv_dims")):
        body += (SAME if side == "v" else form.project).format(x=f"{side}_in", y=f"{side}_ready", n=side)
        body += f"  {side}_split = Reshape({side}_ready, {dims})\n  {side}_t = Transpose<perm=[0, 2, 1, 3]>({side}_split)\n"
    body += form.prepare.format(x="q_t", y="q_p", n="q") + form.prepare.format(x="k_t", y="k_p", n="k")
    body += form.repeat.format(x="k_p", y="k_all", n="kr") + form.repeat.format(x="v_t", y="v_all", n="vr")
    body += "  k_last = Transpose<perm=[0, 1, 3, 2]>(k_all)\n" + form.product.format(q="q_p", k="k_last")
    body += "  logits = Mul(scores, scale)\n" + form.softmax + form.weighed.format(v="v_all")
    body += "  o_t = Transpose<perm=[0, 2, 1, 3]>(o)\n  y = Reshape(o_t, o_dims)\n"
    opsets = ", ".join([f'"" : {form.opset}', *(f'"{domain}" : 1' for domain in form.domains)])
    generator = np.random.default_rng(3)
    gains = {f"{side}_gain": 0.5 + generator.random(d) for side in "qk"}
    weights = {name: array.astype(np.float32) for name, array in {**gains, **dict(form.weights)}.items()}
    declared = "".join(f", float[{','.join(map(str, array.shape))}] {name}" for name, array in weights.items())
    at = form.dims
    text = f"""<ir_version: 10, opset_import: [{opsets}]>
attention (float[{at},{q * d}] q_in, float[{at},{kv * d}] k_in, float[{at},{kv * d}] v_in{form.inputs}{declared})
  => (float[{at},{q * d}] y)
{{{body}}}
"""
    model = ir.from_onnx_text(text)
    for value in [item for item in model.graph.inputs if item.name in weights]:
        model.graph.inputs.remove(value)
        if value.uses():
            value.const_value = ir.tensor(weights[value.name or ""], name=value.name)
            model.graph.register_initializer(value)
    return model
