"""What `qk.export` says where a module and its exported graph mean different things, and where it says nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest
import torch

import qknorm_onnx as qk
from qknorm_onnx.graph.fusion_report import FusedAttention, FusionReport, Surroundings
from qknorm_onnx.graph.spec_comparison import compare_specs
from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormRotarySpec, QKNormSpec, RotarySpec
from qknorm_onnx.torch_export import exporter
from qknorm_onnx.torch_export.operators.modules import QKNormAttention
from qknorm_onnx.torch_export.spec_from_module import ReaderRegistry, read_module

SPEC = QKNormSpec(
    attention=AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=0.25, is_causal=True, left_window_size=7),
    norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=1e-6, k_epsilon=1e-6, weight_order="after_cast"),
    rotary=RotarySpec(order="after_norm"),
)
OPEN = Surroundings(has_mask=False, num_keys=None, is_decode=False)


def changed(part, spec=SPEC, **fields):
    return dataclasses.replace(spec, **{part: dataclasses.replace(getattr(spec, part), **fields)})


def report(spec, name="layers.0.attention", *, around=OPEN, **more):
    return FusionReport(fused=(FusedAttention(name=name, spec=spec, surroundings=around, **more),))


def differing(read, graph, **options):
    found = compare_specs({"layers.0.attention": read}, graph, **options)
    assert bool(found.agreeing) != bool(found.differences) and not found.uncompared
    return {difference.attribute: (difference.module, difference.graph) for difference in found.differences}


@pytest.mark.parametrize(
    ("part", "field", "value", "attribute"),
    [
        ("norm", "q_kind", "layer", "q_norm"),
        ("norm", "k_kind", "none", "k_norm"),
        ("norm", "axis", "hidden", "norm_axis"),
        ("norm", "groups", 2, "norm_groups"),
        ("norm", "q_epsilon", 1e-5, "q_epsilon"),
        ("norm", "epsilon_mode", "clamp", "epsilon_mode"),
        ("rotary", "order", "before_norm", "rotary_order"),
        ("rotary", "interleaved", True, "rotary_interleaved"),
        ("rotary", "embedding_dim", 4, "rotary_embedding_dim"),
        ("attention", "scale", 0.125, "scale"),
        ("attention", "softcap", 30.0, "softcap"),
        ("attention", "is_causal", False, "is_causal"),
        ("attention", "left_window_size", 8, "left_window_size"),
        ("attention", "left_window_size", -1, "left_window_size"),
        ("attention", "q_num_heads", 8, "q_num_heads"),
    ],
)
def test_each_meaning_that_differs_is_named(part, field, value, attribute):
    other = changed(part, **{field: value})
    found = differing(SPEC, report(other))
    assert attribute in found and found[attribute][0] != found[attribute][1]
    assert set(found) <= {attribute, "k_epsilon"}  # without a norm, its epsilon says nothing
    assert attribute in differing(other, report(SPEC))


def test_a_wide_graph_does_not_show_where_a_narrow_type_rounds():
    other = changed("norm", weight_order="before_cast")
    assert differing(SPEC, report(other)) == {}
    assert differing(SPEC, report(other), dtype="bfloat16") == {"norm_weight_order": ("after_cast", "before_cast")}
    assert differing(SPEC, report(changed("attention", softmax_precision="float16")), dtype="float16") == {}


@pytest.mark.parametrize(("dtype", "rounded"), [("float16", 0.17675800621509552), ("bfloat16", 0.17578125)])
def test_a_scale_that_the_exporter_rounded_is_the_same(dtype, rounded):
    module, graph = changed("attention", scale=32**-0.5), changed("attention", scale=rounded)
    assert differing(module, report(graph), dtype=dtype) == {}
    assert set(differing(module, report(graph))) == {"scale"}
    assert set(differing(module, report(changed("attention", scale=1.1 * 32**-0.5)), dtype=dtype)) == {"scale"}


def test_what_the_graph_cannot_show_is_no_difference():
    unlimited = changed("attention", is_causal=False, left_window_size=-1)
    assert set(differing(SPEC, report(unlimited))) == {"is_causal", "left_window_size"}
    masked = dataclasses.replace(OPEN, has_mask=True)
    assert differing(SPEC, report(unlimited, around=masked)) == {}
    assert differing(unlimited, report(SPEC, around=masked)).keys() == {"is_causal", "left_window_size"}  # the node hides more
    assert differing(SPEC, report(changed("attention", left_window_size=6), around=masked)).keys() == {"left_window_size"}
    no_window = changed("attention", left_window_size=-1)
    assert differing(SPEC, report(no_window, around=dataclasses.replace(OPEN, num_keys=8))) == {}
    assert differing(SPEC, report(no_window, around=dataclasses.replace(OPEN, num_keys=9))).keys() == {"left_window_size"}
    not_causal = changed("attention", is_causal=False)
    assert differing(SPEC, report(not_causal, around=dataclasses.replace(OPEN, is_decode=True))) == {}
    turned_before = changed("rotary", order="before_norm")
    assert differing(turned_before, report(changed("rotary", order="none"))) == {}
    assert differing(SPEC, report(changed("rotary", order="none"))).keys() == {"rotary_order"}


def test_preparations_in_front_are_read_as_one_spec():
    bare = changed("norm", changed("rotary", order="none"), q_kind="none", k_kind="none", weight_order="before_cast")
    whole = {"query_preparation": (SPEC.query_preparation,), "key_preparation": (SPEC.key_preparation,)}
    assert differing(SPEC, report(bare, **whole)) == {}
    other = dataclasses.replace(SPEC.key_preparation, epsilon=1e-5)
    assert differing(SPEC, report(bare, **{**whole, "key_preparation": (other,)})).keys() == {"k_epsilon"}
    unlike = QKNormRotarySpec(num_heads=2, kind="rms", epsilon=1e-6, axis="hidden", rotary=SPEC.rotary)
    for apart in ((unlike,), (SPEC.key_preparation, SPEC.key_preparation)):
        found = compare_specs({"layers.0.attention": SPEC}, report(bare, **{**whole, "key_preparation": apart}))
        assert found.uncompared == ("layers.0.attention",) and not found.differences


def test_names_lead_from_the_graph_to_the_module():
    read = {"layers.1": SPEC, "layers.1.cross": changed("attention", scale=1.0), "layers.10": SPEC}
    named = {name: FusedAttention(name=name, spec=SPEC, surroundings=OPEN) for name in (
        "layers.1", "layers.1.2", "layers.1.inner.product", "layers.1.cross", "layers.10", "layers.2", "output")}  # fmt: skip
    found = compare_specs(read, FusionReport(fused=tuple(named.values()), plain=("layers.10.2", "elsewhere")))
    assert found.agreeing == ("layers.1", "layers.1.2", "layers.1.inner.product", "layers.10")
    assert found.uncompared == ("layers.2", "output", "elsewhere")
    assert {difference.name for difference in found.differences} == {"layers.1.cross", "layers.10.2"}
    assert compare_specs({"": SPEC}, FusionReport(fused=tuple(named.values()))).agreeing == tuple(named)


def test_whether_there_is_a_norm_at_all():
    plain, fused = FusionReport(plain=("layers.0.attention",)), report(SPEC)
    assert differing(SPEC, plain) == {"norm of queries or keys": (True, False)}
    assert differing(None, fused) == {"norm of queries or keys": (False, True)}
    assert differing(None, plain) == {}


def test_equal_differences_are_one_line():
    fused = tuple(FusedAttention(name=f"layers.{i}.attention", spec=SPEC, surroundings=OPEN) for i in range(28))
    read = {one.name: changed("norm", q_epsilon=1e-5) for one in fused}
    (note,) = compare_specs(read, FusionReport(fused=fused)).notes
    assert note.startswith("module and exported graph differ: q_epsilon is 1e-05 in the module, 1e-06 in the graph (layers.0")
    assert note.endswith("(layers.0.attention, layers.1.attention, layers.2.attention and 25 more)")
    assert compare_specs({}, FusionReport(fused=fused)).notes == ()


class Decoder(torch.nn.Module):
    """Two layers of our own attention."""

    def __init__(self):
        super().__init__()
        spec = QKNormSpec(attention=AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=0.25), norm=SPEC.norm, rotary=SPEC.rotary)
        self.layers = torch.nn.ModuleList(QKNormAttention.from_spec(spec, d_model=32, head_size=8) for _ in range(2))
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, 1.0, 0.3)

    def forward(self, x, cos, sin):
        for layer in self.layers:
            x = x + layer(x, cos=cos, sin=sin)
        return x


INPUTS = (torch.randn(2, 5, 32), torch.randn(5, 4), torch.randn(5, 4))


def notes_of_export(monkeypatch, tamper):
    """The notes of `qk.export` where torch's export went wrong as `tamper` does with the first attention node."""
    right = exporter.export_graph

    def wrong(*arguments, **options):
        model, notes = right(*arguments, **options)
        attentions = [node for node in model.graph.all_nodes() if node.op_type == "QKNormAttention"]
        assert len(attentions) == 2
        tamper(attentions[0])
        return model, notes

    monkeypatch.setattr(exporter, "export_graph", wrong)
    return qk.export(Decoder().eval(), INPUTS, verify=False, check=False).report.notes


def test_export_says_nothing_where_both_agree(monkeypatch):
    assert notes_of_export(monkeypatch, lambda _node: None) == ()


@pytest.mark.parametrize(
    ("attribute", "text"),
    [
        (ir.AttrFloat32("q_epsilon", 1e-5), "q_epsilon is 1e-06 in the module, 1e-05 in the graph"),
        (ir.AttrString("rotary_order", "before_norm"), "rotary_order is 'after_norm' in the module, 'before_norm' in the graph"),
    ],
    ids=["epsilon", "rotary"],
)
def test_export_says_where_the_graph_means_something_else(monkeypatch, attribute, text):
    notes = notes_of_export(monkeypatch, lambda node: node.attributes.add(attribute))
    (note,) = notes
    assert note.startswith(f"module and exported graph differ: {text} (")


def test_export_of_a_foreign_graph_with_another_epsilon(zoo, plain_export):
    export = plain_export("qwen3")
    model = export.model.clone()
    epsilons = [node for node in model.graph.all_nodes() if _is_epsilon(node)]
    assert len(epsilons) >= 4
    for node in epsilons:  # each Add of the graph has its constant; those of q and k norms are among them
        other = ir.tensor(np.array(1e-4, np.float32), name=f"{node.outputs[0].name}/tampered")
        value = ir.Value(name=other.name, const_value=other, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([]))
        model.graph.register_initializer(value)
        node.replace_input_with(1, value)
    found = compare_specs(read_module(export.module).specs, qk.fuse(model).report)
    assert {(one.attribute, f"{one.module:.3g}", f"{one.graph:.3g}") for one in found.differences} == {
        ("q_epsilon", "1e-06", "0.0001"), ("k_epsilon", "1e-06", "0.0001")}  # fmt: skip
    assert len(found.notes) == 2 and not found.agreeing


def _is_epsilon(node):
    constant = node.inputs[1].const_value if node.op_type == "Add" else None
    return constant is not None and constant.size == 1 and abs(float(constant.numpy().item()) - 1e-6) < 1e-9


def test_attention_that_no_reader_knows_is_not_compared(zoo, plain_export):
    export = plain_export("h_vit22b_sdpa")
    found = compare_specs(read_module(export.module).specs, qk.fuse(export.model).report)
    assert found.uncompared and not found.agreeing and not found.notes


def test_a_reader_that_fails_is_a_note():
    class Own(torch.nn.Module):
        pass

    registry = ReaderRegistry()
    registry.register_reader(Own, lambda module: module.heads)
    found = read_module(torch.nn.ModuleDict({"a": Own()}), registry=registry)
    assert found.specs == {}
    assert found.failures == ("the meaning of a could not be read off Own: 'Own' object has no attribute 'heads'",)
