"""Attention in the bodies of If and Loop, where shapes are computed and values of the graph around them are read."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

import qknorm_onnx as qk
from tests.graph.attention_text import Spelling, attention_model, fused, run

SAME = "{y} = Identity({x})\n"
# As torch.onnx writes scaled_dot_product_attention: keys transposed through three axes, with sizes read off their shapes.
THROUGH_THREE_AXES = """
  k_shape = Shape({k}_again)
  front = Constant<value = int64[1] {{{{-9223372036854775808}}}}>()
  minus2 = Constant<value = int64[1] {{{{-2}}}}>()
  k_size = Slice(k_shape, minus1, end)
  k_length = Slice(k_shape, minus2, minus1)
  k_lead = Slice(k_shape, front, minus2)
  k_dims3 = Concat<axis=0>(minus1, k_length, k_size)
  k3 = Reshape({k}_again, k_dims3)
  k3t = Transpose<perm=[0, 2, 1]>(k3)
  k_dims4 = Concat<axis=0>(k_lead, k_size, k_length)
  k4 = Reshape(k3t, k_dims4)
  scores = MatMul({q}, k4)
  logits = Mul(scores, scale)
""".replace("{{{{", "{{").replace("}}}}", "}}")
SDPA = Spelling(
    scores="  {k}_again = Transpose<perm=[0, 1, 3, 2]>({k})\n" + THROUGH_THREE_AXES,
    mask="""
  zero_s = Constant<value = int64 {{0}}>()
  one_s = Constant<value = int64 {{1}}>()
  seq_s = Squeeze(seq1, zero1)
  positions = Range(zero_s, seq_s, one_s)
  rows = Unsqueeze(positions, one1)
  hidden = Greater(positions, rows)
  low = Constant<value = float {{-3.0e38}}>()
  masked = Where(hidden, low, logits)
""",
)
PLAIN = Spelling(q_norm=SAME, k_norm=SAME)
OUTSIDE = frozenset({"cos", "sin", "angles2", "hidden", "rows", "positions", "seq_s", "seq1", "zero_s", "one_s"})


def parts(spelling, *, outside):
    """An attention as protobuf: inputs, initializers, nodes that stay in front, and nodes of a body."""
    proto = ir.to_proto(attention_model(spelling)).graph
    constants = [node for node in proto.node if node.op_type == "Constant"]
    early = {node.output[0] for node in constants} | (OUTSIDE if outside else set())
    front = [node for node in proto.node if node.output[0] in early]
    return proto, front, [node for node in proto.node if node.output[0] not in early]


def model_of(proto, nodes, inputs, outputs):
    graph = helper.make_graph(nodes, "around", inputs, outputs, initializer=proto.initializer)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    return ir.from_proto(model)


def in_if(spelling, *, outside=False):
    """q_in, k_in, v_in, angles, chosen -> the attention, or q_in."""
    proto, front, inside = parts(spelling, outside=outside)
    y = proto.output[0]
    body = helper.make_graph(inside, "attended", [], [y])
    other = helper.make_graph([helper.make_node("Identity", ["q_in"], ["same"])], "left", [], [info_named(y, "same")])
    chosen = helper.make_tensor_value_info("chosen", TensorProto.BOOL, [])
    node = helper.make_node("If", ["chosen"], ["result"], then_branch=body, else_branch=other)
    return model_of(proto, [*front, node], [*proto.input, chosen], [info_named(y, "result")])


def info_named(like, name):
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(like)
    copy.name = name
    return copy


def in_loop(spelling, *, outside=False):
    """x, k_in, v_in, angles, times -> x attended so many times, each time in place of q_in."""
    proto, front, inside = parts(spelling, outside=False)
    y = proto.output[0]
    front = [node for node in front if node.op_type == "Constant"]
    carried = info_named(next(value for value in proto.input if value.name == "q_in"), "q_in")
    count, go_on = (
        helper.make_tensor_value_info(name, kind, []) for name, kind in (("i", TensorProto.INT64), ("c", TensorProto.BOOL))
    )
    keep = helper.make_node("Identity", ["c"], ["c_out"])
    body = helper.make_graph(
        [*inside, keep], "body", [count, go_on, carried], [helper.make_tensor_value_info("c_out", TensorProto.BOOL, []), y]
    )
    times = helper.make_tensor_value_info("times", TensorProto.INT64, [])
    node = helper.make_node("Loop", ["times", "", "x"], ["result"], body=body)
    inputs = [info_named(carried, "x"), *[value for value in proto.input if value.name != "q_in"], times]
    return model_of(proto, [*front, node], inputs, [info_named(y, "result")])


def feeds_of(model, batch, length, **given):
    random = np.random.default_rng(4)
    sizes = {"batch": batch, "seq": length}
    feeds = {name: np.asarray(value) for name, value in given.items()}
    for value in model.graph.inputs:
        if value.name not in feeds:
            shape = [dim if isinstance(dim, int) else sizes[dim.value] for dim in value.shape]
            feeds[value.name] = random.standard_normal(shape).astype(np.float32)
    return feeds


def check(source, *cases):
    model, report = fused(source)
    assert not report.declined and not report.refused
    (attention,) = report.fused
    assert attention.note == ""
    kinds = [node.op_type for node in model.graph.all_nodes()]
    assert "QKNormAttention" in kinds and "Softmax" not in kinds
    assert not any(node.op_type == "QKNormAttention" for node in model.graph)
    for batch, length, given in cases:
        feeds = feeds_of(source, batch, length, **given)
        (old,), (new,) = run(source, feeds), run(model, feeds)
        np.testing.assert_allclose(new, old, rtol=0, atol=3e-6 * np.abs(old).max())
    return attention.spec


BRANCHES = [(1, 7, {"chosen": True}), (3, 4, {"chosen": True}), (2, 5, {"chosen": False})]
ROUNDS = [(1, 7, {"times": np.int64(1)}), (3, 4, {"times": np.int64(3)}), (2, 5, {"times": np.int64(0)})]


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("spelling", [SDPA, Spelling()])
def test_branch(spelling, outside):
    spec = check(in_if(spelling, outside=outside), *BRANCHES)
    assert spec.attention.is_causal == (spelling is SDPA) and spec.rotary.order == "after_norm"
    assert (spec.attention.q_num_heads, spec.attention.kv_num_heads) == (6, 2)


@pytest.mark.parametrize("spelling", [SDPA, Spelling()])
def test_loop(spelling):
    spec = check(in_loop(spelling), *ROUNDS)
    assert spec.attention.is_causal == (spelling is SDPA)


@pytest.mark.parametrize("wrap", [in_if, in_loop])
def test_attention_without_norms_is_plain(wrap):
    _, report = fused(wrap(PLAIN))
    assert not report.fused and not report.declined and len(report.plain) == 1


def test_keys_that_are_repeated_in_the_other_order_decline():
    tiled = """
  {n}_u = Unsqueeze({x}, one1)
  {n}_dims = Concat<axis=0>(batch1, group1, kv1, seq1, size1)
  {n}_e = Expand({n}_u, {n}_dims)
  {n}_shape = Concat<axis=0>(batch1, heads1, seq1, size1)
  {y} = Reshape({n}_e, {n}_shape)
"""
    model, report = fused(in_if(Spelling(repeat=tiled)))
    assert not report.fused and (report.declined or report.refused)
    assert any(node.op_type == "Softmax" for node in model.graph.all_nodes())


@pytest.mark.parametrize("wrap", [in_if, in_loop])
def test_a_second_run_finds_nothing_to_do(wrap):
    once = qk.fuse(wrap(SDPA), verify=False)
    twice = qk.fuse(once.model, verify=False)
    assert len(twice.report.fused) == 1
    names = [[value.name for value in (*graph.inputs, *graph.initializers.values())] for graph in once.model.graphs()]
    assert names == [[value.name for value in (*graph.inputs, *graph.initializers.values())] for graph in twice.model.graphs()]
    kinds = [[(node.op_type, node.overload) for node in program.model.graph.all_nodes()] for program in (once, twice)]
    assert kinds[0] == kinds[1]
    used = [name for graph in names for name in graph]
    assert len(used) == len(set(used))


torch = pytest.importorskip("torch")
F = torch.nn.functional


class Attending(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = (torch.nn.Linear(32, size) for size in (32, 16, 16, 32))
        self.weights = torch.nn.ParameterList([0.5 + torch.rand(8), 0.5 + torch.rand(8)])

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = (F.rms_norm(item, (8,), weight, 1e-6) for item, weight in zip((q, k), self.weights, strict=True))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2))


class Chosen(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.other = Attending(), torch.nn.Linear(32, 32)

    def forward(self, x, chosen):
        return torch.cond(chosen, lambda x: self.attention(x), lambda x: self.other(x), (x + 1,))


def test_branch_of_torch_at_opset_20():
    module = Chosen().eval()
    shapes = {"x": {0: "batch", 1: "seq"}, "chosen": None}
    program = qk.export(module, (torch.randn(2, 5, 32), torch.tensor(True)), dynamic_shapes=shapes, opset=20)
    (attention,) = program.report.fused
    assert attention.note == "" and program.report.complete and attention.spec.attention.is_causal
    session = qk.create_session(program)
    for batch, length, chosen in ((1, 9, True), (3, 4, True), (2, 3, False)):
        x = torch.randn(batch, length, 32)
        (y,) = session.run(None, {"x": x.numpy(), "chosen": np.asarray(chosen)})
        with torch.no_grad():
            expected = module(x, torch.tensor(chosen))
        torch.testing.assert_close(torch.from_numpy(y), expected, rtol=0, atol=2e-6)
