"""What the lowering is told about the CUDA kernels is what the C++ launcher says: rule by rule, in the same sentence."""

from __future__ import annotations

import ctypes
import itertools
from typing import get_args

import numpy as np
import pytest

from qknorm_onnx.custom_ops.kernels.cuda.image_set import PADDED_HEADS
from qknorm_onnx.spec.cuda_support import LARGEST_HEAD, cuda_refusal
from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormKind, NormSpec, QKNormRotarySpec, QKNormSpec, RotarySpec
from qknorm_onnx.spec.signature import DTYPES
from tests.native.kernel_call import ELEMENT_CODES, NUMPY_TYPES, KernelError, Message, pack_attributes

ROTARIES = [
    RotarySpec(order=order, interleaved=interleaved, embedding_dim=4, offset=offset)
    for order, interleaved, offset in itertools.product(("none", "after_norm", "before_norm"), (False, True), range(4))
]
KINDS = get_args(NormKind)
HEADS = (16, LARGEST_HEAD, LARGEST_HEAD + 2)


def tables(rotary, dtype):
    return {} if rotary.order == "none" else {name: np.ones((1, 2), NUMPY_TYPES[dtype]) for name in ("cos", "sin")}


def said(launch, *arguments, **options):
    try:
        launch(*arguments, **options)
    except KernelError as error:
        return str(error)
    return None


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(driver, dtype):
    driver.runs_kernels = False
    outcomes = set()
    for rotary, groups, softmax, head, value_head in itertools.product(
        ROTARIES, (1, 2), ("float32", "float64", "float16"), HEADS, HEADS
    ):
        attention = AttentionSpec(q_num_heads=2, kv_num_heads=1, scale=0.5, softmax_precision=softmax)
        norm = NormSpec(q_kind="rms", k_kind="layer", groups=groups)
        spec = QKNormSpec(attention=attention, norm=norm, rotary=rotary)
        sizes = {"query": 2 * head, "key": head, "value": value_head}
        inputs = {name: np.ones((1, 1, width), NUMPY_TYPES[dtype]) for name, width in sizes.items()} | tables(rotary, dtype)
        expected = cuda_refusal(spec, dtype=dtype, head_sizes=(head, value_head))
        assert said(driver.attention, spec, inputs) == expected, spec
        outcomes.add(expected)
        if expected is None or "a head of" not in expected:  # what is asked for when the session is made knows no sizes
            assert asked(driver, spec, dtype) == expected
    assert len(outcomes) == (1 if dtype == "float64" else 6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["q", "k"])
def test_every_kind_of_norm(driver, kind, side):
    """A kind without a kernel is refused on both sides and alone, in one sentence: by the spec's rules and by the launcher."""
    driver.runs_kernels = False
    kinds = {f"{other}_kind": kind if other == side else "rms" for other in "qk"}
    spec = QKNormSpec(
        attention=AttentionSpec(q_num_heads=2, kv_num_heads=1, scale=0.5), norm=NormSpec(**kinds, epsilon_mode="clamp")
    )
    inputs = {name: np.ones((1, 1, width), np.float32) for name, width in {"query": 32, "key": 16, "value": 16}.items()}
    expected = cuda_refusal(spec, dtype="float32", head_sizes=(16, 16))
    hint = f"say what {kind!r} is in cuda_support.py and in refuse_norm of cuda_attention.cc"
    assert said(driver.attention, spec, inputs) == asked(driver, spec, "float32") == expected, hint
    alone = QKNormRotarySpec(num_heads=3, kind=kind, epsilon_mode="clamp")
    assert said(driver.rotary, alone, {"x": np.ones((2, 1, 48), np.float32)}) == cuda_refusal(alone, dtype="float32"), hint


def asked(driver, spec, dtype):
    message = Message()
    code = driver.launcher.qknorm_cuda_check_attention(
        ctypes.byref(pack_attributes(spec)), ctypes.c_int64(ELEMENT_CODES[NUMPY_TYPES[dtype]]), ctypes.byref(message)
    )
    return message.text.decode() if code else None


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary(driver, dtype):
    driver.runs_kernels = False
    outcomes = set()
    for rotary, groups, head in itertools.product(ROTARIES, (1, 2), HEADS):
        spec = QKNormRotarySpec(num_heads=3, kind="rms", groups=groups, rotary=rotary)
        inputs = {"x": np.ones((2, 1, 3 * head), NUMPY_TYPES[dtype])} | tables(rotary, dtype)
        expected = cuda_refusal(spec, dtype=dtype, head_sizes=(head,))
        assert said(driver.rotary, spec, inputs) == expected, spec
        outcomes.add(expected)
    assert len(outcomes) == (1 if dtype == "float64" else 5)


def test_the_largest_head_is_that_of_the_images():
    assert max(PADDED_HEADS) == LARGEST_HEAD
