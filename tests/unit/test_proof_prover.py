"""The prover keeps right rewrites, whatever they fold, and refuses wrong ones, whatever the field."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from qknorm_onnx.proof import RegionProver
from qknorm_onnx.spec.qk_norm_spec import NormSpec, RotarySpec
from tests.contract.case_models import model_of
from tests.contract.spec_cases import Case, case, norm_gains, optional, tables

GAINS = norm_gains()


def base(**changes: Any) -> Case:
    arguments: dict[str, Any] = {
        "norm": NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-5),
        "rotary": RotarySpec(order="after_norm"),
        "inputs": (*GAINS, *tables("(B, S, R/2)")),
        "is_causal": True,
        "left_window_size": 3,
    }
    return case("region", **{**arguments, **changes})


def region(of: Case, dtype: str = "float32", *, weights: dict[str, Any] | None = None) -> ir.Model:
    """A subgraph of one canonical node with symbolic batch and length; gains are its weights."""
    of = dataclasses.replace(of, inputs={**of.inputs, **(weights or {})})
    model = model_of([of], dtype, constants=lambda name: name.endswith(("weight", "q_scale")))
    for value in model.graph.inputs:
        assert value.shape is not None
        names: list[Any] = ["batch", "seq"] if len(value.shape) >= 3 else ["seq"]
        if value.name.endswith("attention_bias"):
            names = ["batch", 1, "seq", "seq"]
        value.shape = ir.Shape([*names, *value.shape[len(names) :]])
    return model


def mutant(of: Case, **parts: dict[str, Any]) -> Case:
    new = {part: dataclasses.replace(getattr(of.spec, part), **fields) for part, fields in parts.items()}
    return dataclasses.replace(of, spec=dataclasses.replace(of.spec, **new))


def test_equal_subgraphs_are_proven_and_left_alone():
    old, new = region(base()), region(base())
    before = [ir.to_proto(model).SerializeToString() for model in (old, new)]
    proof = RegionProver().prove(old, new)
    assert proof.verdict == "proven", proof.reason
    assert proof.max_difference == 0
    assert [ir.to_proto(model).SerializeToString() for model in (old, new)] == before


MUTANTS: list[dict[str, dict[str, Any]]] = [
    {"norm": {"epsilon_mode": "clamp"}},
    {"norm": {"epsilon_mode": "outside_sqrt"}},
    {"norm": {"q_epsilon": 2e-6}},
    {"norm": {"k_epsilon": 1.2e-5}},
    {"norm": {"q_kind": "layer"}},
    {"norm": {"axis": "hidden"}},
    {"norm": {"groups": 2}},
    {"rotary": {"order": "before_norm"}},
    {"rotary": {"interleaved": True}},
    {"rotary": {"sections": 2}},
    {"attention": {"scale": 0.36}},
    {"attention": {"left_window_size": 4}},
    {"attention": {"left_window_size": 2}},
    {"attention": {"is_causal": False}},
    {"attention": {"softcap": 50.0}},
    {"attention": {"logit_clamp": 1.0}},
]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("change", MUTANTS, ids=str)
def test_a_wrong_rewrite_is_refused(change: dict[str, dict[str, Any]], dtype: str):
    of = base()
    proof = RegionProver().prove(region(of, dtype), region(mutant(of, **change), dtype))
    assert proof.verdict == "refused"
    assert "output 0 differs by" in proof.reason
    assert proof.max_difference > 1e-6


def test_wrong_weights_are_refused():
    of = base(inputs=(*norm_gains("H, D"), *tables("(B, S, R/2)")))
    weight = of.inputs["q_norm_weight"]
    swapped = weight[[1, 0, 2, 3]]
    for wrong in (swapped, np.broadcast_to(weight[0], weight.shape), weight + 1e-3):
        assert RegionProver().prove(region(of), region(of, weights={"q_norm_weight": wrong})).verdict == "refused"


def test_constants_folded_into_float32_are_allowed():
    """1 / sqrt(D) in the weight, the scale in the weight: right in float64 up to the rounding of the constant."""
    norm = NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6)
    for scale in (1 / 3, 100.0):
        of = base(norm=norm, scale=scale)
        folded = mutant(of, attention={"scale": 1.0})
        proof = RegionProver().prove(region(of), region(folded, weights={"q_norm_weight": of.inputs["q_norm_weight"] * scale}))
        assert proof.verdict == "proven", proof.reason
        assert 0 < proof.max_difference < 1e-4


def test_an_exponent_does_not_hide_what_folding_explains():
    """Squares as a power, as exporters write them: the inputs are negative too, so the exponent must stay 2."""
    text = """<ir_version: 10, opset_import: ["" : 20]> g (float[batch, 8] x) => (float[batch, 1] y)
        <float two = {2.0}, float a = {2000.3}, float b = {1.7}, int64[1] last = {-1}>
        { p = Pow(x, two)  m = ReduceMean(p, last)  r = Mul(m, a)  s = Mul(r, b)  y = Sin(s) }"""
    folded = text.replace("float a = {2000.3}, float b = {1.7}", f"float c = {{{np.float32(2000.3) * np.float32(1.7)}}}")
    new = folded.replace("r = Mul(m, a)  s = Mul(r, b)", "s = Mul(m, c)")
    proof = RegionProver().prove(ir.from_onnx_text(text), ir.from_onnx_text(new))
    assert proof.verdict == "proven" and proof.max_difference > 1e-6, proof
    wrong = RegionProver().prove(ir.from_onnx_text(text), ir.from_onnx_text(new.replace("{2.0}", "{3.0}")))
    assert wrong.verdict == "refused"


def test_another_interface_is_refused():
    old = region(base())
    other_name, other_type = region(base()), region(base())
    other_name.graph.inputs[0].name = "q"
    other_type.graph.inputs[0].type = ir.TensorType(ir.DataType.FLOAT16)
    assert "inputs are" in RegionProver().prove(old, other_name).reason
    assert "types of the inputs" in RegionProver().prove(old, other_type).reason


def test_a_length_of_its_own_is_found_to_be_a_sum():
    """past_key and the mask carry names of their own for what is past + new."""
    of = base(
        rotary=None,
        inputs=(*GAINS, optional("attention_bias", "(B, 1, S, T)", "logits")),
        sizes={"past_length": 4},
        left_window_size=-1,
    )

    def named(model: ir.Model) -> ir.Model:
        for value in model.graph.inputs:
            last = value.shape[-1]
            shapes = {"past_key": ["batch", 2, "past", last], "past_value": ["batch", 2, "past", last]}
            shapes["attention_bias"] = ["batch", 1, "seq", "total"]
            value.shape = ir.Shape(shapes.get(value.name.split("/")[-1], ["batch", "seq", last]))
        return model

    assert RegionProver().prove(named(region(of)), named(region(of))).verdict == "proven"
    wrong = mutant(of, attention={"is_causal": False})
    assert RegionProver().prove(named(region(of)), named(region(wrong))).verdict == "refused"


def test_a_row_that_sees_no_key_must_be_a_number_on_the_new_side():
    of = base(inputs=(*GAINS, *tables("(B, S, R/2)"), optional("attention_bias", "(B, 1, S, T)", "bool mask")))
    assert RegionProver().prove(region(of), region(of)).verdict == "proven"
    # A mask that the new side ignores.
    without = region(of)
    node = next(node for node in without.graph if node.domain == "ai.qknorm")
    names = [value.name for value in node.inputs if value is not None]
    assert any(name.endswith("attention_bias") for name in names)
    bare = base()
    new = region(bare)
    extra = ir.Value(
        name="region/attention_bias", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape(["batch", 1, "seq", "seq"])
    )
    new.graph.inputs.append(extra)
    order = [value.name for value in without.graph.inputs]
    new.graph.inputs.sort(key=lambda value: order.index(value.name))
    proof = RegionProver().prove(without, new)
    assert proof.verdict == "refused", "the mask has an effect"


def plain(*nodes: tuple[str, list[str], str], inputs: dict[str, ir.DataType], output: str) -> ir.Model:
    values = {name: ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(["b", "s", 8])) for name, kind in inputs.items()}
    graph = ir.Graph(list(values.values()), [], nodes=[], opset_imports={"": 20}, name="plain")
    for op_type, names, out in nodes:
        values[out] = ir.Value(name=out, type=ir.TensorType(next(iter(inputs.values()))), shape=ir.Shape(["b", "s", 8]))
        graph.append(ir.Node("", op_type, [values[name] for name in names], outputs=[values[out]], name=out))
    graph.outputs.append(values[output])
    return ir.Model(graph, ir_version=10)


def test_nothing_compared_is_no_proof():
    """0 / 0 everywhere on both sides: equal, and worth nothing."""
    nodes = (("Sub", ["x", "x"], "zero"), ("Div", ["zero", "zero"], "y"))
    model = plain(*nodes, inputs={"x": ir.DataType.FLOAT}, output="y")
    proof = RegionProver().prove(model, model)
    assert proof.verdict == "refused"


def test_nan_on_one_side_is_refused():
    good = plain(("Abs", ["x"], "a"), ("Sqrt", ["a"], "y"), inputs={"x": ir.DataType.FLOAT}, output="y")
    bad = plain(("Sqrt", ["x"], "y"), inputs={"x": ir.DataType.FLOAT}, output="y")
    for old, new in ((good, bad), (bad, good)):
        proof = RegionProver().prove(old, new)
        assert proof.verdict == "refused"
        assert "not finite on one side only" in proof.reason


def test_what_no_runtime_knows_is_unverified_with_a_reason():
    model = plain(("Abs", ["x"], "y"), inputs={"x": ir.DataType.FLOAT}, output="y")
    foreign = model.clone()
    foreign.graph[0].domain = "com.example"
    foreign.opset_imports["com.example"] = 1
    proof = RegionProver().prove(foreign, foreign)
    assert proof.verdict == "unverified"
    assert "com.example" in proof.reason or "Abs" in proof.reason


@pytest.mark.parametrize("kind", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
def test_a_rewrite_that_loses_precision_in_its_own_type_is_refused(kind: ir.DataType):
    """x + k^8 - k^8 is x in float64; in a half type little of x is left."""
    inputs = {"x": kind, "k": kind}
    old = plain(("Sub", ["k", "k"], "zero"), ("Add", ["x", "zero"], "y"), inputs=inputs, output="y")
    power = (("Mul", ["k", "k"], "k2"), ("Mul", ["k2", "k2"], "k4"), ("Mul", ["k4", "k4"], "k8"))
    new = plain(*power, ("Add", ["x", "k8"], "sum"), ("Sub", ["sum", "k8"], "y"), inputs=inputs, output="y")
    assert RegionProver().prove(old, old).verdict == "proven"
    proof = RegionProver().prove(old, new)
    assert proof.verdict == "refused"
    assert "in its own type" in proof.reason


def test_layers_of_equal_structure_share_their_sessions():
    prover = RegionProver()
    random = np.random.default_rng(0)
    of = base()
    for _ in range(3):
        weights = {"q_norm_weight": random.normal(size=8), "k_norm_weight": random.normal(size=8)}
        renamed = dataclasses.replace(of, id=f"layer{random.integers(1000)}")
        layer = region(renamed, weights=weights)
        assert prover.prove(layer, layer).verdict == "proven"
        wrong = region(renamed, weights={**weights, "q_norm_weight": weights["q_norm_weight"][::-1].copy()})
        assert prover.prove(layer, wrong).verdict == "refused", "the weights are the layer's own, the session is shared"
    assert len(prover._sides._runners) == 1


def test_every_symbol_keeps_one_size():
    from qknorm_onnx.proof.region_inputs import region_cases
    from qknorm_onnx.proof.region_sizes import SymbolTable

    shapes = {"q": ["b", "s", 8], "past": ["b", 2, "p", 4], "mask": ["b", 1, "s", ir.SymbolicDim("p + s")], "scalar": []}
    values = [
        ir.Value(name=name, type=ir.TensorType(ir.DataType.BOOL if name == "mask" else ir.DataType.FLOAT), shape=ir.Shape(shape))
        for name, shape in shapes.items()
    ]
    batches = set()
    for found in region_cases(values, SymbolTable(values), None, seed=0):
        (b, s, _), (b2, _, p, _), (b3, _, s2, total) = (found.inputs[name].shape for name in ("q", "past", "mask"))
        assert (b, s) == (b2, s2) == (b3, s)
        assert total == p + s
        batches.add(b)
    assert batches == {1, 2, 3}
