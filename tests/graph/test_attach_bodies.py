"""The pass that attaches function bodies: one per distinct body, deterministic, idempotent, and gone with its nodes."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from qknorm_onnx.graph.canonical.qk_norm_node import RotaryInputs, make_rotary_node
from qknorm_onnx.graph.passes.attach_bodies import AttachBodiesPass
from qknorm_onnx.spec.qk_norm_spec import QKNormRotarySpec, SpecError
from qknorm_onnx.spec.signature import NAMES_PER_OPERATOR, numbered_name
from qknorm_onnx.spec.variants.variant import norm_gains
from tests.contract.case_models import errors, feeds_of, model_of, run_ort
from tests.contract.spec_cases import case, group
from tests.graph.overloaded import with_overloads


def layers(count=3):
    return [case(f"layer{index}", inputs=norm_gains(), is_causal=True) for index in range(count)]


def test_equal_nodes_share_one_body():
    model = model_of([*layers(), case("other", inputs=norm_gains())], attach=False)
    assert not model.functions
    assert AttachBodiesPass()(model).modified
    assert len(model.functions) == 2
    assert {node.op_identifier() for node in model.graph} == set(model.functions)


def test_a_second_run_changes_nothing_and_two_runs_give_equal_bytes():
    cases = group("attention")
    model = model_of(cases)
    data = ir.to_proto(model).SerializeToString(deterministic=True)
    assert not AttachBodiesPass()(model).modified
    assert data == ir.to_proto(model).SerializeToString(deterministic=True)
    assert data == ir.to_proto(model_of(cases)).SerializeToString(deterministic=True)
    read_back = ir.from_proto(onnx.ModelProto.FromString(data))
    assert not AttachBodiesPass()(read_back).modified
    assert data == ir.to_proto(read_back).SerializeToString(deterministic=True)


def test_the_file_is_valid_and_says_what_it_needs():
    model = model_of(layers(), "float16", attach=False)
    model.ir_version = 8
    del model.graph.opset_imports["ai.qknorm"]
    AttachBodiesPass()(model)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    assert proto.ir_version == 8
    assert {entry.domain: entry.version for entry in proto.opset_import} == {"": 18, "ai.qknorm": 1}


def test_a_newer_ir_version_stays():
    model = model_of(layers(), attach=False)
    model.ir_version = 12
    AttachBodiesPass()(model)
    assert model.ir_version == 12


def test_shapes_are_known_behind_every_node():
    # B61
    proto = ir.to_proto(model_of(layers(), "float32"))
    for output in proto.graph.output:
        output.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(proto, strict_mode=True)
    assert [len(output.type.tensor_type.shape.dim) for output in inferred.graph.output] == [3, 3, 3]
    declared = [output.shape for output in model_of(layers(), "float32").graph.outputs]
    assert [shape[2] for shape in declared] == [32, 32, 32]


def test_bodies_of_nodes_that_are_gone_are_removed_and_other_functions_stay():
    model = model_of(layers())
    x = ir.Value(name="x")
    node = ir.Node("", "Relu", [x])
    foreign = ir.Function(
        "my.domain", "Mine", graph=ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 18}), attributes=[]
    )
    model.functions[foreign.identifier()] = foreign
    model.graph.outputs.clear()
    for old in list(model.graph):
        model.graph.remove(old)
    assert AttachBodiesPass()(model).modified
    assert list(model.functions.values()) == [foreign]
    assert "ai.qknorm" not in model.opset_imports


def test_functions_around_canonical_nodes_are_inlined():
    # In a function the types of a node's inputs are not known.
    def typed(name):
        return ir.Value(name=name, shape=ir.Shape(["B", "S", 8]), type=ir.TensorType(ir.DataType.FLOAT))

    def function(name, parameter, node):
        imports = {"": 18, "my.domain": 1}
        graph = ir.Graph([parameter], node.outputs, nodes=[node], opset_imports=imports, name=name)
        return ir.Function("my.domain", name, graph=graph, attributes=[])

    def call(name, argument, output):
        node = ir.Node("my.domain", name, [argument])
        node.outputs[0].name = output
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        return node

    spec = QKNormRotarySpec(num_heads=2, kind="rms", epsilon=1e-6)
    inner, middle, outer = typed("inner_x"), typed("middle_x"), typed("x")
    block = function("Block", inner, make_rotary_node(spec, RotaryInputs(x=inner), name="inner"))
    stack = function("Stack", middle, call("Block", middle, "middle_y"))
    calls = [call("Stack", outer, "y"), call("Block", outer, "z")]
    graph = ir.Graph([outer], [node.outputs[0] for node in calls], nodes=calls, opset_imports={"": 18, "my.domain": 1}, name="g")
    model = ir.Model(graph, ir_version=10, functions=[block, stack])
    AttachBodiesPass()(model)
    assert {key[0] for key in model.functions} == {"ai.qknorm"}
    x = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)
    rows = x.reshape(2, 3, 2, 4)
    expected = (rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6)).reshape(2, 3, 8)
    outputs = run_ort(model, {"x": x})
    assert len(outputs) == 2
    assert all(np.allclose(y, expected, atol=1e-6) for y in outputs.values())


def test_a_changed_type_gets_a_new_body():
    cases = layers(1)
    model = model_of(cases)
    old = [str(function) for function in model.functions.values()]
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.type = ir.TensorType(ir.DataType.FLOAT)
    assert AttachBodiesPass()(model).modified
    assert [str(function) for function in model.functions.values()] != old
    outputs = run_ort(model, feeds_of(model, cases, "float32"))
    assert max(errors(cases, outputs, "float32").values()) < 1e-6


@pytest.mark.parametrize(("imports", "message"), [({}, "imports no ONNX opset"), ({"": 17}, "'layer0'.*opset 17.*18")])
def test_an_opset_without_bodies_is_refused(imports, message):
    model = model_of(layers(1), attach=False)
    model.graph.opset_imports.clear()
    model.graph.opset_imports.update(imports)
    with pytest.raises(SpecError, match=message):
        AttachBodiesPass()(model)


def distinct(count):
    """Cases whose bodies all differ: each has another scale."""
    return [case(f"layer{index}", inputs=norm_gains(), is_causal=True, scale=0.1 + index / 64) for index in range(count)]


def test_every_body_has_a_name_of_its_own_in_the_order_of_the_nodes():
    first, second, third = distinct(3)
    model = model_of([second, first, dataclasses.replace(second, id="again"), third])
    assert [node.op_type for node in model.graph] == [
        "QKNormAttention", "QKNormAttention_2", "QKNormAttention", "QKNormAttention_3"
    ]  # fmt: skip
    assert list(model.functions) == [
        ("ai.qknorm", name, "") for name in ("QKNormAttention", "QKNormAttention_2", "QKNormAttention_3")
    ]
    # Without its first node, all move up.
    output = model.graph.node(1).outputs[0]
    for node in (model.graph.node(0), model.graph.node(2)):
        model.graph.outputs.remove(node.outputs[0])
        model.graph.remove(node)
    assert AttachBodiesPass()(model).modified
    assert [node.op_type for node in model.graph] == ["QKNormAttention", "QKNormAttention_2"]
    assert output.producer().op_type == "QKNormAttention" and len(model.functions) == 2


def test_overloads_of_version_0_1_0_become_names():
    cases = distinct(3)
    model = model_of(cases)
    wanted = ir.to_proto(model).SerializeToString(deterministic=True)
    old = with_overloads(model)
    assert len({node.op_type for node in old.graph}) == 1 and len(old.functions) == 3
    assert AttachBodiesPass()(old).modified
    assert ir.to_proto(old).SerializeToString(deterministic=True) == wanted


def test_bodies_without_a_name_are_put_into_the_places_of_their_nodes():
    cases = distinct(NAMES_PER_OPERATOR + 3)
    model = model_of(cases, "float32", attach=False)
    attach = AttachBodiesPass()
    attach(model)
    assert attach.inlined == tuple(found.id for found in cases[NAMES_PER_OPERATOR:])
    kept = {node.op_type for node in model.graph if node.domain == "ai.qknorm"}
    assert kept == {numbered_name("QKNormAttention", number) for number in range(1, NAMES_PER_OPERATOR + 1)}
    assert {name for _, name, _ in model.functions} == kept
    outputs = run_ort(model, feeds_of(model, cases, "float32"))
    assert max(errors(cases, outputs, "float32").values()) < 1e-5
    data = ir.to_proto(model).SerializeToString(deterministic=True)
    assert not AttachBodiesPass()(model).modified
    assert data == ir.to_proto(model).SerializeToString(deterministic=True)
