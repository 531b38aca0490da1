"""What the CUDA kernels do not serve, so that a lowering chooses another way before a session would refuse the model.

The launcher (`custom_ops/ort/cuda_attention.cc`) has the same rules and says the same sentences;
`tests/gpu/test_cuda_refusals.py` compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, assert_never

from qknorm_onnx.spec.qk_norm_spec import NormKind, QKNormRotarySpec, QKNormSpec, needs_float64, rotates, rotates_before_norm
from qknorm_onnx.spec.signature import ATTENTION_OP, KERNEL_DTYPES, Dtype

CUDA_DTYPES: Final = KERNEL_DTYPES[ATTENTION_OP, "cuda"]
LARGEST_HEAD: Final = 256


def cuda_refusal(spec: QKNormSpec | QKNormRotarySpec, *, dtype: Dtype, head_sizes: tuple[int, ...] = ()) -> str | None:
    """Why the CUDA kernels do not serve `spec`, as a sentence without a full stop; None where they do.

    Args:
        spec: the node's meaning.
        dtype: type T of its first input.
        head_sizes: D and Dv where they are known.
    """
    spec.check()
    if dtype not in CUDA_DTYPES:
        return f"the CUDA kernels compute in float32: {dtype} has none"
    if isinstance(spec, QKNormSpec) and needs_float64(spec.attention.softmax_precision):
        return "the CUDA kernels compute the softmax in float32: softmax_precision 'float64' has none"
    for kind in _kinds(spec):
        if (reason := _kind_refusal(kind)) is not None:
            return reason
    if rotates(spec.rotary.order) and spec.rotary.interleaved and spec.rotary.offset % 2:
        return f"interleaved rotary pairs from the odd offset {spec.rotary.offset} have no CUDA kernel"
    if rotates_before_norm(spec.rotary.order) and _groups(spec) > 1:
        return "norm_groups of a head that is rotated before its norm have no CUDA kernel"
    too_large = [size for size in head_sizes if size > LARGEST_HEAD]
    if too_large:
        return f"a head of {max(too_large)} values has no CUDA kernel: {LARGEST_HEAD} is the largest"
    return None


def _kind_refusal(kind: NormKind) -> str | None:
    """Why a kind of norm has no CUDA kernel: a new kind is refused here, or has its flags in `triton_arguments.py`."""
    match kind:
        case "none" | "rms" | "layer" | "l2":
            return None
        case _:
            assert_never(kind)


def _kinds(spec: QKNormSpec | QKNormRotarySpec) -> tuple[NormKind, ...]:
    return (spec.norm.q_kind, spec.norm.k_kind) if isinstance(spec, QKNormSpec) else (spec.kind,)


def _groups(spec: QKNormSpec | QKNormRotarySpec) -> int:
    return spec.norm.groups if isinstance(spec, QKNormSpec) else spec.groups


def head_sizes(spec: QKNormSpec | QKNormRotarySpec, widths: Mapping[str, int]) -> tuple[int, ...]:
    """D and Dv, as far as the last dimensions of the inputs `query`, `value` or `x` say them."""
    if isinstance(spec, QKNormRotarySpec):
        heads = {"x": spec.num_heads}
    else:
        heads = {"query": spec.attention.q_num_heads, "value": spec.attention.kv_num_heads}
    return tuple(widths[name] // count for name, count in heads.items() if name in widths)
