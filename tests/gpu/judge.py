"""Rounded inputs, the float64 truth for them, and how large an error may be."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

from qknorm_onnx.spec.reference import qk_norm_attention, qk_norm_rotary
from qknorm_onnx.torch_export.operators import eager
from qknorm_onnx.validation.measures.error_budget import TORCH_FACTOR, floor

NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def rounded(inputs: dict[str, Any], dtype: str, *, wide: tuple[str, ...] = ()) -> dict[str, Any]:
    """Float inputs in `dtype`, those named in `wide` in float32."""

    def convert(name: str, value: Any) -> Any:
        value = np.asarray(value)
        if value.dtype.kind != "f":
            return value
        return value.astype(np.float32 if name in wide else NUMPY[dtype])

    return {name: convert(name, value) for name, value in inputs.items()}


def to_torch(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """NumPy (bfloat16 included) as torch tensors with memory of their own."""
    out = {}
    for name, value in inputs.items():
        if value.dtype == ml_dtypes.bfloat16:
            out[name] = torch.from_numpy(value.view(np.uint16).copy()).view(torch.bfloat16)
        else:
            out[name] = torch.from_numpy(value.copy())
    return out


def to_float64(value: Any) -> Any:
    """An output of either kind in float64."""
    return value.double().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value).astype(np.float64)


def check_attention(spec: Any, inputs: dict[str, Any], outputs: list[Any], dtype: str) -> None:
    """Fails where an output is further from the truth than twice PyTorch's own error and four units."""
    truth = list(qk_norm_attention(spec, inputs).values())
    eagerly = eager.attention(spec, to_torch(inputs))
    unused = _unused_entries(inputs)
    for index, (output, expected, theirs) in enumerate(zip(outputs, truth, eagerly, strict=False)):
        check(to_float64(output), expected, to_float64(theirs), dtype, ignored=unused if index else None)


def check_rotary(spec: Any, inputs: dict[str, Any], output: Any, dtype: str) -> None:
    """The same for QKNormRotary."""
    expected = qk_norm_rotary(spec, inputs)["Y"]
    check(to_float64(output), expected, to_float64(eager.rotary(spec, to_torch(inputs))), dtype)


def _unused_entries(inputs: dict[str, Any]) -> Any:
    """Which rows of the cache's buffers hold nothing (B, 1, T, 1)."""
    if "cache_length" not in inputs:
        return None
    used = inputs["cache_length"] + inputs["key"].shape[1]
    return (np.arange(inputs["past_key"].shape[2]) >= used[:, None])[:, None, :, None]


def check(output: Any, expected: Any, theirs: Any, dtype: str, *, ignored: Any = None) -> None:
    """`err(y) = max|y - r| / max|r|`, against the budget."""
    assert output.shape == expected.shape
    if ignored is not None:
        output, expected, theirs = (np.where(ignored, 0.0, each) for each in (output, expected, theirs))
    if not expected.size:
        return
    size = max(np.abs(expected).max(), np.finfo(np.float32).tiny)
    error, allowed = (np.abs(each - expected).max() / size for each in (output, theirs))
    allowed = TORCH_FACTOR * allowed + floor(dtype)  # type: ignore[arg-type]
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def has_room(case: Any) -> bool:
    """Whether the buffers of `case` have room for its new entries: on CUDA they do not grow."""
    lengths = case.inputs.get("cache_length")
    return lengths is None or int(lengths.max(initial=0)) + case.inputs["key"].shape[1] <= case.inputs["past_key"].shape[2]
