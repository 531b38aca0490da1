"""Masks written as text graphs, and what a fragment describes compared with what the graph computes."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from qknorm_onnx.graph.recognise.masks.mask import MaskContext, MaskFragment, recognise_mask
from qknorm_onnx.graph.symbolic.terms import Dimension, Linear, form_of

HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'
INPUTS = (
    "int64[B, S] ids, float[B, H, P, D] past, int64[B, S] position_ids, bool[B, N] padding, "
    "int64 past_length, float[H, S, S] alibi"
)
SIZE = form_of(Dimension("S"))
TOTAL = SIZE + form_of(Dimension("P"))
PRELUDE = """
    zero = Constant<value_int = 0>()
    one = Constant<value_int = 1>()
    four = Constant<value_int = 4>()
    v0 = Constant<value_ints = [0]>()
    v1 = Constant<value_ints = [1]>()
    v2 = Constant<value_ints = [2]>()
    v01 = Constant<value_ints = [0, 1]>()
    v12 = Constant<value_ints = [1, 2]>()
    last = Constant<value_ints = [-1]>()
    true = Constant<value = bool {1}>()
    seen = Constant<value_float = 0.0>()
    unit = Constant<value_float = 1.0>()
    lowest = Constant<value_float = -3.4028235e+38>()
    minus_infinity = Constant<value_float = -inf>()
    sv = Shape<start = 1, end = 2>(ids)
    s = Squeeze(sv)
    pv = Shape<start = 2, end = 3>(past)
    p = Squeeze(pv)
    t = Add(p, s)
    i = Range(zero, s, one)
    j = Range(zero, t, one)
    q = Unsqueeze(i, v1)
    k = Unsqueeze(i, v0)
    kt = Unsqueeze(j, v0)
    qp = Add(q, p)
    causal = LessOrEqual(k, q)
    cached = LessOrEqual(kt, qp)
    d = Sub(q, k)
    sq = Concat<axis = 0>(sv, sv)
    near = Less(d, four)
    pad4 = Unsqueeze(padding, v12)
"""


def build(body: str, inputs: str = INPUTS) -> tuple[ir.Value, onnx.ModelProto]:
    proto = onnx.parser.parse_model(f"{HEADER}g ({inputs}) => (bool[Z] m) {{ {PRELUDE} {body} }}")
    types = {output: node for node in proto.graph.node for output in node.output}
    assert "m" in types
    proto.graph.output[0].ClearField("type")
    model = ir.from_proto(proto)
    mask = model.graph.outputs[0]
    floats = {"Where", "Add", "Mul", "Trilu"}
    if mask.dtype is None:
        producer = mask.producer()
        assert producer is not None
        is_float = producer.op_type in floats or "float mask" in body
        mask.type = ir.TensorType(ir.DataType.FLOAT if is_float else ir.DataType.BOOL)
    return mask, proto


def recognised(body: str, **options: object) -> MaskFragment:
    mask, _ = build(body)
    lengths = {"query_length": SIZE, "key_length": TOTAL if "kt" in body or "cached" in body else SIZE}
    return recognise_mask(mask, context=MaskContext(), **(lengths | options))  # type: ignore[arg-type]


def number(form: Linear, sizes: dict[str, int]) -> int:
    total = form.constant
    for atom, factor in form.terms:
        assert isinstance(atom, Dimension)
        total += factor * sizes[atom.name]
    return total


def described(fragment: MaskFragment, arrays: dict[str, np.ndarray], sizes: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """The visible keys and the additive rest that a fragment describes."""
    length, keys = number(fragment.query_length, sizes), number(fragment.key_length, sizes)
    p = np.arange(length)[:, None] + number(fragment.query_offset, sizes)
    j = np.arange(keys)[None]
    visible = np.ones((length, keys), bool)
    if fragment.is_causal:
        visible &= j <= p
    if fragment.left_window_size >= 0:
        visible &= p - fragment.left_window_size <= j
    if fragment.right_window_size >= 0:
        visible &= j <= p + fragment.right_window_size
    rest = np.zeros(())
    for term in fragment.residual:
        array = arrays[str(term.value.name)]
        present = [axis for axis in term.axes if axis is not None]
        array = array.transpose(present).reshape([1 if axis is None else array.shape[axis] for axis in term.axes])
        if term.kind == "add":
            rest = rest + array
        else:
            visible = visible & (~array if term.negated else array)
    return visible, rest


def check_described(body: str, fragment: MaskFragment, proto: onnx.ModelProto) -> None:
    """Run the graph at several sizes and compare its mask with the described one."""
    for batch, length, past in [(2, 7, 0), (1, 1, 5), (3, 5, 2), (2, 6, 11)]:
        rng = np.random.default_rng(length)
        feeds = {
            "ids": np.zeros((batch, length), np.int64),
            "past": np.zeros((batch, 2, past, 3), np.float32),
            "position_ids": np.sort(rng.integers(0, 4, (batch, length))),
            "padding": rng.random((batch, length + past if "cached" in body else length)) < 0.7,
            "past_length": np.array(past),
            "alibi": rng.normal(size=(2, length, length)).astype(np.float32),
        }
        names = ["m", *(str(term.value.name) for term in fragment.residual)]
        model = onnx.ModelProto()
        model.CopyFrom(proto)
        del model.graph.output[:]
        wanted = [name for name in dict.fromkeys(names) if name not in feeds]
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
        arrays = feeds | dict(zip(wanted, ReferenceEvaluator(model).run(None, feeds), strict=True))
        visible, rest = described(fragment, arrays, {"B": batch, "S": length, "P": past, "H": 2, "N": feeds["padding"].shape[1]})
        mask = arrays["m"]
        if mask.dtype == bool:
            assert (np.broadcast_to(visible, mask.shape) == mask).all()
        else:
            whole = np.where(visible, 0.0, -math.inf) + rest
            np.testing.assert_array_equal(whole <= -1e9, mask <= -1e9)
            np.testing.assert_allclose(np.where(whole <= -1e9, 0, whole), np.where(mask <= -1e9, 0, mask), rtol=1e-6)
