"""Attention behind operators that no reader knows ends in the report all the same, with the operator's name."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir
import pytest

from qknorm_onnx.errors import FusionRequiredError
from qknorm_onnx.pipeline import require_complete
from tests.graph.attention_text import fused
from tests.graph.form_text import RMS, SAME, Form, form_model

INTEGERS = """
  q_8, q_scale, q_zero = DynamicQuantizeLinear({q})
  k_8, k_scale, k_zero = DynamicQuantizeLinear({k})
  whole = MatMulInteger(q_8, k_8, q_zero, k_zero)
  real = Cast<to=1>(whole)
  both_scales = Mul(q_scale, k_scale)
  scores = Mul(real, both_scales)
"""
STEPS = "  step = Constant<value = float {{0.05}}>()\n  zero = Constant<value = uint8 {{128}}>()\n"
LINEAR = (
    STEPS
    + """
  q_8 = QuantizeLinear({q}, step, zero)
  k_8 = QuantizeLinear({k}, step, zero)
  s_8 = QLinearMatMul(q_8, step, zero, k_8, step, zero, step, zero)
  scores = DequantizeLinear(s_8, step, zero)
"""
)
BESIDE = (
    STEPS
    + """
  q_8 = QuantizeLinear({q}, step, zero)
  q_again = DequantizeLinear(q_8, step, zero)
  scores = MatMul(q_again, {k})
"""
)
DYNAMIC = """
  k_8, k_scale, k_zero = DynamicQuantizeLinear({k})
  scores = com.microsoft.DynamicQuantizeMatMul({q}, k_8, k_scale, k_zero)
"""
WEIGHED = """
  p_8, p_scale, p_zero = DynamicQuantizeLinear(p)
  v_8, v_scale, v_zero = DynamicQuantizeLinear({v})
  whole_o = MatMulInteger(p_8, v_8, p_zero, v_zero)
  real_o = Cast<to=1>(whole_o)
  o_scale = Mul(p_scale, v_scale)
  o = Mul(real_o, o_scale)
"""


def report_of(form: Form):
    return fused(form_model(form), prove=False)[1]


@pytest.mark.parametrize(
    ("product", "name"),
    [(INTEGERS, "MatMulInteger"), (LINEAR, "QLinearMatMul"), (BESIDE, "DequantizeLinear"), (DYNAMIC, "DynamicQuantizeMatMul")],
)
def test_quantised_scores(product, name):
    report = report_of(Form(product=product, domains=("com.microsoft",)))
    (miss,) = report.declined
    assert name in miss.reason and miss.hint and not report.fused and not report.plain
    unlike = report_of(Form(product=product, prepare=SAME, domains=("com.microsoft",)))
    assert len(unlike.plain) == 1 and not unlike.declined and not unlike.fused


def test_quantised_products_with_values():
    (miss,) = report_of(Form(weighed=WEIGHED)).declined
    assert "product with the values" in miss.reason and "MatMulInteger" in miss.reason
    assert len(report_of(Form(weighed=WEIGHED, prepare=SAME)).plain) == 1


def test_what_the_hint_says_of_quantised_products_helps():
    """Projections alone quantised: the products are plain, and the attention is fused."""
    assert "projections only" in report_of(Form(product=INTEGERS)).declined[0].hint
    project = """
  {n}_8, {n}_step, {n}_zero = DynamicQuantizeLinear({x})
  {n}_as = Cast<to=1>({n}_8)
  {y} = Mul({n}_as, {n}_step)
"""
    assert len(report_of(Form(project=project)).fused) == 1


def test_a_matrix_product_of_two_axes():
    """Gemm takes matrices: one head of one sequence."""
    norm = RMS.format(x="q", y="q_p", n="q") + RMS.format(x="k", y="k_p", n="k")
    text = f"""<ir_version: 10, opset_import: ["" : 20]>
g (float[s,8] q, float[s,8] k, float[s,8] v, float[8] q_gain, float[8] k_gain) => (float[s,8] y)
{{
  last = Constant<value = int64[1] {{-1}}>()
  eps = Constant<value = float {{0.001}}>()
  {norm}
  scores = Gemm<transB = 1, alpha = 0.3>(q_p, k_p)
  p = Softmax<axis=-1>(scores)
  y = Gemm(p, v)
}}
"""
    (miss,) = fused(ir.from_onnx_text(text), prove=False)[1].declined
    assert miss.reason and miss.node and miss.hint
    plain = text.replace("Gemm<transB = 1, alpha = 0.3>(q_p, k_p)", "Gemm<transB = 1, alpha = 0.3>(q, k)")
    report = fused(ir.from_onnx_text(plain), prove=False)[1]
    assert len(report.plain) == 1 and not report.declined


def operator_model(operator: str, *, norm: bool) -> ir.Model:
    """An operator of com.microsoft on q and k (B, S, 32)."""
    prepare = RMS if norm else SAME
    text = f"""<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
g (float[b,s,32] q, float[b,s,32] k, float[b,s,32] v, float[32] q_gain, float[32] k_gain) => (float[b,s,32] y)
{{
  last = Constant<value = int64[1] {{-1}}>()
  eps = Constant<value = float {{0.001}}>()
  {prepare.format(x="q", y="q_p", n="q")}
  {prepare.format(x="k", y="k_p", n="k")}
  y = com.microsoft.{operator}<num_heads = 4>(q_p, k_p, v)
}}
"""
    return ir.from_onnx_text(text)


@pytest.mark.parametrize(
    "operator", ["PackedMultiHeadAttention", "SparseAttention", "DecoderMaskedMultiHeadAttention", "PagedAttention"]
)
def test_operators_of_queries_and_keys(operator):
    _, report = fused(operator_model(operator, norm=True), prove=False)
    (miss,) = report.declined
    assert operator in miss.reason and miss.node and "MultiHeadAttention" in miss.hint and not report.plain
    _, unlike = fused(operator_model(operator, norm=False), prove=False)
    assert len(unlike.plain) == 1 and not unlike.declined


ON_PROJECTIONS = """
  q_s = Transpose<perm=[0, 2, 1, 3]>({q})
  q_3 = Reshape(q_s, o_dims)
  k_s = Transpose<perm=[0, 3, 1, 2]>({k})
  k_3 = Reshape(k_s, o_dims)
  scores = Identity(q_3)
"""
CALL = """
  v_s = Transpose<perm=[0, 2, 1, 3]>({v})
  v_3 = Reshape(v_s, o_dims)
  o_3 = OPERATOR(q_3, k_3, v_3)
  o_4 = Reshape(o_3, q_dims)
  o = Transpose<perm=[0, 2, 1, 3]>(o_4)
"""


@pytest.mark.parametrize(
    ("domain", "operator", "name"),
    [
        ("ai.onnx.preview", "FlexAttention", "FlexAttention"),
        ("org.pytorch.aten", 'ATen<operator="scaled_dot_product_attention">', "scaled_dot_product_attention"),
        ("pkg.onnxscript.torch_lib", "aten_scaled_dot_product_attention", "aten_scaled_dot_product_attention"),
        ("trt.plugins", "CustomQKVToContextPluginDynamic", "CustomQKVToContextPluginDynamic"),
        ("vendor", "FlashSdpa", "FlashSdpa"),
    ],
)
def test_operators_of_other_domains(domain, operator, name):
    form = Form(product=ON_PROJECTIONS, softmax="", weighed=CALL.replace("OPERATOR", f"{domain}.{operator}"), domains=(domain,))
    (miss,) = report_of(form).declined
    assert f"the operator {name}, which is not read" in miss.reason and "ONNX's own operators" in miss.hint and miss.node
    plain = report_of(dataclasses.replace(form, prepare=SAME))
    assert len(plain.plain) == 1 and not plain.declined
    mended = report_of(dataclasses.replace(form, weighed=CALL.replace("OPERATOR", OWN), opset=23))
    assert len(mended.fused) == 1 and not mended.declined


OWN = "Attention<q_num_heads=4, kv_num_heads=4>"


def test_a_module_kept_as_a_function_is_not_called_qk_norm_attention_for_the_norm_of_its_block():
    weighed = CALL.replace("OPERATOR(q_3, k_3, v_3)", "models.OtherAttention(q_3)")
    report = report_of(Form(product=ON_PROJECTIONS, softmax="", weighed=weighed, domains=("models",)))
    assert len(report.plain) == 1 and not report.declined and not report.fused


@pytest.mark.parametrize("norm", [True, False])
def test_the_older_name_of_a_fused_product_is_read(norm):
    product = (
        "  k_s = Transpose<perm=[0, 1, 3, 2]>({k})\n  scores = com.microsoft.TransposeMatMul<transB=1, alpha=0.5>({q}, k_s)\n"
    )
    report = report_of(Form(product=product, domains=("com.microsoft",), prepare=RMS if norm else SAME))
    assert (len(report.fused), len(report.plain), report.declined) == (int(norm), int(not norm), ())
    assert not norm or report.fused[0].spec.attention.scale == pytest.approx(0.155)


TWICE = "  once = Softmax<axis=-1>(logits)\n  p = Softmax<axis=-1>(once)\n"
HARD = "  p = Hardmax<axis=-1>(logits)\n"


@pytest.mark.parametrize(("softmax", "cause"), [(TWICE, "Softmax stands between"), (HARD, "pass Hardmax in place")])
def test_other_functions_than_one_softmax_are_told_once(softmax, cause):
    (miss,) = report_of(Form(softmax=softmax)).declined
    assert cause in miss.reason and miss.hint
    assert len(report_of(Form(softmax=softmax, prepare=SAME)).plain) == (1 if softmax is TWICE else 0)


@pytest.mark.parametrize(("operator", "declined"), [("Attention", 0), ("PackedAttention", 0), ("QAttention", 1)])
def test_operators_that_project_inside(operator, declined):
    """The norm in front of such an operator is that of the block, before its projections."""
    _, report = fused(operator_model(operator, norm=True), prove=False)
    assert (len(report.declined), len(report.plain)) == (declined, 1 - declined) and not report.fused


def test_the_refusal_says_what_was_read_and_what_was_not():
    with pytest.raises(
        FusionRequiredError, match=r"1 attention\(s\) were found \(o\), and no norm of their queries or keys was seen"
    ):
        require_complete(report_of(Form(prepare=SAME)))
    empty = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["" : 20]>\ng (float[b,8] x) => (float[b,8] y) {\n  y = Relu(x)\n}\n'
    )
    with pytest.raises(FusionRequiredError, match="nothing in this model was seen to be attention"):
        require_complete(fused(empty, prove=False)[1])


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("norm", [True, False])
def test_a_softmax_over_any_axis_is_in_the_report_once(norm: bool, axis: int) -> None:
    """Over heads, queries or sequences it is no attention that anybody publishes, but it stands between two products."""
    prepare = RMS if norm else SAME
    text = f"""<ir_version: 10, opset_import: ["" : 20]>
g (float[2,4,s,8] q, float[2,4,8,s] k, float[2,4,s,8] v, float[8] q_gain, float[s] k_gain) => (float[2,4,s,8] y)
{{
  last = Constant<value = int64[1] {{-1}}>()
  eps = Constant<value = float {{0.001}}>()
  {prepare.format(x="q", y="q_p", n="q")}
  scores = MatMul(q_p, k)
  p = Softmax<axis = {axis}>(scores)
  y = MatMul(p, v)
}}
"""
    _, report = fused(ir.from_onnx_text(text), prove=False)
    assert len(report.fused) + len(report.declined) + len(report.plain) == 1
    assert len(report.plain) == (0 if norm else 1)
