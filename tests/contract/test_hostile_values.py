"""Values that no attribute decides about: positions far out, lengths out of range, keys that are no numbers.

Reference, function body and native kernel agree, in the words of docs/semantics.md.
"""

from __future__ import annotations

import itertools

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

import qknorm_onnx.custom_ops as custom_ops
from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.canonical.qk_norm_node import AttentionInputs, make_attention_node
from qknorm_onnx.graph.passes.attach_bodies import AttachBodiesPass
from qknorm_onnx.graph.soundness.guard import make_sound
from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormSpec, SpecError
from qknorm_onnx.spec.reference import qk_norm_attention

BATCH, LENGTH, Q_HEADS, KV_HEADS, SIZE = 2, 5, 6, 2, 8
NATIVE = (False, True)


def spec_of(*, norm="rms", causal=False, window=-1, softcap=0.0):
    mode = "clamp" if norm == "l2" else "inside_sqrt"
    return QKNormSpec(
        attention=AttentionSpec(
            q_num_heads=Q_HEADS, kv_num_heads=KV_HEADS, scale=0.3, is_causal=causal, left_window_size=window, softcap=softcap
        ),
        norm=NormSpec(q_kind=norm, k_kind=norm, q_epsilon=1e-6, k_epsilon=1e-6, epsilon_mode=mode),
    )


def projections(seed: int, **more: np.ndarray) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    widths = {"query": Q_HEADS, "key": KV_HEADS, "value": KV_HEADS}
    return {
        name: generator.standard_normal((BATCH, LENGTH, heads * SIZE)).astype(np.float32) for name, heads in widths.items()
    } | more


def past(seed: int, rows: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    shape = (BATCH, KV_HEADS, rows, SIZE)
    return {name: generator.standard_normal(shape).astype(np.float32) for name in ("past_key", "past_value")}


def run(spec: QKNormSpec, feeds: dict[str, np.ndarray], *, native: bool, symbolic: bool = True) -> np.ndarray:
    """Y of one node in onnxruntime. `symbolic`: batch sizes are not stated, so that only values can be at fault."""
    values = {}
    for name, array in feeds.items():
        shape = [f"{name}_batch" if symbolic and axis == 0 else dim for axis, dim in enumerate(array.shape)]
        values[name] = ir.Value(name=name, type=ir.TensorType(ir.DataType.from_numpy(array.dtype)), shape=ir.Shape(shape))
    node = make_attention_node(spec, AttentionInputs(**values), name="attention")
    graph = ir.Graph(list(values.values()), node.outputs, nodes=[node], opset_imports={"": 20, "ai.qknorm": 1}, name="g")
    model = ir.Model(graph, ir_version=10)
    AttachBodiesPass()(model)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if native:
        options.register_custom_ops_library(str(custom_ops.library_path()))
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


FAR = [0, -3, 7, 2**36, 2**40, 2**40 + 3, 2**45, 2**61, 2**61 + 9, 2**62, 2**63 - 1, -(2**40) - 1, -(2**62), -(2**63)]


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("offset", FAR)
@pytest.mark.parametrize(("causal", "window"), [(True, -1), (True, 2), (False, 2), (False, 2**40)])
def test_query_offset_is_exact_for_every_int64(native, offset, causal, window):
    """C22."""
    spec = spec_of(causal=causal, window=window)
    feeds = projections(1, query_offset=np.array([offset, 2], np.int64))
    expected = qk_norm_attention(spec, feeds)["Y"]
    np.testing.assert_allclose(run(spec, feeds, native=native), expected, rtol=1e-4, atol=1e-5)
    # In words: p sees p - window .. p, computed here with numbers that do not overflow.
    limit = window if window >= 0 else 2**70
    some = [any(offset + i - limit <= key and (not causal or key <= offset + i) for key in range(LENGTH)) for i in range(LENGTH)]
    assert list(np.any(expected[0] != 0, axis=-1)) == some


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("lengths", [[-1, 2], [2, -5], [9, 2], [3, 9], [2**40, 0], [-(2**63), 0], [2**63 - 1, 0]])
def test_lengths_out_of_range_are_refused(native, lengths):
    """C23: of 8 entries at most 8 may be valid."""
    feeds = projections(2, **past(3, 8), cache_length=np.array(lengths, np.int64))
    spec = spec_of(causal=True)
    with pytest.raises(SpecError, match="cache_length"):
        qk_norm_attention(spec, feeds)
    with pytest.raises(Exception, match="cache_length" if native else "[Ii]nd|bounds"):
        run(spec, feeds, native=native)


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("name", ["cache_length", "query_offset"])
def test_one_number_for_a_batch_of_two_is_refused(native, name):
    """C23."""
    feeds = projections(4, **(past(5, 9) if name == "cache_length" else {}), **{name: np.array([1], np.int64)})
    spec = spec_of(causal=True)
    with pytest.raises(SpecError, match=name):
        qk_norm_attention(spec, feeds)
    with pytest.raises(Exception, match=name if native else "[Cc]oncat"):
        run(spec, feeds, native=native)
    with pytest.raises(SpecError, match=name):
        run(spec, feeds, native=native, symbolic=False)


def test_a_length_without_a_past_is_refused_wherever_the_node_is_read():
    """C23."""
    feeds = projections(6, cache_length=np.array([1, 1], np.int64))
    with pytest.raises(SpecError, match="cache_length needs past_key"):
        qk_norm_attention(spec_of(), feeds)
    values = {
        name: ir.Value(name=name, type=ir.TensorType(ir.DataType.from_numpy(array.dtype)), shape=ir.Shape(array.shape))
        for name, array in projections(6).items()
    }
    node = make_attention_node(spec_of(), AttentionInputs(**values), name="attention")
    length = ir.Value(name="cache_length", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([BATCH]))
    node.resize_inputs(15)
    node.replace_input_with(14, length)
    graph = ir.Graph([*values.values(), length], node.outputs, nodes=[node], opset_imports={"": 20, "ai.qknorm": 1}, name="g")
    model = ir.Model(graph, ir_version=10)
    with pytest.raises(SpecError, match="cache_length needs past_key"):
        AttachBodiesPass()(model)
    with pytest.raises(InputError, match="cache_length needs past_key"):
        make_sound(model, "the model")


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("norm", ["none", "rms", "l2"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_keys_that_are_no_numbers(native, norm, bad):
    """A key that is not seen has no influence, one that is seen makes its rows NaN, whoever computes."""
    for causal, mask, window, softcap in itertools.product((False, True), (False, True), (-1, 1), (0.0, 5.0)):
        feeds = projections(7)
        feeds["key"][0, 3, 5] = bad
        if mask:
            seen = np.random.default_rng(8).random((BATCH, 1, LENGTH, LENGTH)) > 0.4
            seen[0, 0, :3, 3] = False
            seen |= np.eye(LENGTH, dtype=bool)
            feeds["attention_bias"] = seen
        spec = spec_of(norm=norm, causal=causal, window=window, softcap=softcap)
        expected = qk_norm_attention(spec, feeds)["Y"]
        actual = run(spec, feeds, native=native)
        case = f"{causal=} {mask=} {window=} {softcap=}"
        if bad is not np.nan and norm == "none":  # a row whose logits are all -inf: see docs/semantics.md
            decided = np.abs(expected).max(-1, keepdims=True) != 0
            expected, actual = np.where(decided, expected, 0), np.where(decided, actual, 0)
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4, err_msg=case)
        assert np.isfinite(expected[1]).all(), case
        if norm != "none" and causal:
            assert np.isfinite(expected[0, :3]).all(), case
            assert np.isnan(expected[0, 3]).any(), case
