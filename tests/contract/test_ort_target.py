"""Target `ort` on the CPU: every attention that it takes == the float64 reference, every one that it does not has its reason."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest

from qknorm_onnx.graph.canonical.qk_norm_node import RotaryInputs, make_rotary_node
from qknorm_onnx.graph.passes.attach_bodies import AttachBodiesPass
from qknorm_onnx.lowering.registry import lower
from qknorm_onnx.spec.qk_norm_spec import NormSpec, QKNormRotarySpec, RotarySpec
from qknorm_onnx.spec.variants.variant import norm_gains
from tests.contract.case_models import error, feeds_of, over_budget, rounded, run_ort
from tests.contract.named_sizes import lowered, named_model, with_unused_entries
from tests.contract.spec_cases import GROUPS, case, group, optional, tables

GAINS = norm_gains()
ROTARY = RotarySpec(order="after_norm")
SINK = optional("head_sink", "(Hq)", "logits")
GROUPED, MULTI = "GroupQueryAttention", "MultiHeadAttention"


def judged(model, cases, dtype="float32"):
    outputs = run_ort(model, feeds_of(model, cases, dtype))
    return over_budget(cases, with_unused_entries(cases, outputs, dtype), dtype)


def operators(model):
    return Counter(node.op_type for node in model.graph.all_nodes() if node.op_type != "Constant")


def served(cases, operator, dtype="float32"):
    """Runs cases that the target must serve with `operator`, and nothing else."""
    model, outcomes = lowered(cases, dtype)
    assert {outcome.target for outcome in outcomes.values()} == {"ort"}, outcomes
    assert operators(model)[operator] == len(cases)
    assert not judged(model, cases, dtype)
    return model, outcomes


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in GROUPS if name != "empty"])
def test_every_group_of_cases_is_the_reference(name, dtype):
    cases = group(name, every=1 if dtype == "float32" else 3)
    model, outcomes = lowered(cases, dtype, opset=20 if dtype != "float16" else 24)
    taken = Counter(outcome.target for outcome in outcomes.values())
    assert set(taken) <= {"ort", "onnx", "primitive"}
    if name in ("norm", "rotary"):
        assert set(taken) == {"ort"}
    assert not model.functions and "ai.qknorm" not in model.opset_imports
    assert not judged(model, cases, dtype)


def test_float64_goes_to_the_next_target():
    model, outcomes = lowered([case("wide", inputs=(*GAINS, *tables("(S, R/2)")), rotary=ROTARY)], "float64")
    assert outcomes["wide"].note.startswith("not ort: the contrib operators have no float64")
    assert "com.microsoft" not in model.opset_imports


HEADS = ((4, 2), (6, 2), (3, 3), (8, 1))
PASTS = (None, 0, 4)
BATCHES = (1, 3)


def causal_cases():
    variants = {
        "plain": {},
        "window": {"left_window_size": 1},
        "self": {"left_window_size": 0},
        "softcap": {"softcap": 1.5},
        "negative": {"scale": -0.7},
        "zero": {"scale": 0.0},
        "right": {"is_causal": False, "right_window_size": 0},
    }
    shapes = itertools.product(HEADS, BATCHES, PASTS, (1, 5))
    for count, (heads, batch, past, length) in enumerate(shapes):
        key = list(variants)[count % len(variants)]
        attention = {"is_causal": True, **variants[key]}
        sizes = {"batch": batch, "length": length, "past_length": past}
        sizes |= {"capacity": past + length + 2} if past is not None and count % 2 else {}
        inputs = (*GAINS, *tables("(B, S, R/2)"), *([SINK] if count % 3 == 0 else []))
        name = f"{key}-{heads}-{batch}-{past}-{length}-{'capacity' in sizes}"
        yield case(
            name,
            heads=heads,
            head_size=16,
            rotary=ROTARY,
            inputs=inputs,
            sizes=sizes,
            num_outputs=1 + 2 * (count % 2),
            **attention,
        )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_causal_attention_is_one_group_query_attention(dtype):
    cases = list(causal_cases())
    assert {"cache_length" in found.inputs for found in cases} == {True, False}
    served(cases, GROUPED, dtype)


def in_one_step(cases, dtype="float32"):
    """The lowered model of cases with one row or one token, whose shapes say so, and its GroupQueryAttention nodes."""
    model = named_model(cases, dtype, attach=False)
    values = {value.name: value for value in model.graph.inputs}
    for found in cases:
        batch, length = found.inputs["query"].shape[:2]
        for name in ("query", "key", "value"):
            dims = list(values[f"{found.id}/{name}"].shape)
            known = [batch if batch == 1 else dims[0], length if length == 1 else dims[1], dims[2]]
            values[f"{found.id}/{name}"].shape = ir.Shape(known)
    lower(model, target="ort", provider="cpu")
    return model, [node for node in model.graph.all_nodes() if node.op_type == GROUPED]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_one_row_or_one_token_needs_no_query_seqlens(dtype):
    cases = [found for found in causal_cases() if 1 in found.inputs["query"].shape[:2] and "past_key" in found.inputs]
    grown = {"batch": 1, "length": 5, "past_length": 4}
    cases.append(
        case("grown", inputs=(*GAINS, *tables("(B, S, R/2)")), rotary=ROTARY, sizes=grown, is_causal=True, num_outputs=3)
    )
    model, nodes = in_one_step(cases, dtype)
    assert len(nodes) == len(cases) and {"cache_length" in found.inputs for found in cases} == {True, False}
    assert max(len(node.inputs) for node in nodes) <= 12
    assert not judged(model, cases, dtype)


@pytest.mark.parametrize("lengths", [[9, 0], [-1, 0], [2**32, 0], [2**63 - 1, 0], [-(2**63), 0], [3]])
def test_lengths_that_a_fixed_cache_has_not_are_refused(lengths):
    """onnxruntime 1.24 and 1.25 alone write behind the cache."""
    found = case("step", inputs=GAINS, is_causal=True, sizes={"length": 1, "past_length": 3, "capacity": 8}, num_outputs=3)
    model, _ = in_one_step([found])
    feeds = feeds_of(model, [found], "float32")
    run_ort(model, feeds)
    with pytest.raises(Exception, match=r"out of data bounds|INVALID_ARGUMENT|[Ii]nvalid"):
        run_ort(model, feeds | {"step/cache_length": np.array(lengths, np.int64)})


MASKS = list(
    itertools.product(("bool mask", "float mask", "logits"), ("(B, 1, S, T)", "(T)", "(Hq, 1, T)", "(B, Hq, S, T)", "(S, 1)"))
)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_masks_of_causal_attention(dtype):
    cases = []
    for count, (values, shape) in enumerate(MASKS):
        bias = optional("attention_bias", shape, values)
        sizes = ({}, {"past_length": 3}, {"past_length": 3, "capacity": 11, "batch": 3})[count % 3]
        found = case(f"{values}-{shape}", inputs=(*GAINS, bias), is_causal=True, sizes=sizes, left_window_size=(-1, 1)[count % 2])
        mask = found.inputs["attention_bias"]
        if shape == "(B, 1, S, T)":  # one row sees nothing at all, another nothing that causality leaves
            mask[0, 0, 1, :] = mask[0, 0, 0, :1] = False if values == "bool mask" else -np.inf
        cases.append(found)
    served(cases, GROUPED, dtype)


def test_the_lowest_number_is_no_mask():
    cases = []
    for causal, heads in ((True, (4, 2)), (False, (4, 2)), (False, (4, 4))):
        name = f"lowest-{causal}-{heads}"
        found = case(
            name, inputs=(*GAINS, optional("attention_bias", "(B, 1, S, T)", "float mask")), heads=heads, is_causal=causal
        )
        lowest = np.finfo(np.float32).min
        found.inputs["attention_bias"][0, 0, 1, :] = lowest
        found.inputs["attention_bias"][0, 0, 2, :] = [lowest, *[-np.inf] * 4]
        cases.append(found)
    model, outcomes = lowered(cases)
    assert {outcome.target for outcome in outcomes.values()} == {"ort"}
    assert not judged(model, cases)


def test_a_float32_bias_of_float16_tensors_keeps_its_lowest_number():
    bias = optional("attention_bias", "(B, 1, S, T)", "logits")
    found = case("wide-bias", inputs=(*GAINS, bias), is_causal=True, sizes={"past_length": 3}, num_outputs=3)
    found.inputs["attention_bias"][0, 0, 1, :] = np.finfo(np.float32).min  # as float16 it would be minus infinity
    model = named_model([found], "float16", attach=False)
    name = "wide-bias/attention_bias"
    next(value for value in model.graph.inputs if value.name == name).type = ir.TensorType(ir.DataType.FLOAT)
    AttachBodiesPass()(model)
    (outcome,) = lower(model, target="ort", provider="cpu")
    assert (outcome.target, outcome.note) == ("ort", GROUPED)
    given = rounded(found, "float16") | {"attention_bias": found.inputs["attention_bias"].astype(np.float32)}
    outputs = run_ort(model, {f"wide-bias/{key}": value for key, value in given.items()})
    expected = found.expected({key: value.astype(np.float64) for key, value in given.items()})
    assert np.abs(expected[0][0, 1]).max() > 0.1
    for value, name in zip(expected, ("Y", "present_key", "present_value"), strict=True):
        assert error(outputs[f"wide-bias/{name}"], value) < 4 * np.finfo(np.float16).eps


def test_float16_caches_are_read_as_they_are():
    for sizes in ({"past_length": 3}, {"past_length": 3, "capacity": 9}):
        found = case("narrow", inputs=GAINS, is_causal=True, sizes=sizes, num_outputs=3)
        model, _ = served([found], GROUPED, "float16")
        (node,) = [node for node in model.graph if node.op_type == GROUPED]
        assert [value.name for value in node.inputs[3:5]] == ["narrow/past_key", "narrow/past_value"]
        assert [value.name for value in node.outputs[1:]] == ["narrow/present_key", "narrow/present_value"]


def test_attention_in_both_directions_with_shared_heads_is_a_group_query_attention_that_is_not_causal():
    mask = optional("attention_bias", "(B, 1, S, T)", "bool mask")
    cases = [
        case("shared", inputs=GAINS),
        case("softcap", heads=(3, 3), inputs=GAINS, softcap=2.0),
        case("sink", heads=(3, 3), inputs=(*GAINS, SINK, mask)),
        case("window", inputs=(*GAINS, mask), left_window_size=1, right_window_size=2),
        case("present", inputs=GAINS, num_outputs=3, right_window_size=1),
    ]
    cases[3].inputs["attention_bias"][1, 0, 2, :] = False
    model, _ = served(cases, GROUPED)
    grouped = [node for node in model.graph if node.op_type == GROUPED]
    assert {node.attributes["causal"].as_int() for node in grouped} == {0}
    assert not any("local_window_size" in node.attributes for node in grouped)


def multi_head_cases():
    bias = {values: optional("attention_bias", "(B, 1, S, T)", values) for values in ("bool mask", "float mask", "logits")}
    for head_size in (1, 12, 20, 64):
        yield case(f"size-{head_size}", heads=(3, 3), head_size=head_size, inputs=GAINS, num_outputs=3)
    for name, sizes in {
        "cross": {"key_length": 7},
        "one-key": {"key_length": 1},
        "value-size": {"value_size": 5},
        "past": {"past_length": 4, "length": 3},
        "empty-past": {"past_length": 0, "batch": 1},
    }.items():
        yield case(f"{name}-y", heads=(3, 3), inputs=GAINS, sizes=sizes)
        yield case(f"{name}-present", heads=(3, 3), inputs=GAINS, sizes=sizes, num_outputs=3)
        for values, mask in bias.items():
            found = case(f"{name}-{values}", heads=(3, 3), inputs=(*GAINS, mask), sizes=sizes, right_window_size=1)
            found.inputs["attention_bias"][0, 0, 2, :] = False if values == "bool mask" else -np.inf
            yield found
    # What GroupQueryAttention does not take, causality and windows as a mask.
    yield case(
        "causal-odd-size", heads=(3, 3), head_size=12, inputs=GAINS, is_causal=True, sizes={"past_length": 4}, num_outputs=3
    )
    yield case("causal-value-size", heads=(3, 3), inputs=GAINS, is_causal=True, sizes={"value_size": 5}, left_window_size=1)
    yield case("causal-short-keys", heads=(3, 3), inputs=GAINS, is_causal=True, sizes={"key_length": 3})
    yield case("causal-long-keys", heads=(3, 3), inputs=GAINS, is_causal=True, sizes={"key_length": 9})
    yield case("huge-logits", heads=(3, 3), inputs=GAINS, scale=3e4, is_causal=True, sizes={"key_length": 9})
    offset = case("query-offset", heads=(3, 3), inputs=GAINS, is_causal=True, sizes={"key_length": 9}, left_window_size=3)
    offset.inputs["query_offset"] = np.array([4, 0], dtype=np.int64)
    yield offset
    blind = case("offset-sees-nothing", heads=(3, 3), inputs=GAINS, sizes={"key_length": 4}, left_window_size=1)
    blind.inputs["query_offset"] = np.array([30, -9], dtype=np.int64)
    yield blind


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_rest_is_one_multi_head_attention(dtype):
    model, _ = served(list(multi_head_cases()), MULTI, dtype)
    # With a cache the operator writes its result through these outputs: without them it returns garbage.
    with_past = [node for node in model.graph if node.op_type == MULTI and len(node.inputs) == 8]
    assert len(with_past) >= 8 and all(len(node.outputs) == 3 for node in with_past)
    assert not any("unidirectional" in node.attributes for node in model.graph if node.op_type == MULTI)


REFUSALS = {
    "GroupQueryAttention needs key and value heads of one size that is known": {"sizes": {"value_size": 3}, "is_causal": True},
    "GroupQueryAttention needs heads of a multiple of 8 values, and these have 12": {"head_size": 12},
    "GroupQueryAttention has no query_offset": {"offset": True},
    "GroupQueryAttention needs as many new keys as queries, which the shapes do not say": {"sizes": {"key_length": 4}},
    "GroupQueryAttention with a cache is causal": {"sizes": {"past_length": 2}},
    "MultiHeadAttention shares no keys between heads": {"sizes": {"key_length": 4}},
    "MultiHeadAttention has no soft cap": {"heads": (3, 3), "softcap": 2.0, "sizes": {"key_length": 4}},
    "MultiHeadAttention has no sink": {"heads": (3, 3), "inputs": (SINK,), "sizes": {"key_length": 4}},
    "MultiHeadAttention has no fixed-size cache": {"heads": (3, 3), "sizes": {"past_length": 2, "capacity": 9}},
    "MultiHeadAttention with a cache needs": {"heads": (3, 3), "sizes": {"past_length": 2, "value_size": 3}},
    "no contrib operator clamps logits": {"logit_clamp": 0.5},
    "compute the softmax in float32, and the spec asks for float64": {"softmax_precision": "float64", "is_causal": True},
}


@pytest.mark.parametrize("reason", REFUSALS)
@pytest.mark.parametrize("opset", [20, 23])
def test_what_is_refused_has_its_reason_and_is_right_all_the_same(reason, opset):
    parts = dict(REFUSALS[reason])
    offset = parts.pop("offset", False)
    found = case("refused", **{"inputs": GAINS, **parts})
    if offset:
        found.inputs["query_offset"] = np.array([1, 0], dtype=np.int64)
    model, outcomes = lowered([found], opset=opset)
    outcome = outcomes["refused"]
    assert outcome.target == ("onnx" if opset == 23 else "primitive")
    assert outcome.note.startswith("not ort: ") and reason in outcome.note
    assert "com.microsoft" not in model.opset_imports and not {GROUPED, MULTI} & set(operators(model))
    assert not judged(model, [found])


def test_lengths_without_names_are_not_taken_for_equal():
    found = case("nameless", inputs=GAINS, is_causal=True)
    model = named_model([found])
    for value in model.graph.inputs[:2]:
        value.shape = ir.Shape([None, None, value.shape[2]])
    (outcome,) = lower(model, target="ort", provider="cpu")
    assert outcome.target == "primitive" and "which the shapes do not say" in outcome.note
    # One rotary table for both says it.
    turned = case("turned", inputs=(*GAINS, *tables("(S, R/2)")), rotary=ROTARY, is_causal=True)
    model = named_model([turned])
    for value in model.graph.inputs[:2]:
        value.shape = ir.Shape([None, None, value.shape[2]])
    (outcome,) = lower(model, target="ort", provider="cpu")
    assert (outcome.target, outcome.note) == ("ort", GROUPED)


PARTLY_PLAIN = {
    "kind l2": {"norm": NormSpec(q_kind="l2", k_kind="l2", epsilon_mode="clamp", q_epsilon=1e-6)},
    "epsilon_mode outside_sqrt": {"norm": NormSpec(q_kind="rms", k_kind="rms", epsilon_mode="outside_sqrt", q_epsilon=1e-6)},
    "epsilon 0": {"norm": NormSpec(q_kind="rms", k_kind="rms")},
    "2 groups": {"norm": NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6, groups=2)},
    "offset nor sections": {"rotary": RotarySpec(order="after_norm", sections=2), "inputs": tables("(S, R/2)")},
    "two halves": {"rotary": ROTARY, "inputs": tables("(S, R)")},
    "tables per head": {"heads": (4, 4), "rotary": ROTARY, "inputs": tables("(B, Hq, S, R/2)")},
}


@pytest.mark.parametrize("reason", PARTLY_PLAIN)
def test_a_norm_or_rotary_without_an_operator_is_plain_and_reported(reason):
    found = case(f"plain-{reason}", is_causal=True, **PARTLY_PLAIN[reason])
    model, outcomes = served([found], GROUPED)
    assert outcomes[found.id].note.startswith(f"{GROUPED}; partly plain operators: ") and reason in outcomes[found.id].note
    assert "Softmax" not in operators(model)


@pytest.mark.parametrize("order", ["before_cast", "after_cast"])
def test_the_rounding_of_the_norm_is_that_of_the_spec(order):
    rng = np.random.default_rng(5)
    x, weight = rng.normal(size=(3, 7, 64)).astype(np.float16), rng.normal(size=16).astype(np.float16)
    spec = QKNormRotarySpec(num_heads=4, kind="rms", epsilon=1e-6, weight_order=order)
    found = {}
    for target in ("primitive", "ort"):
        values = {
            name: ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT16))
            for name, shape in (("x", ["b", "s", 64]), ("weight", [16]))
        }
        node = make_rotary_node(spec, RotaryInputs(**values), name="prepare")
        model = ir.Model(ir.Graph(list(values.values()), node.outputs, nodes=[node], opset_imports={"": 20}), ir_version=10)
        AttachBodiesPass()(model)
        lower(model, target=target, provider="cpu")
        (found[target],) = run_ort(model, {"x": x, "weight": weight}, level="ORT_DISABLE_ALL").values()
    wide = x.astype(np.float64).reshape(3, 7, 4, 16)
    row = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    exact = (row * weight).astype(np.float16) if order == "before_cast" else (row.astype(np.float16) * weight)
    other = (row.astype(np.float16) * weight) if order == "before_cast" else (row * weight).astype(np.float16)
    assert (found["ort"] == found["primitive"]).mean() > 0.99
    assert (found["ort"].reshape(exact.shape) == exact).mean() > 0.99 > (found["ort"].reshape(other.shape) == other).mean()
