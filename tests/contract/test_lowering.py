"""Contract 8: every lowering's graph == the reference; what a target cannot say is reported, never ignored."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

import qknorm_onnx as qk
from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.canonical.known_fields import BODY_FIELDS
from qknorm_onnx.graph.canonical.qk_norm_node import RotaryInputs, make_rotary_node
from qknorm_onnx.graph.passes.attach_bodies import AttachBodiesPass
from qknorm_onnx.lowering import custom_op
from qknorm_onnx.lowering.emit.target import Emitted, Target
from qknorm_onnx.lowering.registry import TARGETS, lower
from qknorm_onnx.spec.qk_norm_spec import NormSpec, QKNormRotarySpec, QKNormSpec, RotarySpec, SpecError
from qknorm_onnx.spec.reference import qk_norm_rotary
from qknorm_onnx.spec.targets import TARGET_NAMES, UnknownTargetError
from qknorm_onnx.spec.variants.variant import norm_gains
from tests.contract.case_models import error, errors, feeds_of, model_of, over_budget, run_ort
from tests.contract.spec_cases import GROUPS, case, group, optional, tables

EXACT = 1e-12
# ONNX Runtime's own Attention operator refuses empty batches and lengths.
WITH_ATTENTION_OP = [name for name in GROUPS if name != "empty"]


def too_large(found, bound=EXACT):
    return {name: value for name, value in found.items() if not value <= bound}


def lowered(cases, target, dtype="float64", opset=23, **options):
    model = model_of(cases, dtype, opset=opset, **{"attach": False, **options})
    return model, lower(model, target=target, provider="cpu")


def operators(model):
    return Counter(f"{node.domain}::{node.op_type}".removeprefix("::") for node in model.graph.all_nodes())


def chain(target):
    """The target and those that it falls back to."""
    return [target, *chain(TARGETS[target].fallback)] if target else []


# The standard Attention operator needs opset 23, and ONNX Runtime's refuses empty batches and lengths.
STANDARD_OPSET = 23
WITH_STANDARD = [target for target in TARGETS if "onnx" in chain(target)]


def groups_of(target):
    return WITH_ATTENTION_OP if target in WITH_STANDARD else GROUPS


@pytest.mark.parametrize(("target", "name"), [(target, name) for target in TARGETS for name in groups_of(target)])
def test_every_target_is_the_reference(target, name):
    cases = group(name)
    opset = STANDARD_OPSET if target in WITH_STANDARD else TARGETS[target].minimum_opset
    model, outcomes = lowered(cases, target, opset=opset)
    assert [outcome.name for outcome in outcomes] == [found.id for found in cases]
    assert {outcome.target for outcome in outcomes} <= set(chain(target))
    if TARGETS[target].emit is not None:
        assert not model.functions and "ai.qknorm" not in model.opset_imports
    if target == "primitive":
        assert not {"RMSNormalization", "RotaryEmbedding", "Attention"} & set(operators(model))
    assert not too_large(errors(cases, run_ort(model, feeds_of(model, cases))))


def test_each_name_has_its_target():
    assert tuple(TARGETS) == TARGET_NAMES, (
        "TARGETS of lowering/registry.py has one entry for each name of spec/targets.py, in order"
    )


@pytest.mark.parametrize("call", [qk.fuse, qk.export])
def test_each_name_is_explained(call):
    missing = [name for name in TARGETS if f'"{name}"' not in call.__doc__]
    assert not missing, f"say what {missing} is under `target` in the docstring of {call.__module__}.{call.__qualname__}"


@pytest.mark.parametrize("name", WITH_ATTENTION_OP)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_onnx_stays_within_the_budget(name, dtype):
    cases = group(name, every=2 if dtype == "float32" else 5)
    model, _ = lowered(cases, "onnx", dtype, opset=24 if dtype == "float16" else 23)
    assert not over_budget(cases, run_ort(model, feeds_of(model, cases, dtype)), dtype)


def test_onnx_means_the_same_to_onnxs_evaluator():
    # In float32: the evaluator has no norms that keep their statistics in float64 (stash_type).
    cases = [found for name in WITH_ATTENTION_OP for found in group(name, every=7)]
    model, _ = lowered(cases, "onnx", "float32")
    evaluator = ReferenceEvaluator(ir.to_proto(model))
    outputs = dict(zip(evaluator.output_names, evaluator.run(None, feeds_of(model, cases, "float32")), strict=True))
    assert not over_budget(cases, outputs, "float32")


def test_a_qwen3_attention_becomes_the_five_standard_operators():
    rotary = RotarySpec(order="after_norm")
    found = case("qwen3", rotary=rotary, inputs=(*norm_gains(), *tables("(1, S, R/2)")), is_causal=True)
    model, (outcome,) = lowered([found], "onnx", "float32")
    assert (outcome.target, outcome.note) == ("onnx", "")
    counts = operators(model)
    assert (counts["RMSNormalization"], counts["RotaryEmbedding"], counts["Attention"]) == (2, 2, 1)
    assert not {"Softmax", "MatMul", "Where", "Range", "ReduceMean"} & set(counts)
    # Batch 3 with tables of batch 1: RotaryEmbedding itself would refuse them.
    assert not over_budget([found], run_ort(model, feeds_of(model, [found], "float32")), "float32")
    wider = dataclasses.replace(
        found, inputs={k: v if v.shape[0] == 1 or v.ndim < 3 else np.tile(v, (3, 1, 1)) for k, v in found.inputs.items()}
    )
    assert wider.inputs["query"].shape[0] == 6 and wider.inputs["cos"].shape[0] == 1
    assert not over_budget([wider], run_ort(model, feeds_of(model, [wider], "float32")), "float32")


def test_tables_for_all_heads_may_have_a_heads_axis():
    rotary = RotarySpec(order="after_norm")
    found = case("four-axes", rotary=rotary, inputs=(*norm_gains(), *tables("(1, 1, S, R/2)")))
    model = model_of([found], "float32", opset=23)
    for value in model.graph.inputs:
        if value.name.endswith(("cos", "sin")):
            value.shape = ir.Shape([None, 1, None, 4])
    (outcome,) = lower(model, target="onnx", provider="cpu")
    assert outcome.note == "" and operators(model)["RotaryEmbedding"] == 2
    assert not over_budget([found], run_ort(model, feeds_of(model, [found], "float32")), "float32")


PARTLY_PLAIN = {
    "kind l2": {"norm": NormSpec(q_kind="l2", k_kind="l2", epsilon_mode="clamp", q_epsilon=1e-6)},
    "epsilon_mode clamp": {"norm": NormSpec(q_kind="rms", k_kind="rms", epsilon_mode="clamp", q_epsilon=1e-6)},
    "epsilon 0": {"norm": NormSpec(q_kind="rms", k_kind="rms")},
    "2 groups": {"norm": NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6, groups=2)},
    "clamp logits": {"logit_clamp": 0.5},
    "no sink": {"inputs": (optional("head_sink", "(Hq)", "logits"),)},
    "fixed-size cache": {"sizes": {"past_length": 3, "capacity": 9}},
    "offset nor sections": {"rotary": RotarySpec(order="after_norm", sections=2), "inputs": tables("(S, R/2)")},
    "two halves": {"rotary": RotarySpec(order="after_norm"), "inputs": tables("(S, R)")},
    "tables per head": {"rotary": RotarySpec(order="after_norm"), "inputs": tables("(B, 1, S, R/2)")},
}


@pytest.mark.parametrize("reason", PARTLY_PLAIN)
def test_what_standard_operators_cannot_say_is_plain_and_reported(reason):
    found = case(f"plain-{reason}", **PARTLY_PLAIN[reason])
    model, (outcome,) = lowered([found], "onnx", "float32")
    assert outcome.target == "onnx" and reason in outcome.note
    assert not over_budget([found], run_ort(model, feeds_of(model, [found], "float32")), "float32")


def test_a_node_without_any_standard_stage_becomes_primitive():
    found = case("nothing", norm=PARTLY_PLAIN["kind l2"]["norm"], logit_clamp=1.0)
    _, (outcome,) = lowered([found], "onnx")
    assert outcome.target == "primitive"
    assert outcome.note.startswith("not onnx: ") and "l2" in outcome.note and "clamp" in outcome.note


@pytest.mark.parametrize("opset", [18, 20, 22])
def test_an_older_model_is_raised_to_opset_23(opset):
    cases = group("attention", every=9)
    model, outcomes = lowered(cases, "onnx", opset=opset)
    assert model.opset_imports[""] == 23
    assert {outcome.target for outcome in outcomes} == {"onnx"}
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert not too_large(errors(cases, run_ort(model, feeds_of(model, cases))))


def test_a_model_that_cannot_be_raised_stays_and_says_so():
    cases = [case("kept", inputs=norm_gains())]
    model = model_of(cases, opset=18)
    # GroupNormalization-18 scales per group, and how many channels a group has is not known here.
    x, scale, bias = (ir.Value(name=name, type=ir.TensorType(ir.DataType.DOUBLE)) for name in ("x", "scale", "bias"))
    model.graph.inputs.extend([x, scale, bias])
    norm = ir.Node("", "GroupNormalization", [x, scale, bias], [ir.AttrInt64("num_groups", 1)])
    model.graph.append(norm)
    model.graph.outputs.append(norm.outputs[0])
    outcomes = lower(model, target="onnx", provider="cpu")
    assert model.opset_imports[""] == 18
    assert outcomes[0].target == "primitive"
    assert outcomes[0].note == "not onnx: it needs opset 23, the model has 18 and could not be converted"


@pytest.mark.parametrize(("dtype", "native"), [("float32", True), ("float16", False)])
def test_custom_op_keeps_the_node_and_its_body_and_says_where_no_kernel_is(dtype, native, monkeypatch):
    monkeypatch.setattr(custom_op, "KERNEL_DTYPES", {("QKNormAttention", "cpu"): ("float32", "float64")})
    model, (outcome,) = lowered([case("kept", inputs=norm_gains())], "custom-op", dtype, opset=18)
    assert (outcome.name, outcome.target) == ("kept", "custom-op")
    assert outcome.note == ("" if native else "no native cpu kernel for float16: runs as its function body")
    assert operators(model) == {"ai.qknorm::QKNormAttention": 1}
    assert len(model.functions) == 1


def test_what_ort_refuses_falls_to_the_next_target():
    cases = [case("ort", inputs=norm_gains())]  # shapes that do not say that there are as many keys as queries
    _, (outcome,) = lowered(cases, "ort", "float32")
    assert outcome.target == "onnx" and outcome.note.startswith("not ort: ")
    model, (older,) = lowered(cases, "ort", "float32", opset=18)
    assert older.target == "primitive" and model.opset_imports[""] == 18
    assert "not ort" in older.note and "not onnx" in older.note


def test_unknown_targets_and_providers_are_errors():
    model = model_of([case("x")])
    with pytest.raises(UnknownTargetError, match=r"tensorrt.*custom-op"):
        lower(model, target="tensorrt", provider="cpu")
    with pytest.raises(InputError, match=r"tpu.*cpu"):
        lower(model, target="onnx", provider="tpu")


def test_targets_are_validated():
    with pytest.raises(ValueError, match="other than itself"):
        Target(name="x", minimum_opset=18, known_fields=BODY_FIELDS, fallback="x")
    with pytest.raises(ValueError, match="minimum_opset is 17"):
        Target(name="x", minimum_opset=17, known_fields=BODY_FIELDS)
    with pytest.raises(ValueError, match="known_fields"):
        Target(name="x", minimum_opset=18, known_fields=frozenset())
    assert all(target.fallback in ("", *TARGETS) for target in TARGETS.values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        TARGETS["onnx"].name = "y"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecOfTomorrow(QKNormSpec):
    dropout: float = dataclasses.field(default=0.0, metadata={"onnx_name": "dropout", "doc": "a field no target knows"})


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_no_target_ignores_a_field_that_it_does_not_know(target, dropout, monkeypatch):
    spec = case("x").spec
    tomorrow = SpecOfTomorrow(attention=spec.attention, norm=spec.norm, rotary=spec.rotary, dropout=dropout)
    model = model_of([case("x")], opset=23)
    inputs = lower.__globals__["read_attention_node"](model.graph.node(0))[1]
    monkeypatch.setitem(lower.__globals__, "read_attention_node", lambda node: (tomorrow, inputs))
    if dropout:
        with pytest.raises(SpecError, match=r"dropout=0\.5"):
            lower(model, target=target, provider="cpu")
        assert operators(model) == {"ai.qknorm::QKNormAttention": 1}
    else:
        assert lower(model, target=target, provider="cpu")


@pytest.mark.parametrize(("field", "value"), [("q_norm", "batch"), ("epsilon_mode", "squared"), ("rotary_order", "around")])
def test_no_target_takes_a_new_value_of_a_known_field_for_an_old_one(field, value, monkeypatch):
    odd = case("odd", norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6))
    path = {"q_norm": ("norm", "q_kind"), "epsilon_mode": ("norm", "epsilon_mode"), "rotary_order": ("rotary", "order")}[field]
    model = model_of([odd], opset=23)
    spec, inputs = lower.__globals__["read_attention_node"](model.graph.node(0))
    object.__setattr__(getattr(spec, path[0]), path[1], value)
    monkeypatch.setitem(lower.__globals__, "read_attention_node", lambda node: (spec, inputs))
    with pytest.raises(SpecError, match=f"is '{value}'; it must be one of"):
        lower(model, target="onnx", provider="cpu")


ROTARY_SPECS = {
    "rms": QKNormRotarySpec(num_heads=4, kind="rms", epsilon=1e-6, rotary=RotarySpec(order="after_norm")),
    "layer-before": QKNormRotarySpec(
        num_heads=4, kind="layer", epsilon=1e-6, rotary=RotarySpec(order="before_norm", interleaved=True)
    ),
    "hidden": QKNormRotarySpec(num_heads=4, kind="rms", epsilon=1e-6, axis="hidden", rotary=RotarySpec(order="after_norm")),
    "l2": QKNormRotarySpec(num_heads=4, kind="l2", epsilon=1e-6, epsilon_mode="clamp"),
    "rotary-only": QKNormRotarySpec(num_heads=4, rotary=RotarySpec(order="after_norm", embedding_dim=4)),
    "nothing": QKNormRotarySpec(num_heads=4),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ROTARY_SPECS)
@pytest.mark.parametrize(("batch", "length"), [(3, 5), (1, 1), (0, 3), (2, 0)])
def test_rotary_nodes_are_the_reference(target, name, batch, length):
    spec = ROTARY_SPECS[name]
    rng = np.random.default_rng(len(name))
    inputs = {"x": rng.normal(size=(batch, length, 32)), "scale": rng.normal(size=(4, 1, 1))}
    if spec.kind != "none":
        inputs |= {"weight": rng.normal(size=(32 if spec.axis == "hidden" else 8)), "bias": rng.normal(size=8)}
    if spec.rotary.order != "none":
        width = (spec.rotary.embedding_dim or 8) // 2
        inputs |= {table: rng.normal(size=(1, length, width)) for table in ("cos", "sin")}
    for dtype, kind, bound in ((np.float64, ir.DataType.DOUBLE, EXACT), (np.float32, ir.DataType.FLOAT, 2e-6)):
        given = {key: value.astype(dtype) for key, value in inputs.items()}
        values = {
            key: ir.Value(name=key, shape=ir.Shape([*[None] * (v.ndim - 1), v.shape[-1]]), type=ir.TensorType(kind))
            for key, v in given.items()
        }
        node = make_rotary_node(spec, RotaryInputs(**values), name="prepare")
        graph = ir.Graph(list(values.values()), node.outputs, nodes=[node], opset_imports={"": 23, "ai.qknorm": 1})
        model = ir.Model(graph, ir_version=10)
        AttachBodiesPass()(model)
        (outcome,) = lower(model, target=target, provider="cpu")
        assert outcome.name == "prepare"
        (y,) = run_ort(model, given).values()
        assert error(y, qk_norm_rotary(spec, given)["Y"]) <= bound


@pytest.mark.parametrize("target", ["primitive", "onnx"])
def test_no_node_is_left_unused(target):
    cases = [found for name in GROUPS for found in group(name, every=3)]
    model, _ = lowered(cases, target, "float16")
    outputs = set(model.graph.outputs)
    assert len(list(model.graph)) > 1000
    idle = [node for node in model.graph if not any(value.uses() or value in outputs for value in node.outputs)]
    assert not idle


def test_names_of_the_graph_are_not_taken_twice():
    cases = [case("layer", inputs=norm_gains()), case("other", inputs=norm_gains())]
    model = model_of(cases)
    for node in model.graph:
        node.name = "same"
    model.graph.inputs[0].name = "same/q_bshd"
    model.graph.inputs[1].name = "same/logits"
    feeds = feeds_of(model_of(cases), cases)
    feeds["same/q_bshd"], feeds["same/logits"] = feeds.pop("layer/query"), feeds.pop("layer/key")
    lower(model, target="primitive", provider="cpu")
    onnx.checker.check_model(ir.to_proto(model))
    assert not too_large(errors(cases, run_ort(model, feeds)))


@pytest.mark.parametrize("target", TARGETS)
def test_nodes_in_the_branches_of_an_if_are_lowered_too(target):
    found = case("branch", inputs=norm_gains(), is_causal=True)
    outer = model_of([found], "float32", opset=23)
    node = outer.graph.node(0)
    outer.graph.outputs.clear()
    outer.graph.remove(node)
    then_branch = ir.Graph([], node.outputs, nodes=[node], name="then")
    zero = ir.Node("", "Identity", [outer.graph.inputs[0]], name="else_identity")
    zero.outputs[0].name = "else_output"
    else_branch = ir.Graph([], zero.outputs, nodes=[zero], name="else")
    condition = ir.Value(name="condition", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.BOOL))
    outer.graph.inputs.append(condition)
    attributes = [ir.AttrGraph("then_branch", then_branch), ir.AttrGraph("else_branch", else_branch)]
    branch = ir.Node("", "If", [condition], attributes, name="if")
    branch.outputs[0].name = "branch_output"
    branch.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    outer.graph.append(branch)
    outer.graph.outputs.append(branch.outputs[0])
    AttachBodiesPass()(outer)
    (outcome,) = lower(outer, target=target, provider="cpu")
    assert outcome.name == "branch"
    if target == "primitive":
        assert "ai.qknorm::QKNormAttention" not in operators(outer)
    feeds = feeds_of(outer, [found], "float32") | {"condition": np.array(True)}
    (y,) = run_ort(outer, feeds).values()
    assert not over_budget([found], {"branch/Y": y}, "float32")


@pytest.mark.parametrize("target", TARGETS)
def test_lowering_twice_changes_nothing_and_two_runs_give_equal_bytes(target):
    cases = group("attention", every=6)
    first, _ = lowered(cases, target)
    second, _ = lowered(cases, target)
    data = ir.to_proto(first).SerializeToString(deterministic=True)
    assert data == ir.to_proto(second).SerializeToString(deterministic=True)
    lower(first, target=target, provider="cpu")
    assert data == ir.to_proto(first).SerializeToString(deterministic=True)


def test_an_emitted_value_says_nothing_by_default():
    assert Emitted(outputs=[]).note == ""
