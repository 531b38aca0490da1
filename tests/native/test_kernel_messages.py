"""What is wrong with a call is said in one sentence that names the input, what is expected and what was given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_call import KernelError, NativeLibrary

from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormSpec, RotarySpec

F32 = np.float32
SPEC = QKNormSpec(attention=AttentionSpec(q_num_heads=4, kv_num_heads=2, scale=0.5), norm=NormSpec(q_kind="rms", k_kind="rms"))
ROTARY = QKNormSpec(attention=SPEC.attention, rotary=RotarySpec(order="after_norm"))


def good_inputs() -> dict[str, Any]:
    return {"query": np.ones((2, 3, 32), F32), "key": np.ones((2, 3, 16), F32), "value": np.ones((2, 3, 16), F32)}


@pytest.mark.parametrize(
    ("spec", "changes", "message"),
    [
        (SPEC, {"query": np.ones((2, 32), F32)}, "query has shape (2, 32); it needs 3 dimensions"),
        (SPEC, {"query": np.ones((2, 3, 30), F32)}, "query has shape (2, 3, 30); its last dimension must split into 4 heads"),
        (SPEC, {"query": None}, "input query is missing"),
        (
            SPEC,
            {"query": np.ones((2, 3, 32), np.int64)},
            "query is of type int64; float32, float64, float16 or bfloat16 is expected",
        ),
        (SPEC, {"key": np.ones((2, 3, 16), np.float64)}, "key is of type float64; float32 is expected where query is float32"),
        (SPEC, {"key": np.ones((2, 3, 18), F32)}, "key has shape (2, 3, 18), head size 9; 8 is expected, as in query (2, 3, 32)"),
        (SPEC, {"key": np.ones((1, 3, 16), F32)}, "key has shape (1, 3, 16); its batch size must be the query's, 2"),
        (SPEC, {"value": np.ones((2, 4, 16), F32)}, "value has shape (2, 4, 16); it needs as many positions as key (2, 3, 16)"),
        (SPEC, {"q_norm_weight": np.ones(9, F32)}, "q_norm_weight has shape (9); (8), (4, 8) or (32) is expected"),
        (SPEC, {"head_sink": np.ones(3, F32)}, "head_sink has shape (3); (4) is expected"),
        (SPEC, {"q_scale": np.ones((5,), F32)}, "q_scale has shape (5); it must be broadcastable to (2, 4, 3, 8)"),
        (
            SPEC,
            {"attention_bias": np.ones((3, 4), F32)},
            "attention_bias has shape (3, 4); it must be broadcastable to (2, 4, 3, 3)",
        ),
        (SPEC, {"cos": np.ones((3, 8), F32)}, "cos is given, but rotary_order is 'none'"),
        (SPEC, {"past_key": np.ones((2, 2, 5, 8), F32)}, "past_key and past_value must be given together"),
        (
            SPEC,
            {"cache_length": np.ones(2, np.int64)},
            "cache_length needs past_key and past_value, the buffers that it speaks of",
        ),
        (
            SPEC,
            {
                "past_key": np.ones((2, 2, 5, 8), F32),
                "past_value": np.ones((2, 2, 5, 8), F32),
                "cache_length": np.array([5, 6]),
            },
            "cache_length[1] is 6; it must be within 0 .. 5, as many entries as past_key (2, 2, 5, 8) has",
        ),
        (
            SPEC,
            {"past_key": np.ones((2, 2, 5, 9), F32), "past_value": np.ones((2, 2, 5, 8), F32)},
            "past_key has shape (2, 2, 5, 9); (2, 2, 5, 8) is expected",
        ),
        (ROTARY, {}, "rotary_order is set: the inputs cos and sin are both needed"),
        (
            ROTARY,
            {"cos": np.ones((3, 5), F32), "sin": np.ones((3, 5), F32)},
            "cos has shape (3, 5); its last dimension must be 4 or 8, for 8 rotated values",
        ),
        (
            ROTARY,
            {"cos": np.ones((2, 4), F32), "sin": np.ones((2, 4), F32)},
            "cos has shape (2, 4); its last dimension but one must be the 3 positions of the new tokens",
        ),
        (
            ROTARY,
            {"cos": np.ones((3, 4), F32), "sin": np.ones((3, 8), F32)},
            "cos has shape (3, 4) and sin (3, 8); their widths must be equal",
        ),
    ],
)
def test_message(library: NativeLibrary, spec: QKNormSpec, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelError) as caught:
        library.attention(spec, good_inputs() | changes)
    assert str(caught.value) == message


def test_the_good_call_is_accepted(library: NativeLibrary) -> None:
    assert library.attention(SPEC, good_inputs())["Y"].shape == (2, 3, 32)
