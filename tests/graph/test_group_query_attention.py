"""GroupQueryAttention of onnxruntime: one node whatever the cache is, told apart from what cannot be one, and proven."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest

from qknorm_onnx.graph.passes import fuse as fuse_module
from qknorm_onnx.graph.rewrite import row_lengths
from qknorm_onnx.graph.rewrite.replacement import build_replacement
from tests.graph.attention_text import fused, run

NORM = "LayerNormalization<axis=-1, epsilon=0.001>"
ATTENTION = "num_heads=4, kv_num_heads=2"
OPERANDS = "q3, k3, v, pk, pv, last, total, cos, sin"
PAST = "p"
PRESENT = "t"
TEXT = """<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
g (float[b,s,QUERIES] q, float[b,s,KEYS] k, float[b,s,KEYS] v, float[b,2,PAST,SIZE] pk, float[b,2,PAST,SIZE] pv,
   int32[b] last, int32 total, float[SIZE] w, float[64,WIDTH] cos, float[64,WIDTH] sin, float[4] sink) => (OUTPUTS)
{
  shape = Constant<value = int64[4] {0, 0, -1, SIZE}>()
  flat = Constant<value = int64[3] {0, 0, -1}>()
  q4 = Reshape(q, shape)
  qn = NORM(q4, w)
  q3 = Reshape(qn, flat)
  k4 = Reshape(k, shape)
  kn = NORM(k4, w)
  k3 = Reshape(kn, flat)
  y, nk, nv = com.microsoft.GroupQueryAttention<ATTENTION>(OPERANDS)
}
"""
OUTPUTS = "float[b,s,QUERIES] y, float[b,2,PRESENT,SIZE] nk, float[b,2,PRESENT,SIZE] nv"


def attention(
    *, norm=NORM, attributes="", operands=OPERANDS, past=PAST, present=PRESENT, outputs=OUTPUTS, width=8, rotary=1, size=16
):
    text = TEXT.replace("OUTPUTS", outputs).replace("PAST", past).replace("PRESENT", present).replace("NORM", norm)
    text = text.replace("ATTENTION", f"{ATTENTION}, do_rotary={rotary}{', ' if attributes else ''}{attributes}")
    for name, number in (("QUERIES", 4 * size), ("KEYS", 2 * size), ("SIZE", size)):
        text = text.replace(name, str(number))
    return ir.from_onnx_text(text.replace("OPERANDS", operands).replace("WIDTH", str(width)))


def proven(model):
    result, report = fused(model)
    assert not report.declined and not report.refused
    (item,) = report.fused
    assert item.note == "proven in float32: no float64 kernel for GroupQueryAttention"
    assert not any(node.op_type == "GroupQueryAttention" for node in result.graph)
    return result, item.spec


@pytest.mark.parametrize(
    ("attributes", "width", "expected"),
    [
        ("", 8, {}),
        ("rotary_interleaved=1", 8, {"interleaved": True}),
        ("scale=0.5", 8, {"scale": 0.5}),
        ("softcap=3.0", 8, {"softcap": 3.0}),
        ("local_window_size=3", 8, {"left_window_size": 2}),
        ("local_window_size=1", 8, {"left_window_size": 0}),
        ("causal=0", 8, {"is_causal": False}),
    ],
)
def test_attributes_are_read_and_proven(attributes, width, expected):
    _, spec = proven(attention(attributes=attributes, width=width))
    assert spec.norm.q_kind == "layer" and spec.rotary.order == "after_norm"
    fields = {**dataclasses.asdict(spec.attention), **dataclasses.asdict(spec.rotary)}
    expected = {"is_causal": True, "interleaved": False, "left_window_size": -1, **expected}
    assert {name: fields[name] for name in expected} == expected


def test_rotary_embedding_of_a_part_of_the_head():
    _, spec = proven(attention(size=32))
    assert spec.rotary.embedding_dim == 16


def test_sink_is_read_and_proven():
    result, _ = proven(attention(operands=f"{OPERANDS}, , , sink"))
    node = next(node for node in result.graph if node.op_type == "QKNormAttention")
    assert node.inputs[11] is not None


def test_without_rotary_embedding():
    _, spec = proven(attention(operands="q3, k3, v, pk, pv, last, total", rotary=0))
    assert spec.rotary.order == "none"


@pytest.mark.parametrize("lengths", [("p", "t"), ("capacity", "capacity")])
def test_a_past_goes_in_as_it_is(lengths):
    past, present = lengths
    result, _ = proven(attention(past=past, present=present))
    node = next(node for node in result.graph if node.op_type == "QKNormAttention")
    assert [value.name for value in node.inputs[12:14]] == ["pk", "pv"]
    assert not any(node.op_type == "ConstantOfShape" for node in result.graph)


def test_where_buffers_do_not_grow_the_report_says_that_a_past_is_copied_and_how_not_to():
    made = [fused(attention(past=past, present=present), buffers_grow=False) for past, present in (("p", "t"), ("c", "c"))]
    notes = [report.notes for _, report in made]
    assert len(notes[0]) == 1 and "one name for their length" in notes[0][0]
    assert notes[1] == ()
    extended = [any(node.op_type == "ConstantOfShape" for node in result.graph) for result, _ in made]
    assert extended == [True, False]
    assert all(len(report.fused) == 1 and not report.refused for _, report in made)


CALLS = {
    "prompt": (7, 0, [7, 7, 7]),
    "prompt padded on the right": (7, 0, [7, 3, 5]),
    "prompt into a buffer": (6, 17, [6, 2]),
    "token": (1, 9, [10, 10]),
    "token behind pasts of different lengths": (1, 9, [10, 1, 4]),
    "token into a buffer": (1, 16, [3, 12]),
    "chunk": (5, 3, [8]),
    "chunk into a buffer": (3, 12, [9]),
    "single token as a prompt": (1, 0, [1, 1]),
}


@pytest.mark.parametrize("name", CALLS)
def test_same_numbers_as_the_operator_in_every_call_that_it_defines(name):
    new, past, keys = CALLS[name]
    model = attention(attributes="local_window_size=6")
    random = np.random.default_rng(4)
    batch, total = len(keys), max(keys)
    shapes = {"q": (batch, new, 64), "k": (batch, new, 32), "v": (batch, new, 32)}
    shapes |= {"pk": (batch, 2, past, 16), "pv": (batch, 2, past, 16), "w": (16,), "cos": (64, 8), "sin": (64, 8), "sink": (4,)}
    feeds = {key: random.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}
    feeds |= {"last": np.asarray(keys, np.int32) - 1, "total": np.asarray(total, np.int32)}
    result, _ = fused(model, prove=False)
    for row, count in enumerate(keys):
        valid = min(new, count)
        for given, wanted in zip(run(result, feeds), run(model, feeds), strict=True):
            assert given.shape == wanted.shape
            own = (
                (given[row, :valid], wanted[row, :valid]) if given.ndim == 3 else (given[row, :, :count], wanted[row, :, :count])
            )
            assert own[0] == pytest.approx(own[1], abs=2e-6)


MUTANTS = {
    "window": {"attention": {"left_window_size": 3}},
    "causality": {"attention": {"is_causal": False, "left_window_size": -1}},
    "scale": {"attention": {"scale": 0.36}},
    "epsilon": {"norm": {"k_epsilon": 0.0015}},
    "kind": {"norm": {"q_kind": "rms"}},
    "pairs": {"rotary": {"interleaved": True}},
    "order": {"rotary": {"order": "before_norm"}},
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_spec_is_refused(monkeypatch, name):
    def wrong(match):
        spec = match.spec
        for part, fields in MUTANTS[name].items():
            spec = dataclasses.replace(spec, **{part: dataclasses.replace(getattr(spec, part), **fields)})
        return build_replacement(dataclasses.replace(match, spec=spec))

    monkeypatch.setattr(fuse_module, "build_replacement", wrong)
    _, report = fused(attention(attributes="local_window_size=3"))
    assert not report.fused and report.refused[0].max_difference > 1e-5


@pytest.mark.parametrize("offset", [-1, 1])
def test_wrong_position_is_refused(monkeypatch, offset):
    right = row_lengths.build_row_cache

    def wrong(builder, lengths, query):
        rows = right(builder, lengths, query)
        step = builder.integers([offset], "wrong")
        return dataclasses.replace(
            rows,
            positions=builder.apply(
                "Abs", [builder.apply("Add", [rows.positions, step], dims=rows.positions.shape)], dims=rows.positions.shape
            ),
        )

    monkeypatch.setattr("qknorm_onnx.graph.rewrite.replacement.build_row_cache", wrong)
    _, report = fused(attention())
    assert not report.fused and report.refused


UNREAD = {
    "position ids": (f"{OPERANDS}, positions", "", "position ids"),
    "bias": (f"{OPERANDS}, , bias", "", "bias"),
    "sliding cache": (OPERANDS, "sliding_window_cache=1, local_window_size=4", "drops old keys"),
    "smooth softmax": (OPERANDS, "smooth_softmax=1", "smooths"),
    "query lengths": (f"{OPERANDS}, , , , , , , , last", "", "padded on the right"),
}


@pytest.mark.parametrize("name", UNREAD)
@pytest.mark.parametrize("norm", [NORM, "Mul"])
def test_what_is_not_read_declines_behind_norms_and_is_plain_without(name, norm):
    operands, attributes, reason = UNREAD[name]
    model = attention(norm=norm, operands=operands.replace("positions", "last").replace("bias", "q"), attributes=attributes)
    result, report = fused(model)
    assert not report.fused and [node.op_type for node in result.graph].count("GroupQueryAttention") == 1
    assert bool(report.declined) == (norm is NORM) and bool(report.plain) == (norm is not NORM)
    assert norm is not NORM or (reason in report.declined[0].reason and report.declined[0].hint)


def test_norms_inside():
    operands = "q, k, v, pk, pv, last, total, cos, sin, , , , , , w, w"
    result, report = fused(attention(operands=operands, attributes="q_norm_epsilon=0.002, qk_norm_epsilon=0.001"))
    (item,) = report.fused
    assert item.note.startswith("proven in float32") and "as documented" in item.note
    assert (item.spec.norm.q_kind, item.spec.norm.k_kind) == ("rms", "rms")
    assert (item.spec.norm.q_epsilon, item.spec.norm.k_epsilon) == pytest.approx((0.002, 0.001))
    node = next(node for node in result.graph if node.op_type == "QKNormAttention")
    assert [node.inputs[index].name for index in (3, 4)] == ["w", "w"]


def test_packed_operands_with_norms_inside_say_what_to_do():
    operands = "q, , , pk, pv, last, total, cos, sin, , , , , , w, w"
    _, report = fused(attention(operands=operands))
    assert "packed" in report.declined[0].reason and "three inputs" in report.declined[0].hint
