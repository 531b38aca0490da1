"""Contract 5: `from_attributes(to_attributes(spec)) == spec`, also through a real ONNX node, for any spec."""

from __future__ import annotations

from typing import Any, get_args

import onnx
import onnx.helper
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from qknorm_onnx.spec import qk_norm_spec
from qknorm_onnx.spec.attributes import from_attributes, to_attributes
from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormRotarySpec, QKNormSpec, RotarySpec, SpecError
from qknorm_onnx.spec.variants import VARIANTS
from tests.contract.spec_cases import epsilon_modes

NORM_KINDS, ROTARY_ORDERS = get_args(qk_norm_spec.NormKind), get_args(qk_norm_spec.RotaryOrder)
EPSILONS = st.floats(min_value=0, max_value=1e30)


def choice(literal: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(get_args(literal))


@st.composite
def norms(draw: st.DrawFn) -> NormSpec:
    q_kind, k_kind = draw(st.sampled_from(NORM_KINDS)), draw(st.sampled_from(NORM_KINDS))
    mode = draw(st.sampled_from(epsilon_modes(q_kind, k_kind)))
    return NormSpec(
        q_kind=q_kind,
        k_kind=k_kind,
        axis=draw(choice(qk_norm_spec.NormAxis)),
        groups=draw(st.integers(1, 64)),
        q_epsilon=draw(EPSILONS),
        k_epsilon=draw(EPSILONS),
        epsilon_mode=mode,
        weight_order=draw(choice(qk_norm_spec.NormWeightOrder)),
    )


@st.composite
def rotaries(draw: st.DrawFn) -> RotarySpec:
    sections = draw(st.integers(1, 4))
    embedding_dim = 2 * sections * draw(st.integers(0, 64))
    return RotarySpec(
        order=draw(st.sampled_from(ROTARY_ORDERS)),
        interleaved=draw(st.booleans()),
        embedding_dim=embedding_dim,
        offset=draw(st.integers(0, 256)) if embedding_dim else 0,
        sections=sections,
    )


@st.composite
def attentions(draw: st.DrawFn) -> AttentionSpec:
    kv_num_heads = draw(st.integers(1, 64))
    return AttentionSpec(
        q_num_heads=kv_num_heads * draw(st.integers(1, 16)),
        kv_num_heads=kv_num_heads,
        scale=draw(st.floats(-1e30, 1e30)),
        softcap=draw(st.floats(0, 1e30)),
        logit_clamp=draw(st.floats(0, 1e30)),
        is_causal=draw(st.booleans()),
        left_window_size=draw(st.integers(-1, 1 << 40)),
        right_window_size=draw(st.integers(-1, 1 << 40)),
        softmax_precision=draw(choice(qk_norm_spec.SoftmaxPrecision)),
    )


@st.composite
def specs(draw: st.DrawFn) -> QKNormSpec:
    parts = {"attention": draw(attentions()), "norm": draw(norms()), "rotary": draw(rotaries())}
    try:
        return QKNormSpec(**parts)
    except SpecError:
        assume(False)
        raise


@st.composite
def preparation_specs(draw: st.DrawFn) -> QKNormRotarySpec:
    spec = draw(specs())
    return draw(st.sampled_from([spec.query_preparation, spec.key_preparation]))


def through_a_file(op_type: str, attributes: dict[str, Any]) -> dict[str, Any]:
    node = onnx.helper.make_node(op_type, ["x"], ["y"], domain="ai.qknorm", **attributes)
    read = onnx.NodeProto.FromString(node.SerializeToString())
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in read.attribute}


@settings(max_examples=300)
@given(specs())
def test_attention_specs_survive_the_way_there_and_back(spec: QKNormSpec) -> None:
    attributes = to_attributes(spec)
    assert from_attributes(QKNormSpec, attributes) == spec
    assert from_attributes(QKNormSpec, through_a_file("QKNormAttention", attributes)) == spec


@settings(max_examples=300)
@given(preparation_specs())
def test_rotary_specs_survive_the_way_there_and_back(spec: QKNormRotarySpec) -> None:
    attributes = to_attributes(spec)
    assert from_attributes(QKNormRotarySpec, attributes) == spec
    assert from_attributes(QKNormRotarySpec, through_a_file("QKNormRotary", attributes)) == spec


@settings(max_examples=200)
@given(specs(), specs())
def test_unequal_specs_have_unequal_attributes(first: QKNormSpec, second: QKNormSpec) -> None:
    assert (to_attributes(first) == to_attributes(second)) == (first == second)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_survive_the_way_there_and_back(name: str) -> None:
    spec = VARIANTS[name].spec
    assert from_attributes(QKNormSpec, through_a_file("QKNormAttention", to_attributes(spec))) == spec
