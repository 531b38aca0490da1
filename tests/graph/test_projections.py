"""What lies in front of the norms is never part of the attention: quantised, packed and low-rank projections stay as they are."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from tests.graph.attention_text import declared_as_inputs, fused, run

HIDDEN, HEADS, KV_HEADS, SIZE = 64, 4, 2, 16
WIDTHS = {"q": HEADS * SIZE, "k": KV_HEADS * SIZE, "v": KV_HEADS * SIZE}
TEXT = """<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
attention (float[batch,seq,64] x) => (float[batch,seq,64] y)
<float[16] gain, WEIGHTS>
{
  q_heads = Constant<value = int64[4] {0, 0, 4, 16}>()
  kv_heads = Constant<value = int64[4] {0, 0, 2, 16}>()
  flat = Constant<value = int64[3] {0, 0, 64}>()
PROJECTIONS
  qh = Reshape(q, q_heads)
  kh = Reshape(k, kv_heads)
  vh = Reshape(v, kv_heads)
  qn = LayerNormalization<axis=-1, epsilon=0.001>(qh, gain)
  kn = LayerNormalization<axis=-1, epsilon=0.001>(kh, gain)
  qt = Transpose<perm=[0, 2, 1, 3]>(qn)
  kt0 = Transpose<perm=[0, 2, 3, 1]>(kn)
  vt0 = Transpose<perm=[0, 2, 1, 3]>(vh)
  two1 = Constant<value = int64[1] {2}>()
  ku = Unsqueeze(kt0, two1)
  vu = Unsqueeze(vt0, two1)
  batch1 = Shape<start=0, end=1>(x)
  seq1 = Shape<start=1, end=2>(x)
  size1 = Constant<value = int64[1] {16}>()
  four1 = Constant<value = int64[1] {4}>()
  k_dims = Concat<axis=0>(batch1, two1, two1, size1, seq1)
  v_dims = Concat<axis=0>(batch1, two1, two1, seq1, size1)
  ke = Expand(ku, k_dims)
  ve = Expand(vu, v_dims)
  k_all = Concat<axis=0>(batch1, four1, size1, seq1)
  v_all = Concat<axis=0>(batch1, four1, seq1, size1)
  kt = Reshape(ke, k_all)
  vt = Reshape(ve, v_all)
  scores = MatMul(qt, kt)
  p = Softmax<axis=-1>(scores)
  o = MatMul(p, vt)
  ot = Transpose<perm=[0, 2, 1, 3]>(o)
  y = Reshape(ot, flat)
}
"""


def each(line):
    return "".join(line.format(s=side, n=width) for side, width in WIDTHS.items())


SPLIT = "  parts = Constant<value = int64[3] {64, 32, 32}>()\n  q, k, v = Split<axis=-1>(packed, parts)\n"
# name -> (weights, projections, operators that stay). {s} is a side, {n} its width.
FORMS = {
    "float": (each("float[64,{n}] {s}_w, "), each("  {s} = MatMul(x, {s}_w)\n"), "MatMul"),
    "4 bits": (
        each("uint8[{n},2,16] {s}_w, float[{n},2] {s}_s, "),
        each("  {s} = com.microsoft.MatMulNBits<K=64, N={n}, bits=4, block_size=32>(x, {s}_w, {s}_s)\n"),
        "MatMulNBits",
    ),
    "dequantised": (
        each("int8[64,{n}] {s}_w, float[{n}] {s}_s, int8[{n}] {s}_z, "),
        each("  {s}_f = DequantizeLinear<axis=1>({s}_w, {s}_s, {s}_z)\n  {s} = MatMul(x, {s}_f)\n"),
        "DequantizeLinear",
    ),
    "dynamically quantised": (
        each("uint8[64,{n}] {s}_w, float {s}_s, uint8 {s}_z, "),
        "  x_q, x_s, x_z = DynamicQuantizeLinear(x)\n"
        + each(
            "  {s}_i = MatMulInteger(x_q, {s}_w, x_z, {s}_z)\n  {s}_c = Cast<to=1>({s}_i)\n  {s}_f = Mul(x_s, {s}_s)\n"
            "  {s} = Mul({s}_c, {s}_f)\n"
        ),
        "MatMulInteger",
    ),
    "dynamically quantised, one operator": (
        each("uint8[64,{n}] {s}_w, float {s}_s, uint8 {s}_z, "),
        each("  {s} = com.microsoft.DynamicQuantizeMatMul(x, {s}_w, {s}_s, {s}_z)\n"),
        "DynamicQuantizeMatMul",
    ),
    "packed": (
        "float[64,128] packed_w, ",
        "  packed = MatMul(x, packed_w)\n" + SPLIT,
        "Split",
    ),
    "packed, 4 bits": (
        "uint8[128,2,16] packed_w, float[128,2] packed_s, ",
        "  packed = com.microsoft.MatMulNBits<K=64, N=128, bits=4, block_size=32>(x, packed_w, packed_s)\n" + SPLIT,
        "MatMulNBits",
    ),
    "low rank": (
        each("float[64,{n}] {s}_w, float[64,2] {s}_a, float[2,{n}] {s}_b, ") + "float rate, ",
        each(
            "  {s}_0 = MatMul(x, {s}_w)\n  {s}_1 = MatMul(x, {s}_a)\n  {s}_2 = MatMul({s}_1, {s}_b)\n"
            "  {s}_3 = Mul({s}_2, rate)\n  {s} = Add({s}_0, {s}_3)\n"
        ),
        "MatMul",
    ),
}


def projected(name, *, fed=()):
    """A model with random weights; those named in `fed` are inputs of the graph instead."""
    weights, projections, _ = FORMS[name]
    text = TEXT.replace("WEIGHTS", weights.rstrip(", ")).replace("PROJECTIONS", projections)
    model = ir.from_onnx_text(declared_as_inputs(text))
    random = np.random.default_rng(5)
    for value in [item for item in model.graph.inputs if item.name != "x" and item.name not in fed]:
        shape = tuple(int(dim) for dim in value.shape or ())
        assert value.dtype is not None
        kind = value.dtype.numpy()
        integers = np.issubdtype(kind, np.integer)
        array = random.integers(1, 100, shape) if integers else 0.01 + 0.1 * random.random(shape)
        array = array + 1 if value.name == "gain" else array
        model.graph.inputs.remove(value)
        value.const_value = ir.tensor(np.asarray(array).astype(kind), name=value.name)
        model.graph.register_initializer(value)
    declare_projections(model)
    return model


def declare_projections(model):
    """Sizes of what operators of onnxruntime make, as their tools write them into files: ONNX's inference does not know them."""
    widths = {**WIDTHS, "packed": sum(WIDTHS.values())}
    for value in [output for node in model.graph for output in node.outputs if output.name in widths]:
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["batch", "seq", widths[value.name]])


@pytest.mark.parametrize("name", FORMS)
def test_projection_stays_and_the_attention_is_fused(name):
    model = projected(name)
    stays = FORMS[name][2]
    result, report = fused(model)
    assert not report.declined and not report.refused and not report.plain
    (attention,) = report.fused
    assert attention.note == ""
    assert (attention.spec.norm.q_kind, attention.spec.attention.kv_num_heads) == ("layer", KV_HEADS)
    count = [node.op_type for node in result.graph].count
    assert count(stays) == [node.op_type for node in model.graph].count(stays) - 2 * (stays == "MatMul")
    assert not count("Softmax")
    x = np.random.default_rng(6).standard_normal((3, 7, HIDDEN)).astype(np.float32)
    given, wanted = run(result, {"x": x})[0], run(model, {"x": x})[0]
    assert np.abs(wanted).max() > 0.1
    assert given == pytest.approx(wanted, abs=float(2e-6 * np.abs(wanted).max()))


def test_adapters_that_are_fed_stay_inputs():
    names = [f"{side}_{part}" for side in "qkv" for part in "ab"]
    model = projected("low rank", fed=names)
    result, report = fused(model)
    assert [item.note for item in report.fused] == [""]
    assert [value.name for value in result.graph.inputs] == [value.name for value in model.graph.inputs]
    random = np.random.default_rng(7)
    x = random.standard_normal((2, 5, HIDDEN)).astype(np.float32)
    outputs = []
    for strength in (0.0, 1.0):
        feeds = {"x": x}
        for value in model.graph.inputs:
            if value.name != "x":
                shape = tuple(int(dim) for dim in value.shape)
                feeds[value.name] = strength * random.standard_normal(shape).astype(np.float32)
        outputs.append(run(result, feeds)[0])
        assert outputs[-1] == pytest.approx(run(model, feeds)[0], abs=1e-5)
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-3


def test_shapes_that_a_file_does_not_store_are_derived():
    model = projected("4 bits")
    for node in model.graph:
        for value in node.outputs:
            value.shape = None
    model, report = fused(model)
    assert report.fused and not report.declined
    assert not any(node.op_type == "Softmax" for node in model.graph)
