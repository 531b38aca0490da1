"""The operators as torch operators: `qknorm::attention`, `qknorm::attention_with_present`, `qknorm::rotary`.

Opaque to torch.export, so that one attention stays one node; `translation_table()` turns each into one node of the
`ai.qknorm` domain. The inputs are those of `signature.py` in the same order, the spec travels as one string. Gradients
come from the plain torch ops of `eager.py`, run again in the backward pass: only the inputs are kept between the two.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from qknorm_onnx.spec.attributes import from_attributes, to_attributes
from qknorm_onnx.spec.cuda_support import CUDA_DTYPES, cuda_refusal
from qknorm_onnx.spec.qk_norm_spec import QKNormRotarySpec, QKNormSpec, SpecError
from qknorm_onnx.spec.shape_inference import check_attention_inputs, check_cache_length, check_rotary_inputs
from qknorm_onnx.spec.signature import ATTENTION_INPUTS, ROTARY_INPUTS, TensorSignature
from qknorm_onnx.torch_export.operators import eager

Inputs = dict[str, Tensor]
Outputs = tuple[Tensor, ...]


def encode_spec(spec: QKNormSpec | QKNormRotarySpec) -> str:
    """`spec` as the string that the torch operators take: its ONNX attributes as JSON, sorted."""
    return json.dumps(to_attributes(spec), sort_keys=True, separators=(",", ":"))


@functools.lru_cache(maxsize=1024)
def decode_attention_spec(text: str) -> QKNormSpec:
    """The spec that `encode_spec` wrote. Raises SpecError for an unknown or missing field."""
    return from_attributes(QKNormSpec, json.loads(text))


@functools.lru_cache(maxsize=1024)
def decode_rotary_spec(text: str) -> QKNormRotarySpec:
    """The spec that `encode_spec` wrote. Raises SpecError for an unknown or missing field."""
    return from_attributes(QKNormRotarySpec, json.loads(text))


def qk_norm_attention(spec: QKNormSpec, query: Tensor, key: Tensor, value: Tensor, **optional: Tensor | None) -> Tensor:
    """QK-Norm attention: Y (B, S, Hq*Dv), in the type of `query`.

    Args:
        spec: what is computed.
        query: (B, S, Hq*D), projected, not yet normalised.
        key: (B, N, Hkv*D).
        value: (B, N, Hkv*Dv).
        optional: the other inputs of `signature.ATTENTION_INPUTS` by name; None is absent.

    Raises:
        SpecError: an input is unknown, or its shape or type contradicts the spec.
    """
    arguments = _in_order(ATTENTION_INPUTS, {"query": query, "key": key, "value": value, **optional})
    return torch.ops.qknorm.attention(*arguments, spec=encode_spec(spec))


def qk_norm_attention_with_present(
    spec: QKNormSpec, query: Tensor, key: Tensor, value: Tensor, **optional: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `qk_norm_attention`; returns Y and the cache after this call, present_key (B, Hkv, T, D) and present_value."""
    arguments = _in_order(ATTENTION_INPUTS, {"query": query, "key": key, "value": value, **optional})
    return torch.ops.qknorm.attention_with_present(*arguments, spec=encode_spec(spec))


def qk_norm_rotary(spec: QKNormRotarySpec, x: Tensor, **optional: Tensor | None) -> Tensor:
    """Norm, rotary and scale of projected x (B, S, H*D): Y of the same shape and type.

    `optional` are the other inputs of `signature.ROTARY_INPUTS` by name. Raises SpecError as `qk_norm_attention` does.
    """
    return torch.ops.qknorm.rotary(*_in_order(ROTARY_INPUTS, {"x": x, **optional}), spec=encode_spec(spec))


def _in_order(signature: Sequence[TensorSignature], inputs: Mapping[str, Tensor | None]) -> list[Tensor | None]:
    names = [tensor.name for tensor in signature]
    unknown = sorted(set(inputs) - set(names))
    if unknown:
        raise SpecError(f"unknown input(s) {', '.join(unknown)}; known are {', '.join(names)}")
    return [inputs.get(name) for name in names]


def _given(signature: Sequence[TensorSignature], arguments: Sequence[Tensor | None]) -> Inputs:
    # torch drops trailing arguments that are at their default
    return {tensor.name: value for tensor, value in zip(signature, arguments, strict=False) if value is not None}


def _check_dtypes(signature: Sequence[TensorSignature], inputs: Inputs) -> None:
    """Raises SpecError for an input whose type the operator does not take; T is the type of the first input."""
    dtype = inputs[signature[0].name].dtype
    if not dtype.is_floating_point:
        raise SpecError(f"{signature[0].name} has type {dtype}; a float type is expected")
    allowed = {
        "T": (dtype,),
        "T or float": (dtype, torch.float32),
        "bool, T or float": (torch.bool, dtype, torch.float32),
        "int64": (torch.int64,),
    }
    for tensor in signature:
        if tensor.name in inputs and inputs[tensor.name].dtype not in allowed[tensor.constraint]:
            wanted = " or ".join(str(each) for each in dict.fromkeys(allowed[tensor.constraint]))
            raise SpecError(f"{tensor.name} has type {inputs[tensor.name].dtype}; {wanted} is expected")


def _shapes(inputs: Inputs) -> dict[str, list[int | None]]:
    return {name: [size if isinstance(size, int) else None for size in tensor.shape] for name, tensor in inputs.items()}


def _checked_attention(arguments: Sequence[Tensor | None], text: str) -> tuple[QKNormSpec, Inputs]:
    spec, inputs = decode_attention_spec(text), _given(ATTENTION_INPUTS, arguments)
    _check_dtypes(ATTENTION_INPUTS, inputs)
    check_attention_inputs(spec, _shapes(inputs))
    return spec, inputs


def _checked_rotary(arguments: Sequence[Tensor | None], text: str) -> tuple[QKNormRotarySpec, Inputs]:
    spec, inputs = decode_rotary_spec(text), _given(ROTARY_INPUTS, arguments)
    _check_dtypes(ROTARY_INPUTS, inputs)
    check_rotary_inputs(spec, _shapes(inputs))
    return spec, inputs


def _check_room_in_cache(inputs: Inputs) -> None:
    """A torch operator has outputs whose sizes are known before it runs: here buffers do not grow."""
    if "cache_length" not in inputs or not inputs["cache_length"].numel():
        return
    new, capacity = inputs["key"].shape[1], inputs["past_key"].shape[2]
    low, high = (int(bound) for bound in inputs["cache_length"].aminmax())
    if low < 0 or high + new > capacity:
        raise ValueError(
            f"cache_length is {low} to {high}: {new} new entries do not fit into a cache of {capacity}, which the PyTorch "
            "operator cannot make larger: give past_key and past_value more entries"
        )
    check_cache_length({name: tuple(tensor.shape) for name, tensor in inputs.items()}, [low, high])


def _run_attention(*arguments: Tensor | None, spec: str) -> Outputs:
    parsed, inputs = _checked_attention(arguments, spec)
    _check_room_in_cache(inputs)
    # A torch operator must return memory of its own, also where an output is a view of an input.
    return tuple(output.clone(memory_format=torch.contiguous_format) for output in eager.attention(parsed, inputs))


def _run_attention_on_cuda(*arguments: Tensor | None, spec: str) -> Outputs:
    """By the Triton kernels; in plain torch ops where they refuse the spec or Triton is not installed.

    `cache_length` is not checked, because that would wait for the GPU: rows without room come out as NaN.
    """
    parsed, inputs = _checked_attention(arguments, spec)
    sizes = (inputs["query"].shape[2] // parsed.attention.q_num_heads, inputs["value"].shape[2] // parsed.attention.kv_num_heads)
    if not _has_triton_kernel(parsed, inputs["query"], sizes):
        return _run_attention(*arguments, spec=spec)
    from qknorm_onnx.torch_export.operators import triton_attention

    y, present_key, present_value = triton_attention.attention(parsed, inputs)
    assert present_key is not None and present_value is not None, "with_present"
    return y, present_key, present_value


def _run_rotary_on_cuda(*arguments: Tensor | None, spec: str) -> Tensor:
    """As `_run_attention_on_cuda`."""
    parsed, inputs = _checked_rotary(arguments, spec)
    if not _has_triton_kernel(parsed, inputs["x"], (inputs["x"].shape[2] // parsed.num_heads,)):
        return _run_rotary(*arguments, spec=spec)
    from qknorm_onnx.torch_export.operators import triton_attention

    return triton_attention.rotary(parsed, inputs)


def _has_triton_kernel(spec: QKNormSpec | QKNormRotarySpec, x: Tensor, head_sizes: tuple[int, ...]) -> bool:
    dtypes = [dtype for dtype in CUDA_DTYPES if x.dtype == getattr(torch, dtype)]
    if not dtypes or importlib.util.find_spec("triton") is None:
        return False
    return cuda_refusal(spec, dtype=dtypes[0], head_sizes=head_sizes) is None


def _shape_attention(*arguments: Tensor | None, spec: str) -> Outputs:
    parsed, inputs = _checked_attention(arguments, spec)
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    heads, kv_heads = parsed.attention.q_num_heads, parsed.attention.kv_num_heads
    total = key.shape[1]
    if "past_key" in inputs:
        past = inputs["past_key"].shape[2]
        total = past if "cache_length" in inputs else past + total
    head_size, value_size = key.shape[2] // kv_heads, value.shape[2] // kv_heads
    return (
        query.new_empty(query.shape[0], query.shape[1], heads * value_size),
        query.new_empty(query.shape[0], kv_heads, total, head_size),
        query.new_empty(query.shape[0], kv_heads, total, value_size),
    )


def _run_rotary(*arguments: Tensor | None, spec: str) -> Tensor:
    return eager.rotary(*_checked_rotary(arguments, spec)).clone(memory_format=torch.contiguous_format)


def _shape_rotary(*arguments: Tensor | None, spec: str) -> Tensor:
    return torch.empty_like(_checked_rotary(arguments, spec)[1]["x"], memory_format=torch.contiguous_format)


def _first(function: Callable[..., Outputs]) -> Callable[..., Tensor]:
    def first_output(*arguments: Tensor | None, spec: str) -> Tensor:
        return function(*arguments, spec=spec)[0]

    return first_output


def _again_attention(arguments: Sequence[Tensor | None], spec: str) -> Outputs:
    return eager.attention(decode_attention_spec(spec), _given(ATTENTION_INPUTS, arguments))


def _again_attention_output(arguments: Sequence[Tensor | None], spec: str) -> Outputs:
    return _again_attention(arguments, spec)[:1]


def _again_rotary(arguments: Sequence[Tensor | None], spec: str) -> Outputs:
    return (eager.rotary(decode_rotary_spec(spec), _given(ROTARY_INPUTS, arguments)),)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    del output
    ctx.save_for_backward(*inputs)
    ctx.spec = keyword_only_inputs["spec"]


def _backward(again: Callable[[Sequence[Tensor | None], str], Outputs]) -> Callable[..., tuple[Tensor | None, ...]]:
    """The backward of an operator whose forward in plain torch ops is `again`."""

    def backward(ctx: Any, *output_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        arguments: tuple[Tensor | None, ...] = ctx.saved_tensors
        wanted = [index for index, needed in enumerate(ctx.needs_input_grad[: len(arguments)]) if needed]
        differentiable_twice = torch.is_grad_enabled()
        with torch.enable_grad():
            # Fresh names for the inputs: the gradient must stop here, also where one input was computed from another.
            renewed = [None if value is None else value.view_as(value) for value in arguments]
            sources = [value for index, value in enumerate(renewed) if index in wanted and value is not None]
            outputs = again(renewed, ctx.spec)
        pairs = [(y, g) for y, g in zip(outputs, output_gradients, strict=True) if g is not None and y.requires_grad]
        gradients: list[Tensor | None] = [None] * len(arguments)
        found = torch.autograd.grad(
            [y for y, _ in pairs],
            sources,
            [g for _, g in pairs],
            create_graph=differentiable_twice,
            allow_unused=True,
        )
        for index, gradient in zip(wanted, found, strict=True):
            gradients[index] = gradient
        return tuple(gradients)

    return backward


def _declare(
    name: str, signature: Sequence[TensorSignature], *, num_outputs: int, run: Any, on_cuda: Any, shape: Any, again: Any
) -> None:
    inputs = ", ".join(f"Tensor{'? ' + t.name + '=None' if t.optional else ' ' + t.name}" for t in signature)
    returns = "Tensor" if num_outputs == 1 else f"({', '.join(['Tensor'] * num_outputs)})"
    operator = torch.library.custom_op(f"qknorm::{name}", run, mutates_args=(), schema=f"({inputs}, *, str spec) -> {returns}")
    operator.register_kernel("cuda", on_cuda)
    operator.register_fake(shape)
    operator.register_autograd(_backward(again), setup_context=_keep_inputs)


_declare(
    "attention",
    ATTENTION_INPUTS,
    num_outputs=1,
    run=_first(_run_attention),
    on_cuda=_first(_run_attention_on_cuda),
    shape=_first(_shape_attention),
    again=_again_attention_output,
)
_declare(
    "attention_with_present",
    ATTENTION_INPUTS,
    num_outputs=3,
    run=_run_attention,
    on_cuda=_run_attention_on_cuda,
    shape=_shape_attention,
    again=_again_attention,
)
_declare(
    "rotary",
    ROTARY_INPUTS,
    num_outputs=1,
    run=_run_rotary,
    on_cuda=_run_rotary_on_cuda,
    shape=_shape_rotary,
    again=_again_rotary,
)

OPERATORS: Final = ("attention", "attention_with_present", "rotary")
