"""Target `ort` for CUDA, as far as a machine without a GPU can tell.

The nodes are compared; the numbers are the CPU's, for which the norm inside GroupQueryAttention is put in front of it.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from qknorm_onnx.graph.canonical.qk_norm_node import RotaryInputs, canonical_operator, make_rotary_node
from qknorm_onnx.graph.passes.attach_bodies import AttachBodiesPass
from qknorm_onnx.lowering.contrib import attention as contrib_core
from qknorm_onnx.lowering.registry import lower
from qknorm_onnx.spec.qk_norm_spec import NormSpec, QKNormRotarySpec, RotarySpec
from qknorm_onnx.spec.signature import operator_of
from qknorm_onnx.spec.variants.variant import norm_gains
from tests.contract.case_models import IR_TYPES, feeds_of, over_budget, run_ort
from tests.contract.named_sizes import lowered, named_model, with_unused_entries
from tests.contract.spec_cases import case, optional, tables

GAINS = norm_gains()
ROTARY = RotarySpec(order="after_norm")
RMS = NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-5, k_epsilon=1e-5)
GROUPED, MULTI, PROLOGUE = "GroupQueryAttention", "MultiHeadAttention", "QKNormRotary"


def on_cuda(found, dtype="float16"):
    model, outcomes = lowered([found], dtype, provider="cuda")
    return model, outcomes[found.id]


def qwen3(name, *, shape="(1, S, R/2)", **parts):
    parts = {"norm": RMS, "rotary": ROTARY, "head_size": 32, "is_causal": True, "inputs": (*GAINS, *tables(shape)), **parts}
    return case(name, **parts)


def nodes_of(model, op_type):
    return [node for node in model.graph.all_nodes() if kind(node) == op_type]


def kind(node):
    """The operator, whichever of its bodies the node has."""
    return canonical_operator(node) or node.op_type


def operators(model):
    return Counter(kind(node) for node in model.graph.all_nodes() if node.op_type != "Constant")


def norm_in_front(model):
    """Takes the norm out of the GroupQueryAttention and puts SimplifiedLayerNormalization in front: what the CPU can run."""
    (node,) = nodes_of(model, GROUPED)
    q_weight, k_weight = node.inputs[14], node.inputs[15]
    epsilons = {name: node.attributes[name].as_float() for name in node.attributes if name.endswith("norm_epsilon")}
    for place, (side, weight) in enumerate((("q", q_weight), ("k", k_weight))):
        x, size = (
            node.inputs[place],
            weight.shape[0] if weight.shape else weight.producer().attributes["value"].as_tensor().shape[0],
        )
        heads = node.attributes["num_heads" if side == "q" else "kv_num_heads"].as_int()
        split = ir.node("Reshape", [x, constant(model, [0, 0, heads, size], f"{side}_heads")])
        epsilon = epsilons.get("qk_norm_epsilon", epsilons.get(f"{side}_norm_epsilon"))
        norm = ir.node(
            "SimplifiedLayerNormalization", [split.outputs[0], weight], {"axis": -1, "epsilon": epsilon, "stash_type": 1}
        )
        flat = ir.node("Reshape", [norm.outputs[0], constant(model, [0, 0, heads * size], f"{side}_flat")])
        model.graph.insert_before(node, [split, norm, flat])
        node.replace_input_with(place, flat.outputs[0])
    for place in (14, 15):
        node.replace_input_with(place, None)
    for name in epsilons:
        node.attributes.pop(name)


def constant(model, items, name):
    value = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), const_value=ir.tensor(np.array(items), name=name))
    model.graph.register_initializer(value)
    return value


def judged(model, found, dtype="float16"):
    outputs = run_ort(model, feeds_of(model, [found], dtype))
    return over_budget([found], with_unused_entries([found], outputs, dtype), dtype)


def test_the_places_of_the_inputs_are_those_of_the_installed_schema():
    (schema,) = [found for found in get_all_operator_schema() if found.name == GROUPED]
    names = {
        "_SEQLENS": "seqlens_k",
        "_TOTAL": "total_sequence_length",
        "COS": "cos_cache",
        "SIN": "sin_cache",
        "_BIAS": "attention_bias",
        "_SINK": "head_sink",
        "Q_WEIGHT": "q_norm_weight",
        "K_WEIGHT": "k_norm_weight",
        "_NEW": "query_seqlens",
    }
    assert {schema.inputs[getattr(contrib_core, place)].name for place in names} == set(names.values())
    assert all(schema.inputs[getattr(contrib_core, place)].name == name for place, name in names.items())
    assert {"qk_norm_epsilon", "q_norm_epsilon", "k_norm_epsilon", "causal", "do_rotary"} <= set(schema.attributes)


@pytest.mark.parametrize(
    "sizes", [{}, {"batch": 3}, {"past_length": 4, "length": 1}, {"past_length": 4, "batch": 3}, {"past_length": 0}]
)
@pytest.mark.parametrize("shape", ["(S, R/2)", "(1, S, R/2)", "(1, 1, S, R/2)"])
def test_norm_and_rotary_are_group_query_attentions_own(sizes, shape):
    found = qwen3("own", shape=shape, sizes=sizes, num_outputs=3, left_window_size=2, softcap=5.0)
    model, outcome = on_cuda(found)
    assert (outcome.target, outcome.note) == ("ort", f"{GROUPED} with its own norm and rotary")
    (node,) = nodes_of(model, GROUPED)
    names = [None if value is None else value.name for value in node.inputs]
    assert names[:3] == ["own/query", "own/key", "own/value"]
    assert names[14:16] == ["own/q_norm_weight", "own/k_norm_weight"]
    assert names[3:5] == (["own/past_key", "own/past_value"] if "past_length" in sizes else [None, None])
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    assert attributes["qk_norm_epsilon"] == pytest.approx(1e-5)
    assert (attributes["do_rotary"], attributes["rotary_interleaved"], attributes["local_window_size"]) == (1, 0, 3)
    assert not {"SimplifiedLayerNormalization", "RotaryEmbedding", PROLOGUE} & set(operators(model))
    assert node.outputs[0].name == "own/Y" and model.graph.outputs[0].shape[-1] == 4 * 32
    assert not model.functions
    norm_in_front(model)
    assert not judged(model, found)


def test_the_processor_says_that_it_has_no_norm_inside_group_query_attention():
    found = qwen3("own")
    model, _ = on_cuda(found)
    with pytest.raises(Exception, match=r"q_norm_weight / k_norm_weight inputs are not supported"):
        run_ort(model, feeds_of(model, [found], "float16"))
    model, outcome = on_cuda(found, "bfloat16")
    assert outcome.target == "ort" and nodes_of(model, GROUPED)[0].outputs[0].dtype == ir.DataType.BFLOAT16
    with pytest.raises(Exception, match=r"NOT_IMPLEMENTED.*GroupQueryAttention"):
        ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])


def test_unlike_epsilons_missing_gains_and_neighbouring_pairs():
    norm = NormSpec(q_kind="rms", k_kind="rms", q_epsilon=0.5, k_epsilon=1e-6)
    rotary = RotarySpec(order="after_norm", interleaved=True, embedding_dim=16)
    found = qwen3("own", norm=norm, rotary=rotary, inputs=tables("(S, R/2)"))
    model, outcome = on_cuda(found)
    assert outcome.note == f"{GROUPED} with its own norm and rotary"
    (node,) = nodes_of(model, GROUPED)
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    assert (attributes["q_norm_epsilon"], attributes["k_norm_epsilon"]) == (0.5, pytest.approx(1e-6))
    assert attributes["rotary_interleaved"] == 1 and "qk_norm_epsilon" not in attributes
    norm_in_front(model)
    assert not judged(model, found)


NOT_ITS_OWN = {
    "multiplies the gain before it rounds": {
        "norm": NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6, weight_order="after_cast")
    },
    "the root mean square of each head of q and k": {
        "norm": NormSpec(q_kind="layer", k_kind="layer", q_epsilon=1e-6, k_epsilon=1e-6)
    },
    "has the root mean square of each head": {
        "norm": NormSpec(k_kind="rms", k_epsilon=1e-6),
        "inputs": (GAINS[1], *tables("(S, R/2)")),
    },
    "with epsilon under the root": {"norm": NormSpec(q_kind="rms", k_kind="rms", epsilon_mode="clamp", q_epsilon=1e-6)},
    "needs a positive epsilon": {"norm": NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6)},
    "has no bias of the norm": {"inputs": (*norm_gains(biased=True), *tables("(S, R/2)"))},
    "takes one gain for each value of a head": {"inputs": (*norm_gains("H, D"), *tables("(S, R/2)"))},
    "scales no queries behind their norm": {"inputs": (*GAINS, optional("q_scale", "(Hq, 1, 1)", "scale"), *tables("(S, R/2)"))},
    "scales no queries behind": {"scale": -0.5},
    "rotates behind the norm": {"rotary": RotarySpec(order="before_norm")},
    "takes one rotary table for all rows": {"inputs": (*GAINS, *tables("(B, S, R/2)"))},
    "here each row has its own": {"sizes": {"past_length": 2, "capacity": 12}},
    "two halves of these tables": {"inputs": (*GAINS, *tables("(S, R)"))},
    "rotates multiples of 16 values": {"rotary": RotarySpec(order="after_norm", embedding_dim=8)},
}


@pytest.mark.parametrize("reason", NOT_ITS_OWN)
def test_what_is_not_its_own_is_one_kernel_of_ours_for_q_and_k(reason):
    found = qwen3("ours", **NOT_ITS_OWN[reason])
    model, outcome = on_cuda(found)
    assert outcome.target == "ort" and outcome.note.startswith(f"{PROLOGUE} and {GROUPED}: ") and reason in outcome.note
    counts = operators(model)
    assert (counts[PROLOGUE], counts[GROUPED]) == (2, 1)
    assert not {"SimplifiedLayerNormalization", "RotaryEmbedding", "Mul", "Transpose"} & set(counts)
    (node,) = nodes_of(model, GROUPED)
    assert [kind(value.producer()) for value in node.inputs[:2]] == [PROLOGUE, PROLOGUE]
    # The nodes carry their bodies, so that the CPU can run them without our library.
    assert {operator_of(function.name) for function in model.functions.values()} == {PROLOGUE}
    assert not judged(model, found)


def test_wide_gains_and_tables_of_narrow_tensors_go_to_our_kernel():
    for names in (("q_norm_weight", "k_norm_weight"), ("cos", "sin")):
        found = qwen3("wide")
        model = named_model([found], "float16")
        for value in model.graph.inputs:
            if value.name.endswith(names):
                value.type = ir.TensorType(ir.DataType.FLOAT)
        AttachBodiesPass()(model)
        (outcome,) = lower(model, target="ort", provider="cuda")
        assert "in the tensors' type" in outcome.note or "of the tensors' type" in outcome.note
        assert operators(model)[PROLOGUE] == 2


@pytest.mark.parametrize(
    ("reason", "parts", "dtype"),
    [
        ("GroupQueryAttention on CUDA has float16 and bfloat16 only", {}, "float32"),
        (
            "is not known to take a mask",
            {"inputs": (*GAINS, optional("attention_bias", "(T)", "bool mask")), "rotary": RotarySpec()},
            "float16",
        ),
        ("is not known to serve attention in both directions", {"is_causal": False}, "float16"),
        ("MultiHeadAttention on CUDA is not known to have bfloat16", {"heads": (2, 2), "is_causal": False}, "bfloat16"),
        ("the contrib operators have no float64", {}, "float64"),
    ],
)
def test_attention_that_no_operator_serves_on_cuda_is_refused(reason, parts, dtype):
    found = qwen3("refused", **parts)
    model, outcome = on_cuda(found, dtype)
    assert outcome.target == "primitive" and reason in outcome.note
    assert not {GROUPED, MULTI, PROLOGUE} & set(operators(model))


def test_a_float32_bias_of_narrow_tensors_is_refused_on_cuda():
    found = qwen3(
        "bias", heads=(2, 2), is_causal=False, inputs=(*GAINS, *tables("(S, R/2)"), optional("attention_bias", "(T)", "logits"))
    )
    model = named_model([found], "float16")
    next(value for value in model.graph.inputs if value.name.endswith("bias")).type = ir.TensorType(ir.DataType.FLOAT)
    AttachBodiesPass()(model)
    (outcome,) = lower(model, target="ort", provider="cuda")
    assert outcome.target == "primitive" and "takes a bias of the tensors' type, and this one is float32" in outcome.note


def test_attention_in_both_directions_is_our_kernel_and_multi_head_attention():
    mask = optional("attention_bias", "(B, 1, S, T)", "bool mask")
    found = qwen3("vit", heads=(3, 3), is_causal=False, inputs=(*GAINS, *tables("(B, S, R/2)"), mask))
    found.inputs["attention_bias"][0, 0, 1, :] = False
    model, outcome = on_cuda(found, "float32")
    assert outcome.note == f"{PROLOGUE} and {MULTI}: {MULTI} has neither norm nor rotary"
    assert not judged(model, found, "float32")
    model, outcome = on_cuda(found, "float16")
    (node,) = nodes_of(model, MULTI)
    assert outcome.target == "ort" and {value.dtype for value in node.inputs if value is not None} == {ir.DataType.FLOAT16}


def test_attention_that_is_not_prepared_stands_alone():
    found = case("plain", norm=NormSpec(), is_causal=True)
    model, outcome = on_cuda(found)
    assert outcome.note == GROUPED and operators(model)[GROUPED] == 1
    assert len(nodes_of(model, GROUPED)[0].inputs) == 7
    assert not judged(model, found)


def test_a_side_without_a_kernel_of_ours_is_prepared_by_contrib_operators():
    rotary = RotarySpec(order="after_norm", interleaved=True, embedding_dim=8, offset=3)
    found = qwen3("odd", rotary=rotary)
    model, outcome = on_cuda(found)
    assert outcome.note.startswith(f"{GROUPED}: ") and "partly plain operators" in outcome.note
    assert PROLOGUE not in operators(model) and operators(model)["SimplifiedLayerNormalization"] == 2
    assert not judged(model, found)


@pytest.mark.parametrize(("head_size", "kept"), [(64, True), (300, False)])
def test_lone_norm_and_rotary_stay_where_a_kernel_serves_them(head_size, kept):
    spec = QKNormRotarySpec(num_heads=2, kind="rms", epsilon=1e-6)
    values = {
        name: ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(IR_TYPES["float16"]))
        for name, shape in (("x", ["b", "s", 2 * head_size]), ("weight", [head_size]))
    }
    node = make_rotary_node(spec, RotaryInputs(**values), name="prepare")
    model = ir.Model(
        ir.Graph(list(values.values()), node.outputs, nodes=[node], opset_imports={"": 20, "ai.qknorm": 1}), ir_version=10
    )
    AttachBodiesPass()(model)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    (outcome,) = lower(model, target="ort", provider="cuda")
    assert outcome.target == "ort"
    if kept:
        assert outcome.note == PROLOGUE and ir.to_proto(model).SerializeToString(deterministic=True) == before
    else:
        assert "SimplifiedLayerNormalization" in operators(model) and PROLOGUE not in operators(model)


def test_lowering_twice_changes_nothing():
    cases = [qwen3("own"), qwen3("ours", scale=-1.0), qwen3("vit", heads=(3, 3), is_causal=False)]
    model, _ = lowered(cases, "float16", provider="cuda")
    data = ir.to_proto(model).SerializeToString(deterministic=True)
    again = lower(model, target="ort", provider="cuda")
    assert {outcome.note for outcome in again} == {PROLOGUE} and len(again) == 4
    assert ir.to_proto(model).SerializeToString(deterministic=True) == data
