"""QK-Norm attention as a torch module, from the plainest (L2 norm and a learnable temperature) to any spec."""

from __future__ import annotations

import math
from typing import Any, Final, assert_never

import torch
from torch import Tensor, nn

from qknorm_onnx.spec.qk_norm_spec import (
    AttentionSpec,
    NormKind,
    NormSpec,
    QKNormSpec,
    SpecError,
    normalises,
    rotates,
    spans_heads,
)
from qknorm_onnx.torch_export.operators.torch_op import qk_norm_attention, qk_norm_attention_with_present

# torch.nn.functional.normalize divides by max(norm, 1e-12).
NORMALIZE_EPSILON: Final = 1e-12


def cosine_attention_spec(n_heads: int) -> QKNormSpec:
    """L2-normalised queries and keys, no mask, no scale of its own: the temperature is an input (arXiv 2010.04245)."""
    return QKNormSpec(
        attention=AttentionSpec(q_num_heads=n_heads, kv_num_heads=n_heads, scale=1.0),
        norm=NormSpec(
            q_kind="l2",
            k_kind="l2",
            q_epsilon=NORMALIZE_EPSILON,
            k_epsilon=NORMALIZE_EPSILON,
            epsilon_mode="clamp",
        ),
    )


class QKNormAttention(nn.Module):
    """Projections around one QK-Norm attention, which exports to exactly one node.

    `QKNormAttention(d_model, n_heads)` is L2 norm with a learnable temperature of each head: parameters `W_q`, `W_k`, `W_v`,
    `W_o` and `tau` (n_heads, 1, 1), which starts at sqrt(d_model / n_heads). `from_spec` builds every other variant; its
    norm parameters are `q_norm_weight`, `k_norm_weight`, `q_norm_bias` and `k_norm_bias`.
    """

    def __init__(self, d_model: int, n_heads: int) -> None:
        if d_model % n_heads:
            raise SpecError(f"d_model {d_model} is not a multiple of n_heads {n_heads}")
        super().__init__()
        head_size = d_model // n_heads
        self._build(cosine_attention_spec(n_heads), d_model, d_model, head_size, head_size, bias=True)
        self.tau = nn.Parameter(torch.full((n_heads, 1, 1), math.sqrt(head_size)))

    @classmethod
    def from_spec(
        cls,
        spec: QKNormSpec,
        *,
        d_model: int,
        head_size: int | None = None,
        value_head_size: int | None = None,
        d_context: int | None = None,
        bias: bool = True,
        norm_weight: bool | None = None,
        norm_bias: bool = False,
        norm_per_head: bool = False,
        q_scale: Tensor | None = None,
        head_sink: bool = False,
        rotary_base: float | None = None,
    ) -> QKNormAttention:
        """The module of any spec.

        Args:
            spec: what is computed.
            d_model: size of the hidden states in and out.
            head_size: D; None is d_model / query heads.
            value_head_size: Dv; None is D.
            d_context: size of the states that keys and values are projected from; None is d_model.
            bias: whether the projections have biases.
            norm_weight: whether the norms have a gain; None: all but L2.
            norm_bias: whether the norms have a bias.
            norm_per_head: gains and biases of shape (H, D) instead of (D). A hidden norm always has (H * D).
            q_scale: first value of a learnable factor of the queries, broadcastable to (B, Hq, S, D).
            head_sink: whether each head has a learnable sink logit.
            rotary_base: make the rotary tables from positions, with frequencies base ** (-2i / R); None: `forward` takes them.

        Raises:
            SpecError: sizes that contradict the spec.
        """
        head_size = head_size or d_model // spec.attention.q_num_heads
        if rotary_base is not None and spec.rotary.sections > 1:
            raise SpecError(
                "rotary_base makes tables of one position per token; with rotary sections pass cos and sin to forward"
            )
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._build(spec, d_model, d_context or d_model, head_size, value_head_size or head_size, bias=bias)
        module._add_norm_parameters(norm_weight, norm_bias, norm_per_head)
        if q_scale is not None:
            module.tau = nn.Parameter(q_scale.clone())
        if head_sink:
            module.head_sink = nn.Parameter(torch.zeros(spec.attention.q_num_heads))
        if rotates(spec.rotary.order):
            spec.rotary.rotated_size(head_size)
            module.rotary_base = rotary_base
        return module

    def _build(self, spec: QKNormSpec, d_model: int, d_context: int, head_size: int, value_size: int, *, bias: bool) -> None:
        heads, kv_heads = spec.attention.q_num_heads, spec.attention.kv_num_heads
        self.spec = spec
        self.head_size = head_size
        self.rotary_base: float | None = None
        self.W_q = nn.Linear(d_model, heads * head_size, bias=bias)
        self.W_k = nn.Linear(d_context, kv_heads * head_size, bias=bias)
        self.W_v = nn.Linear(d_context, kv_heads * value_size, bias=bias)
        self.W_o = nn.Linear(heads * value_size, d_model, bias=bias)
        for name in ("q_norm_weight", "k_norm_weight", "q_norm_bias", "k_norm_bias", "tau", "head_sink"):
            self.register_parameter(name, None)

    def _add_norm_parameters(self, weight: bool | None, bias: bool, per_head: bool) -> None:
        norm, attention = self.spec.norm, self.spec.attention
        sides = (("q", norm.q_kind, attention.q_num_heads), ("k", norm.k_kind, attention.kv_num_heads))
        for side, kind, heads in sides:
            shape = (heads, self.head_size) if per_head else (self.head_size,)
            if spans_heads(norm.axis):
                shape = (heads * self.head_size,)
            if normalises(kind) and (weight if weight is not None else _usually_has_weight(kind)):
                setattr(self, f"{side}_norm_weight", nn.Parameter(torch.ones(shape)))
            if normalises(kind) and bias:
                setattr(self, f"{side}_norm_bias", nn.Parameter(torch.zeros(shape)))

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_bias: Tensor | None = None,
        past_key: Tensor | None = None,
        past_value: Tensor | None = None,
        cache_length: Tensor | None = None,
        query_offset: Tensor | None = None,
    ) -> Any:
        """Attention of x (B, S, d_model) to itself, or to `context` (B, N, d_context).

        Args:
            x: hidden states.
            context: states that keys and values come from; None is x.
            cos: rotary table (S, W), (B, S, W) or (B, H, S, W), where the spec has a rotary and the module no `rotary_base`.
            sin: as cos.
            position_ids: (S) or (B, S), for `rotary_base`; None counts on from the cache.
            attention_bias: bool or float, broadcastable to (B, Hq, S, T).
            past_key: (B, Hkv, P, D), with `past_value`.
            past_value: (B, Hkv, P, Dv).
            cache_length: int64 (B): the past has a fixed size, of which so many entries are valid.
            query_offset: int64 (B): position of the first query, where no cache says it.

        Returns:
            (B, S, d_model); with a past also present_key and present_value.
        """
        source = x if context is None else context
        if self.rotary_base is not None and cos is None:
            cos, sin = self._tables(x, position_ids, past_key, cache_length if cache_length is not None else query_offset)
        optional = {
            **{
                name: getattr(self, name)
                for name in ("q_norm_weight", "k_norm_weight", "q_norm_bias", "k_norm_bias", "head_sink")
            },
            "q_scale": self.tau,
            "cos": cos,
            "sin": sin,
            "attention_bias": attention_bias,
            "past_key": past_key,
            "past_value": past_value,
            "cache_length": cache_length,
            "query_offset": query_offset,
        }
        projected = (self.W_q(x), self.W_k(source), self.W_v(source))
        if past_key is None:
            return self.W_o(qk_norm_attention(self.spec, *projected, **optional))
        y, present_key, present_value = qk_norm_attention_with_present(self.spec, *projected, **optional)
        return self.W_o(y), present_key, present_value

    def _tables(
        self, x: Tensor, position_ids: Tensor | None, past_key: Tensor | None, first: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """cos and sin, (S, R/2) or (B, S, R/2), never below float32: large positions have no place in half precision."""
        assert self.rotary_base is not None
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)
            if first is not None:
                position_ids = position_ids + first[:, None]
            elif past_key is not None:
                position_ids = position_ids + past_key.shape[2]
        dtype = torch.promote_types(x.dtype, torch.float32)
        size = self.spec.rotary.rotated_size(self.head_size)
        exponents = torch.arange(0, size, 2, device=x.device, dtype=dtype) / size
        angles = position_ids.to(dtype)[..., None] * self.rotary_base**-exponents
        return angles.cos(), angles.sin()

    def extra_repr(self) -> str:
        """The spec in one line."""
        from qknorm_onnx.spec.one_line import one_line

        return one_line(self.spec)


def _usually_has_weight(kind: NormKind) -> bool:
    match kind:
        case "none" | "l2":
            return False
        case "rms" | "layer":
            return True
        case _:
            assert_never(kind)
