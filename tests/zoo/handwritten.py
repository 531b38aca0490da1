"""Two layers of attention written out by hand, for forms that no class of transformers has, and for look-alikes."""

from __future__ import annotations

import torch

from tests.zoo.attention_block import Attn, Block2
from tests.zoo.entries import B, Entries, S, entry, normal
from tests.zoo.norm_modules import (
    BN,
    GN,
    L2,
    LN0,
    NGPT,
    RMS,
    ClampLogits,
    ClampTau,
    DyT,
    FullHidden,
    L2Param,
    L2Rsqrt,
    LNb,
    RMSPerHead,
    Tau,
    TorchRMS,
)

ZOO: Entries = {}

H = 4
TAGS = {"lib": "handwritten", "cache": False, "gqa": False, "extras": [], "attn_impl": "eager"}


def hand(entries, name, tags, make, *, cross=False, key_mask=False):
    """Registers two layers of attention that `make` returns; `cross`: over a context; `key_mask`: with padded keys."""

    @entry(entries, name, TAGS | {"family": name} | tags)
    def block(attention):
        inputs, axes, keys = {"x": normal(B, S, 64)}, {"x": {0: "batch", 1: "seq"}}, 9 if cross else S
        if cross:
            inputs["context"] = normal(B, keys, 48, seed=5)
            axes["context"] = {0: "batch", 1: "kv"}
        if key_mask:
            inputs["key_mask"] = torch.arange(keys)[None] < torch.tensor([[7], [5]])
            axes["key_mask"] = {0: "batch", 1: "kv" if cross else "seq"}
        return Block2(make), inputs, axes


hand(
    ZOO,
    "h_cosine_tau_per_head",
    {"norm": "l2", "axis": "head_dim", "order": "no_rope", "rope": "none", "scale": "tau[h]", "mask": "bidirectional"},
    lambda: Attn(norm=L2, rope="none", post_logits=Tau(H), causal=False),
)
hand(
    ZOO,
    "h_cosine_tau_causal",
    {"norm": "l2", "axis": "head_dim", "order": "no_rope", "rope": "none", "scale": "tau[h]", "mask": "causal"},
    lambda: Attn(norm=L2, rope="none", post_logits=Tau(H)),
)
hand(
    ZOO,
    "h_cosnorm_scalar_tau",
    {"norm": "l2", "axis": "head_dim", "order": "no_rope", "rope": "none", "scale": "scalar tau", "mask": "bidirectional"},
    lambda: Attn(norm=L2, rope="none", post_logits=Tau(None), causal=False),
)
hand(
    ZOO,
    "h_l2_rsqrt_sum",
    {
        "norm": "l2 (rsqrt(sum+eps))",
        "axis": "head_dim",
        "order": "before_rope",
        "rope": "half",
        "scale": "sqrt(d)",
        "mask": "causal",
    },
    lambda: Attn(norm=L2Rsqrt, scale=4.0),
)
hand(
    ZOO,
    "h_l2_weighted_dim_scale",
    {
        "norm": "l2 * weight(heads,dim)",
        "axis": "head_dim",
        "order": "before_rope",
        "rope": "half",
        "scale": "const 10",
        "mask": "causal",
        "extras": ["x-transformers qk_norm_dim_scale", "vit-pytorch style"],
    },
    lambda: Attn(norm=L2Param, scale=10.0),
)
hand(
    ZOO,
    "h_ngpt",
    {"norm": "l2 * sqk", "axis": "head_dim", "order": "after_rope", "rope": "half", "scale": "sqrt(d)", "mask": "causal"},
    lambda: Attn(norm=NGPT, order="after", scale=4.0),
)
hand(
    ZOO,
    "h_vit22b_ln_nobias",
    {
        "norm": "layernorm(no bias)",
        "axis": "head_dim",
        "order": "no_rope",
        "rope": "none",
        "scale": "1/sqrt(d)",
        "mask": "bidirectional",
    },
    lambda: Attn(norm=lambda d, h: LNb(d, bias=False), rope="none", causal=False, bias=True),
)
hand(
    ZOO,
    "h_vit22b_sdpa",
    {
        "norm": "layernorm(no bias)",
        "axis": "head_dim",
        "order": "no_rope",
        "rope": "none",
        "scale": "1/sqrt(d)",
        "mask": "bidirectional",
        "attn_impl": "sdpa",
    },
    lambda: Attn(norm=lambda d, h: LNb(d, bias=False), rope="none", causal=False, impl="sdpa"),
)
hand(
    ZOO,
    "h_ln_bias_rope",
    {"norm": "layernorm", "axis": "head_dim", "order": "before_rope", "rope": "half", "scale": "1/sqrt(d)", "mask": "causal"},
    lambda: Attn(norm=LNb),
)
hand(
    ZOO,
    "h_ln_noaffine",
    {
        "norm": "layernorm(no affine)",
        "axis": "head_dim",
        "order": "before_rope",
        "rope": "half",
        "scale": "1/sqrt(d)",
        "mask": "bidirectional",
        "extras": ["AuraFlow fp32_layer_norm"],
    },
    lambda: Attn(norm=LN0, causal=False),
)
hand(
    ZOO,
    "h_rms_fullhidden_gqa",
    {
        "norm": "rms",
        "axis": "full_hidden",
        "order": "before_rope",
        "rope": "interleaved",
        "scale": "1/sqrt(d)",
        "mask": "bidirectional",
        "gqa": True,
        "extras": ["Wan/LTX"],
    },
    lambda: Attn(norm=FullHidden, rope="int", causal=False, kv=2),
)
hand(
    ZOO,
    "h_rms_after_rope",
    {"norm": "rms", "axis": "head_dim", "order": "after_rope", "rope": "half", "scale": "1/sqrt(d)", "mask": "causal"},
    lambda: Attn(norm=RMS, order="after"),
)
hand(
    ZOO,
    "h_rms_perhead_gqa",
    {
        "norm": "rms",
        "axis": "head_dim, weight (heads,dim)",
        "order": "before_rope",
        "rope": "half",
        "scale": "1/sqrt(d)",
        "mask": "causal",
        "gqa": True,
    },
    lambda: Attn(norm=RMSPerHead, kv=2),
)
hand(
    ZOO,
    "h_rms_interleaved_sdpa",
    {
        "norm": "nn.RMSNorm",
        "axis": "head_dim",
        "order": "before_rope",
        "rope": "interleaved",
        "scale": "1/sqrt(d)",
        "mask": "bidirectional",
        "attn_impl": "sdpa",
        "extras": ["Flux/SD3/Qwen-Image"],
    },
    lambda: Attn(norm=TorchRMS, rope="int", causal=False, impl="sdpa"),
)
hand(
    ZOO,
    "h_rms_partial_rope",
    {
        "norm": "rms",
        "axis": "head_dim",
        "order": "before_rope",
        "rope": "half-partial(.5)",
        "scale": "1/sqrt(d)",
        "mask": "causal",
        "gqa": True,
    },
    lambda: Attn(norm=RMS, rotary_frac=0.5, kv=2, hd=32),
)
hand(
    ZOO,
    "h_softcap_rms",
    {
        "norm": "rms",
        "axis": "head_dim",
        "order": "before_rope",
        "rope": "half",
        "scale": "1/sqrt(d)",
        "mask": "causal",
        "extras": ["softcap 5"],
    },
    lambda: Attn(norm=RMS, softcap=5.0),
)
hand(
    ZOO,
    "h_clamped_logit_scale",
    {
        "norm": "l2",
        "axis": "head_dim",
        "order": "no_rope",
        "rope": "none",
        "scale": "exp(min(ls,log100))",
        "mask": "bidirectional",
    },
    lambda: Attn(norm=L2, rope="none", post_logits=ClampTau(H), causal=False),
)
hand(
    ZOO,
    "h_clamped_logits",
    {
        "norm": "rms",
        "axis": "head_dim",
        "order": "before_rope",
        "rope": "half",
        "scale": "1/sqrt(d)",
        "mask": "causal",
        "extras": ["logits clamp +-3"],
    },
    lambda: Attn(norm=RMS, post_logits=ClampLogits(0.25, 3.0)),
)
hand(
    ZOO,
    "h_groupnorm",
    {
        "norm": "groupnorm(groups=heads) per token",
        "axis": "head_dim, weight+bias (heads*dim)",
        "order": "no_rope",
        "rope": "none",
        "scale": "1/sqrt(d)",
        "mask": "bidirectional",
    },
    lambda: Attn(norm=GN, rope="none", causal=False),
)
hand(
    ZOO,
    "h_batchnorm_eval",
    {
        "norm": "batchnorm eval (affine)",
        "axis": "channel",
        "order": "no_rope",
        "rope": "none",
        "scale": "1/sqrt(d)",
        "mask": "bidirectional",
        "extras": ["out of scope: not a norm at inference"],
    },
    lambda: Attn(norm=BN, rope="none", causal=False),
)
hand(
    ZOO,
    "h_dynamic_tanh",
    {
        "norm": "DynamicTanh",
        "axis": "elementwise",
        "order": "before_rope",
        "rope": "half-partial",
        "scale": "1/sqrt(d)",
        "mask": "bidirectional",
        "extras": ["diffusers SAME autoencoder"],
    },
    lambda: Attn(norm=DyT, causal=False, rotary_frac=0.5),
)
hand(
    ZOO,
    "h_cross_rms",
    {"norm": "rms", "axis": "head_dim", "order": "no_rope", "rope": "none", "scale": "1/sqrt(d)", "mask": "cross"},
    lambda: Attn(norm=RMS, rope="none", causal=False, cross_dim=48),
    cross=True,
)
hand(
    ZOO,
    "h_rms_sliding",
    {
        "norm": "rms",
        "axis": "head_dim",
        "order": "before_rope",
        "rope": "half",
        "scale": "1/sqrt(d)",
        "mask": "causal+sliding(4)",
    },
    lambda: Attn(norm=RMS, window=4),
)
