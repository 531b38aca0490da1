"""Canonical nodes: what is written is read back, types and shapes are known, and what does not fit is refused by name."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from qknorm_onnx.graph.canonical.body_signature import body_key
from qknorm_onnx.graph.canonical.qk_norm_node import (
    AttentionInputs,
    RotaryInputs,
    input_values,
    is_attention_node,
    is_rotary_node,
    make_attention_node,
    make_rotary_node,
    node_signature,
    read_attention_node,
    read_rotary_node,
)
from qknorm_onnx.graph.passes.attach_bodies import key_of
from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormRotarySpec, QKNormSpec, RotarySpec, SpecError
from tests.contract.case_models import model_of
from tests.contract.spec_cases import GROUPS, group

SPEC = QKNormSpec(
    attention=AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=0.3, is_causal=True),
    norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6),
)


def value(name, shape, dtype=ir.DataType.FLOAT):
    return ir.Value(name=name, shape=None if shape is None else ir.Shape(shape), type=ir.TensorType(dtype) if dtype else None)


def projections(dtype=ir.DataType.FLOAT):
    return {
        "query": value("q", ["B", "S", 32], dtype),
        "key": value("k", ["B", "N", 16], dtype),
        "value": value("v", ["B", "N", 10], dtype),
    }


@pytest.mark.parametrize("name", GROUPS)
def test_spec_and_inputs_are_read_back(name):
    cases = group(name)
    nodes = [node for node in model_of(cases, attach=False).graph if is_attention_node(node)]
    assert len(nodes) == len(cases)
    for found, node in zip(cases, nodes, strict=True):
        spec, inputs = read_attention_node(node)
        assert spec == found.spec
        given = {key: item for key, item in input_values(inputs).items() if item is not None}
        assert {key: f"{found.id}/{key}" for key in found.inputs} == {key: item.name for key, item in given.items()}


def test_absent_inputs_are_none_in_the_middle_and_trimmed_at_the_end():
    weight = value("w", [8])
    node = make_attention_node(SPEC, AttentionInputs(**projections(), k_norm_weight=weight), name="n")
    assert [None if item is None else item.name for item in node.inputs] == ["q", "k", "v", None, "w"]


def test_outputs_have_type_and_symbolic_shape():
    past = {"past_key": value("pk", ["B", 2, 6, 8]), "past_value": value("pv", ["B", 2, 6, 5])}
    node = make_attention_node(SPEC, AttentionInputs(**projections(), **past), name="layer.3", num_outputs=3)
    assert [output.name for output in node.outputs] == ["layer.3/Y", "layer.3/present_key", "layer.3/present_value"]
    assert {output.dtype for output in node.outputs} == {ir.DataType.FLOAT}
    assert node.outputs[0].shape == ir.Shape(["B", "S", 20])
    assert node.outputs[1].shape[:2] == ("B", 2) and node.outputs[1].shape[3] == 8
    assert node.outputs[2].shape[3] == 5


@pytest.mark.parametrize("count", [0, 4])
def test_a_wrong_number_of_outputs_is_refused(count):
    with pytest.raises(SpecError, match=rf"num_outputs is {count}.*1 to 3"):
        make_attention_node(SPEC, AttentionInputs(**projections()), name="n", num_outputs=count)


REFUSED = {
    "type of input query": {"query": value("q", ["B", "S", 32], None)},
    "input key is of type FLOAT16; FLOAT is expected": {"key": value("k", ["B", "N", 16], ir.DataType.FLOAT16)},
    "input query is of type INT8": {name: value(name, ["B", "S", 32], ir.DataType.INT8) for name in ("query",)},
    "input q_norm_weight is of type DOUBLE; FLOAT is expected": {"q_norm_weight": value("w", [8], ir.DataType.DOUBLE)},
    "input query_offset is of type FLOAT; INT64 is expected": {"query_offset": value("o", ["B"])},
    "q_norm_weight has shape (7)": {"q_norm_weight": value("w", [7])},
    "head size 9; 8 is expected, as in query": {"key": value("k", ["B", "N", 18])},
    "past_key and past_value": {"past_key": value("pk", ["B", 2, "P", 8])},
}


@pytest.mark.parametrize("message", REFUSED)
def test_types_and_shapes_that_do_not_fit_are_refused_by_name(message):
    with pytest.raises(SpecError) as refusal:
        make_attention_node(SPEC, AttentionInputs(**{**projections(), **REFUSED[message]}), name="n")
    assert message in str(refusal.value)


def test_tables_of_unknown_rank_are_refused():
    spec = QKNormSpec(attention=SPEC.attention, rotary=RotarySpec(order="after_norm"))
    unknown = {"cos": value("c", None), "sin": value("s", None)}
    with pytest.raises(SpecError, match=r"rank of input cos \(value 'c'\)"):
        make_attention_node(spec, AttentionInputs(**projections(), **unknown), name="n")


def test_projections_of_unknown_shape_are_fine():
    inputs = AttentionInputs(**{name: value(name, None) for name in ("query", "key", "value")})
    node = make_attention_node(SPEC, inputs, name="n")
    assert node.outputs[0].shape.rank() == 3
    assert node_signature(node).inputs[0].last_dim is None


def test_float32_parameters_fit_half_precision_tensors():
    node = make_attention_node(
        SPEC, AttentionInputs(**projections(ir.DataType.BFLOAT16), q_norm_weight=value("w", [8])), name="n"
    )
    assert node.outputs[0].dtype == ir.DataType.BFLOAT16


def test_rotary_nodes_are_read_back():
    spec = QKNormRotarySpec(
        num_heads=2, kind="layer", epsilon=1e-5, rotary=RotarySpec(order="after_norm", offset=4, embedding_dim=4)
    )
    inputs = RotaryInputs(x=value("x", [1, "S", 16]), cos=value("c", ["S", 2]), sin=value("s", ["S", 2]))
    node = make_rotary_node(spec, inputs, name="q_side")
    assert is_rotary_node(node) and not is_attention_node(node)
    assert read_rotary_node(node) == (spec, inputs)
    assert node.outputs[0].shape == ir.Shape([1, "S", 16])


def test_foreign_and_damaged_nodes_are_refused():
    node = make_attention_node(SPEC, AttentionInputs(**projections()), name="n")
    with pytest.raises(SpecError, match=r"'n' is a ai.qknorm::QKNormAttention, not a ai.qknorm::QKNormRotary"):
        read_rotary_node(node)
    short = ir.Node("ai.qknorm", "QKNormAttention", node.inputs[:2], node.attributes.values(), name="short")
    with pytest.raises(SpecError, match=r"'short' lacks the required input\(s\) value"):
        read_attention_node(short)
    long = ir.Node("ai.qknorm", "QKNormAttention", [*node.inputs, *[None] * 20], node.attributes.values(), name="long")
    with pytest.raises(SpecError, match="'long' has 23 inputs"):
        read_attention_node(long)
    reference = ir.RefAttr("scale", "scale_of_caller", ir.AttributeType.FLOAT)
    referring = ir.Node("ai.qknorm", "QKNormAttention", node.inputs, [reference], name="referring")
    with pytest.raises(SpecError, match="refers to a function's attribute"):
        read_attention_node(referring)


def test_keys_are_equal_for_equal_bodies_and_differ_for_others():
    def key(spec=SPEC, outputs=1, **changed):
        return key_of(make_attention_node(spec, AttentionInputs(**{**projections(), **changed}), name="any", num_outputs=outputs))

    first = key()
    assert first == key(query=value("another", ["X", "Y", 32]))  # names and dynamic sizes do not matter
    others = [
        key(QKNormSpec(attention=SPEC.attention, norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=2e-6))),
        key(outputs=3),
        key(attention_bias=value("m", ["S", "T"])),
        key(attention_bias=value("m", ["S", "T"], ir.DataType.BOOL)),
        key(attention_bias=value("m", [])),
        key_of(make_attention_node(SPEC, AttentionInputs(**projections(ir.DataType.FLOAT16)), name="any")),
    ]
    assert len({first, *others}) == 1 + len(others)


def test_keys_do_not_change_between_runs():
    node = make_attention_node(SPEC, AttentionInputs(**projections()), name="n")
    assert body_key(SPEC, node_signature(node)) == key_of(node) == PINNED


@pytest.mark.parametrize(
    ("op_type", "attention", "rotary"),
    [
        ("QKNormAttention", True, False),
        ("QKNormAttention_2", True, False),
        ("QKNormAttention_32", True, False),
        ("QKNormAttention_1", False, False),
        ("QKNormAttention_33", False, False),
        ("QKNormAttention_02", False, False),
        ("QKNormRotary_2", False, True),
        ("QKNormRotary_two", False, False),
    ],
)
def test_numbered_names_are_canonical(op_type, attention, rotary):
    made = make_attention_node(SPEC, AttentionInputs(**projections()), name="n")
    node = ir.Node("ai.qknorm", op_type, made.inputs, made.attributes.values(), name="n")
    assert (is_attention_node(node), is_rotary_node(node)) == (attention, rotary)
    elsewhere = ir.Node("my.domain", op_type, made.inputs, made.attributes.values(), name="n")
    assert not is_attention_node(elsewhere) and not is_rotary_node(elsewhere)
    if attention:
        assert read_attention_node(node) == read_attention_node(made)


PINNED = "float_c1bcae5591139c62"
