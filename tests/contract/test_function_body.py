"""Contracts 1 and 2: the function body of every case == the reference, in float64; and what narrow types may lose."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from qknorm_onnx.graph.canonical.body_signature import signature_of
from qknorm_onnx.graph.canonical.function_body import attention_body
from qknorm_onnx.graph.canonical.qk_norm_node import node_signature, read_attention_node
from qknorm_onnx.lowering.registry import lower
from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormSpec, RotarySpec, SpecError
from qknorm_onnx.spec.signature import ATTENTION_INPUT_NAMES
from qknorm_onnx.spec.variants.variant import norm_gains
from tests.contract.case_models import OPTIMISATION_LEVELS, errors, feeds_of, model_of, over_budget, run_ort
from tests.contract.spec_cases import GROUPS, Case, case, group, optional, tables

EXACT = 1e-12


def too_large(found, bound=EXACT):
    return {name: value for name, value in found.items() if not value <= bound}


@pytest.mark.parametrize("name", GROUPS)
def test_body_is_the_reference_in_onnxs_evaluator(name):
    # The evaluator knows functions by name only, not by overload: the bodies are put into the nodes' places.
    cases = group(name)
    model = model_of(cases)
    lower(model, target="primitive", provider="cpu")
    evaluator = ReferenceEvaluator(ir.to_proto(model))
    outputs = dict(zip(evaluator.output_names, evaluator.run(None, feeds_of(model, cases)), strict=True))
    assert not too_large(errors(cases, outputs))


@pytest.mark.parametrize("name", GROUPS)
def test_body_is_the_reference_in_onnxruntime(name):
    cases = group(name)
    model = model_of(cases)
    assert not too_large(errors(cases, run_ort(model, feeds_of(model, cases))))


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_narrow_types_stay_within_the_budget(name, dtype):
    cases = group(name, every=2 if dtype == "float32" else 5)
    model = model_of(cases, dtype)
    assert not over_budget(cases, run_ort(model, feeds_of(model, cases, dtype)), dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("level", OPTIMISATION_LEVELS)
def test_every_optimisation_level_agrees(dtype, level):
    # B58: ONNX Runtime's own fusions must neither make a node without a kernel nor change the numbers.
    cases = [found for name in GROUPS for found in group(name, every=15)]
    model = model_of(cases, dtype, constants=lambda name: name.endswith(("weight", "norm_bias")))
    assert not over_budget(cases, run_ort(model, feeds_of(model, cases, dtype), level), dtype)


@pytest.mark.parametrize("opset", [18, 20, 21, 23, 25])
def test_bodies_of_every_opset(opset):
    cases = [found for name in GROUPS for found in group(name, every=20)]
    model = model_of(cases, opset=opset)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    assert {entry.version for function in proto.functions for entry in function.opset_import} == {opset}
    assert not too_large(errors(cases, run_ort(model, feeds_of(model, cases))))


def test_the_head_size_may_be_dynamic():
    rotary_free = [
        found
        for name in GROUPS
        for found in group(name, every=6)
        if found.spec.rotary.order == "none" or found.spec.rotary.embedding_dim
    ]
    assert len(rotary_free) > 30
    model = model_of(rotary_free, static=lambda name: name in ("cos", "sin"))
    assert not too_large(errors(rotary_free, run_ort(model, feeds_of(model, rotary_free))))


def test_one_model_of_several_types():
    # B60: one operator name, several types, with and without an optional input.
    masked = optional("attention_bias", "(B, 1, S, T)", "bool mask")
    kinds = {"float32": (), "float16": (masked,), "bfloat16": (), "float64": (masked,)}
    cases = {kind: case(kind, inputs=(*norm_gains(), *bias), is_causal=True) for kind, bias in kinds.items()}
    model = model_of(list(cases.values()), lambda found: found.id)
    outputs = run_ort(model, feeds_of(model, list(cases.values()), lambda found: found.id))
    for kind, found in cases.items():
        if kind == "float64":
            assert not too_large(errors([found], outputs))
        else:
            assert not over_budget([found], outputs, kind)


def test_float32_parameters_of_half_precision_tensors():
    # B09: the gain was kept in float32.
    found = case("b09", head_size=64, inputs=norm_gains())
    half = {name: value for name, value in found.inputs.items() if not name.endswith("weight")}
    graph_inputs = {
        name: ir.Value(
            name=name,
            shape=ir.Shape([None] * (value.ndim - 1) + [value.shape[-1]]),
            type=ir.TensorType(ir.DataType.FLOAT16 if name in half else ir.DataType.FLOAT),
        )
        for name, value in found.inputs.items()
    }
    model = _model_of_node(found.spec, graph_inputs)
    feeds = {name: value.astype(np.float16 if name in half else np.float32) for name, value in found.inputs.items()}
    (y,) = run_ort(model, feeds).values()
    expected = found.expected(feeds)[0]
    assert y.dtype == np.float16
    assert np.abs(y - expected).max() <= 1e-3 * np.abs(expected).max()


def _model_of_node(spec, graph_inputs, opset=18):
    from qknorm_onnx.graph.canonical.qk_norm_node import AttentionInputs, make_attention_node
    from qknorm_onnx.graph.passes.attach_bodies import AttachBodiesPass

    node = make_attention_node(spec, AttentionInputs(**graph_inputs), name="node")
    imports = {"": opset, "ai.qknorm": 1}
    model = ir.Model(ir.Graph(list(graph_inputs.values()), node.outputs, nodes=[node], opset_imports=imports), ir_version=10)
    AttachBodiesPass()(model)
    return model


NORMS = {
    "rms": NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6),
    "rms-no-epsilon": NormSpec(q_kind="rms", k_kind="rms"),
    "rms-tiny-epsilon": NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-8, k_epsilon=1e-12),
    "layer": NormSpec(q_kind="layer", k_kind="layer", q_epsilon=1e-8, k_epsilon=1e-8),
    "layer-no-epsilon": NormSpec(q_kind="layer", k_kind="layer"),
    "l2-clamp": NormSpec(q_kind="l2", k_kind="l2", q_epsilon=1e-12, k_epsilon=1e-12, epsilon_mode="clamp"),
    "l2-outside": NormSpec(q_kind="l2", k_kind="l2", epsilon_mode="outside_sqrt"),
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("magnitude", ["zero", "huge", "tiny", "offset"])
def test_extreme_rows(dtype, norm, magnitude):
    # B01, B03: zero rows and epsilons that vanish in half precision; sums of squares that overflow; large means.
    cases = []
    for axis in ("head", "hidden"):
        spec = dataclasses.replace(NORMS[norm], axis=axis)
        found = case(f"{norm}-{magnitude}-{axis}", norm=spec, inputs=norm_gains("H*D"), heads=(4, 4))
        query, key = found.inputs["query"], found.inputs["key"]
        if magnitude == "zero":
            query[:, 1], key[:, 3] = 0.0, 0.0
        elif magnitude == "offset":
            query[:, 1], key[:, 3] = 3.3, -7.7
            query[:, 2] += 100.0
        else:
            huge = {"float16": 1e4, "float32": 1e25, "bfloat16": 1e30}[dtype]
            tiny = {"float16": 1e-4, "float32": 1e-25, "bfloat16": 1e-30}[dtype]
            query *= huge if magnitude == "huge" else tiny
            key[:, 1] *= huge if magnitude == "huge" else tiny
        cases.append(found)
    model = model_of(cases, dtype)
    outputs = run_ort(model, feeds_of(model, cases, dtype))
    assert all(np.isfinite(output.astype(np.float64)).all() for output in outputs.values())
    bound = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 4e-2}[dtype]
    assert not too_large(errors(cases, outputs, dtype), bound)


@pytest.mark.parametrize("values", ["bool mask", "float mask"])
def test_a_row_that_sees_nothing_is_zero_and_no_other_changes(values):
    # B13
    bias = optional("attention_bias", "(B, Hq, S, T)", values)
    found = case("b13", heads=(4, 4), inputs=(*norm_gains(), bias), sizes={"length": 8})
    shown = np.ones((2, 4, 8, 8), dtype=bool)
    hidden = shown.copy()
    hidden[0, 0, 0] = False
    results = []
    for visible in (shown, hidden):
        mask = visible if values == "bool mask" else np.where(visible, 0.0, -np.inf)
        inputs = {**found.inputs, "attention_bias": mask, "value": np.broadcast_to(np.arange(8.0)[:, None], (2, 8, 32)).copy()}
        changed = dataclasses.replace(found, inputs=inputs)
        model = model_of([changed], "float32")
        results.append(run_ort(model, feeds_of(model, [changed], "float32"))["b13/Y"].reshape(2, 8, 4, 8))
    full, masked = results
    assert (masked[0, 0, 0] == 0).all()
    assert (full[0, 0, 0] != 0).all()
    masked[0, 0, 0] = full[0, 0, 0]
    assert np.array_equal(full, masked)


def test_a_row_of_finite_minimum_is_the_mean_of_the_values():
    # B13: finfo.min is not -inf.
    found = case("lowest", inputs=(*norm_gains(), optional("attention_bias", "(B, 1, S, T)", "float mask")))
    found.inputs["attention_bias"][:] = np.finfo(np.float32).min
    model = model_of([found], "float32")
    y = run_ort(model, feeds_of(model, [found], "float32"))["lowest/Y"].reshape(2, 5, 4, 8)
    mean = found.inputs["value"].reshape(2, 5, 2, 8).mean(1).repeat(2, axis=1)
    assert np.allclose(y, mean[:, None], atol=1e-6)


@pytest.mark.parametrize("cap", [2.0, 50.0])
def test_a_masked_key_has_no_weight_behind_a_soft_cap(cap):
    # B16: capped after the mask, -inf would become -cap. A value of 1e30 shows the smallest leak.
    found = case("b16", inputs=(*norm_gains(), optional("attention_bias", "(B, 1, S, T)", "bool mask")), softcap=cap)
    found.inputs["attention_bias"][:] = True
    found.inputs["attention_bias"][..., 2] = False
    found.inputs["value"][:, 2] = 1e30
    model = model_of([found], "float32")
    outputs = run_ort(model, feeds_of(model, [found], "float32"))
    assert np.abs(outputs["b16/Y"]).max() < 100
    assert not over_budget([found], outputs, "float32")


def test_query_heads_share_neighbouring_key_heads():
    # B23: heads (0, 1) read key head 0, heads (2, 3) key head 1.
    found = case("b23", inputs=norm_gains())
    found.inputs["value"] = np.repeat([1.0, 1000.0], 8)[None, None].repeat(2, 0).repeat(5, 1)
    model = model_of([found], "float32")
    y = run_ort(model, feeds_of(model, [found], "float32"))["b23/Y"].reshape(2, 5, 4, 8)
    assert np.allclose(y[:, :, :2], 1.0)
    assert np.allclose(y[:, :, 2:], 1000.0)


def test_no_mask_is_computed_where_nothing_is_hidden():
    body = _body(case("plain", heads=(2, 2), inputs=norm_gains()))
    assert not {"Where", "Range", "Less", "Equal", "Expand"} & {node.op_type for node in body}


def test_keys_and_values_are_not_repeated_for_their_query_heads():
    body = _body(case("gqa", heads=(6, 2), inputs=norm_gains(), is_causal=True))
    assert not {"Expand", "Tile"} & {node.op_type for node in body}


def _body(found: Case):
    node = model_of([found], attach=False).graph.node(0)
    return attention_body(read_attention_node(node)[0], node_signature(node), opset=18)


def test_opset_17_is_refused():
    node = model_of([case("old", inputs=norm_gains())], attach=False).graph.node(0)
    with pytest.raises(SpecError, match=r"opset 17.*18"):
        attention_body(read_attention_node(node)[0], node_signature(node), opset=17)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecOfTomorrow(QKNormSpec):
    dropout: float = dataclasses.field(default=0.0, metadata={"onnx_name": "dropout", "doc": "a field no one knows"})


def test_an_unknown_field_is_refused_unless_it_says_nothing():
    known = QKNormSpec(attention=AttentionSpec(q_num_heads=2, kv_num_heads=2, scale=1.0))
    signature = node_signature(model_of([case("x", heads=(2, 2))], attach=False).graph.node(0))
    assert attention_body(SpecOfTomorrow(attention=known.attention), signature, opset=18)
    with pytest.raises(SpecError, match=r"dropout=0\.5"):
        attention_body(SpecOfTomorrow(attention=known.attention, dropout=0.5), signature, opset=18)


def test_an_unknown_head_size_of_a_whole_head_rotary_is_refused():
    found = case("dynamic", rotary=RotarySpec(order="after_norm"), inputs=tables("(S, R/2)"))
    node = model_of([found], attach=False, static=lambda name: name in ("cos", "sin")).graph.node(0)
    with pytest.raises(SpecError, match="head"):
        attention_body(found.spec, node_signature(node), opset=18)


def test_a_signature_needs_types():
    with pytest.raises(ValueError, match="type of input query"):
        signature_of({ATTENTION_INPUT_NAMES[0]: ir.Value(name="q")}, num_outputs=1)
