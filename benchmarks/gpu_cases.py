"""Inputs of the GPU check, PyTorch's own way to the same result, and the comparison with float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from benchmarks.gpu_launcher import Launcher
from qknorm_onnx.spec.cuda_support import cuda_refusal
from qknorm_onnx.spec.qk_norm_spec import AttentionSpec, NormSpec, QKNormSpec, RotarySpec
from qknorm_onnx.spec.reference import qk_norm_attention
from qknorm_onnx.spec.variants import VARIANTS
from qknorm_onnx.spec.variants.variant import Variant, example_inputs
from qknorm_onnx.torch_export.operators import eager, triton_attention

TORCH_FACTOR, FLOOR_UNITS = 2, 4  # the error budget of qknorm_onnx/validation/measures/error_budget.py
EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one measured attention."""

    batch: int
    new: int
    cached: int
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128

    @property
    def spec(self) -> QKNormSpec:
        """Qwen3's attention: RMS norm of each head, rotary after it, causal."""
        return QKNormSpec(
            attention=AttentionSpec(
                q_num_heads=self.heads, kv_num_heads=self.kv_heads, scale=self.head_size**-0.5, is_causal=True
            ),
            norm=NormSpec(q_kind="rms", k_kind="rms", q_epsilon=EPSILON, k_epsilon=EPSILON),
            rotary=RotarySpec(order="after_norm"),
        )

    @property
    def plain_spec(self) -> QKNormSpec:
        """The same attention of prepared queries and keys."""
        return dataclasses.replace(self.spec, norm=NormSpec(), rotary=RotarySpec())

    def inputs(self, *, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
        """Random inputs by name; with `cached` a cache that has room for exactly the new tokens."""
        generator = torch.Generator(device=device).manual_seed(1)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

        size = self.head_size
        out = {
            "query": random(self.batch, self.new, self.heads * size),
            "key": random(self.batch, self.new, self.kv_heads * size),
            "value": random(self.batch, self.new, self.kv_heads * size),
            "q_norm_weight": 1 + 0.5 * random(size),
            "k_norm_weight": 1 + 0.5 * random(size),
        }
        positions = torch.arange(self.cached, self.cached + self.new, device=device, dtype=torch.float32)
        angles = positions[:, None] * 10000.0 ** (-torch.arange(0, size, 2, device=device) / size)
        out |= {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}
        if self.cached:
            rows = (self.batch, self.kv_heads, self.cached + self.new, size)
            out |= {"past_key": random(*rows), "past_value": random(*rows)}
            out["cache_length"] = torch.full((self.batch,), self.cached, dtype=torch.int64, device=device)
        return out

    @property
    def floating_operations(self) -> float:
        """Of the two matrix products of a causal attention without a cache."""
        return 2.0 * self.batch * self.heads * self.new * (self.new + 1) * self.head_size

    @property
    def cache_bytes(self) -> float:
        """Read once by a decoding step in half precision."""
        return 2.0 * 2 * self.batch * self.kv_heads * (self.cached + self.new) * self.head_size


def ours(shape: Shape, inputs: dict[str, Tensor], *, plain: bool = False, launcher: Launcher | None = None) -> Callable[[], Any]:
    """Our kernels, compiled by PyTorch's Triton or those of the pack in `launcher`; a cache is updated in place."""
    spec = shape.plain_spec if plain else shape.spec
    names = ("query", "key", "value") if plain else tuple(inputs)
    given = {name: inputs[name] for name in names}
    present = (inputs["past_key"], inputs["past_value"]) if "past_key" in given else None
    if launcher is not None:
        return launcher.attention(spec, given, present=present)
    return lambda: triton_attention.attention(spec, given, with_present=False, present=present)[0]


def prepared(shape: Shape, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Norm and rotary in plain PyTorch: q (B, Hq, S, D) and k (B, Hkv, S, D)."""
    out = []
    for name, heads in (("query", shape.heads), ("key", shape.kv_heads)):
        x = inputs[name].view(shape.batch, shape.new, heads, shape.head_size)
        x = rms_norm(x, (shape.head_size,), inputs[f"{name[0]}_norm_weight"], EPSILON)
        first, second = x.chunk(2, -1)
        cos, sin = inputs["cos"][:, None], inputs["sin"][:, None]
        out.append(torch.cat((first * cos - second * sin, second * cos + first * sin), -1).transpose(1, 2))
    return out[0], out[1]


def torch_attention(shape: Shape, inputs: dict[str, Tensor]) -> Tensor:
    """The whole attention in PyTorch, with the cache in place: (B, S, Hq*D)."""
    q, k = prepared(shape, inputs)
    v = inputs["value"].view(shape.batch, shape.new, shape.kv_heads, shape.head_size).transpose(1, 2)
    if shape.cached:
        for buffer, fresh in ((inputs["past_key"], k), (inputs["past_value"], v)):
            buffer[:, :, shape.cached :].copy_(fresh)
        k, v = inputs["past_key"], inputs["past_value"]
    y = scaled_dot_product_attention(q, k, v, is_causal=shape.new > 1, enable_gqa=shape.heads != shape.kv_heads)
    return y.transpose(1, 2).flatten(2)


def torch_ways(shape: Shape, inputs: dict[str, Tensor], *, compiled: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """PyTorch by backend of its attention, and compiled as a whole."""
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
        if backend == SDPBackend.MATH and shape.new > 4096:
            continue  # its logits alone would fill the memory

        def run(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return torch_attention(shape, inputs)

        yield f"torch {backend.name.lower().removesuffix('_attention')}", run
    if compiled:
        whole = torch.compile(torch_attention, dynamic=False)
        yield "torch.compile", lambda: whole(shape, inputs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison with float64."""

    name: str
    spec: QKNormSpec
    inputs: dict[str, Tensor]
    dtype: torch.dtype

    @property
    def type_name(self) -> str:
        """As `bfloat16`."""
        return str(self.dtype).removeprefix("torch.")

    def truth(self) -> tuple[Any, float]:
        """Y in float64, and how far from it a kernel may be: the budget of PyTorch's own error in the type."""
        exact = {
            key: (value.double() if value.is_floating_point() else value).cpu().numpy() for key, value in self.inputs.items()
        }
        expected = qk_norm_attention(self.spec, exact)["Y"]
        theirs = relative_error(eager.attention(self.spec, self.inputs)[0], expected)
        return expected, TORCH_FACTOR * theirs + FLOOR_UNITS * torch.finfo(self.dtype).eps


def relative_error(y: Tensor, expected: Any) -> float:
    """max|y - r| / max|r|; NaN where y has one."""
    return float(np.abs(y.double().cpu().numpy() - expected).max()) / max(float(np.abs(expected).max()), 1e-30)


CHECKED = (
    "qwen3", "olmo2", "gemma3-sliding", "gemma2-article", "llama4", "command-r-plus", "vit-22b", "flux", "wan", "hunyuan",
    "rms-logit-clamp", "x-transformers-grouped-l2", "doge",
)  # fmt: skip


def cases(*, variants: int, length: int, head_size: int, types: tuple[torch.dtype, ...], device: str) -> Iterator[Case]:
    """The measured shape in each type, then the first `variants` of CHECKED; each prefilled and decoded."""
    shape = Shape(batch=2, new=length, cached=0, heads=4, kv_heads=2, head_size=head_size)
    token = Shape(batch=3, new=1, cached=5 * length, heads=8, kv_heads=2, head_size=head_size)
    for dtype in types:
        for name, each in (("causal prefill", shape), ("decode", token)):
            yield Case(name=name, spec=each.spec, inputs=each.inputs(dtype=dtype, device=device), dtype=dtype)
    for index, variant in enumerate(VARIANTS[name] for name in CHECKED[:variants]):
        dtype = types[index % len(types)]
        if cuda_refusal(variant.spec, dtype=str(dtype).removeprefix("torch."), head_sizes=(variant.head_size,)):  # type: ignore[arg-type]
            continue
        yield _case(variant, {"length": length}, dtype, device, "prefill")
        yield _case(variant, {"length": 1, "past_length": length, "capacity": length + 3}, dtype, device, "decode")


def _case(variant: Variant, sizes: dict[str, int], dtype: torch.dtype, device: str, what: str) -> Case:
    values = example_inputs(variant, batch=2, dtype=np.float64, **sizes)  # type: ignore[arg-type]
    tensors = {name: torch.from_numpy(value).to(device) for name, value in values.items()}
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
    return Case(name=f"{variant.name} {what}", spec=variant.spec, inputs=inputs, dtype=dtype)
