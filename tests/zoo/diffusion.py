"""Diffusion transformers of diffusers with tiny configurations: `ZOO` as in the package, not part of it.

They need `pip install diffusers` (0.42.1 was used), imported when an entry is built. Their sizes are those of the example.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.entries import B, Entries, entry, normal, randomised

ZOO: Entries = {}
TAGS = {
    "lib": "diffusers",
    "axis": "head_dim",
    "order": "before_rope",
    "rope": "interleaved",
    "scale": "1/sqrt(d)",
    "mask": "bidirectional joint",
    "cache": False,
    "gqa": False,
    "extras": [],
    "attn_impl": "sdpa",
}
HEADS = {"num_attention_heads": 4, "attention_head_dim": 16}


class FirstOutput(nn.Module):
    """A model of diffusers with one tensor as output."""

    def __init__(self, model, fixed):
        super().__init__()
        self.m = model
        self.fixed = fixed

    def forward(self, **inputs):
        output = self.m(**inputs, **self.fixed)
        output = getattr(output, "sample", output)
        while isinstance(output, (tuple, list)):
            output = output[0]
        return output


def diffusion(name: str, tags: dict[str, Any], model: str, settings: dict[str, Any], inputs, **fixed: Any) -> None:
    """Registers class `model` of diffusers; `inputs()` are its tensors, `fixed` its other arguments."""

    @entry(ZOO, name, TAGS | tags)
    def make(attention):
        import diffusers

        module = randomised(getattr(diffusers, model)(**settings))
        return FirstOutput(module, {"return_dict": False} | fixed), inputs(), {}


def text(length: int = 7) -> torch.Tensor:
    return normal(B, length, 32)


diffusion(
    "d_qwenimage",
    {"family": "Qwen-Image", "norm": "rms (diffusers)", "rope": "complex interleaved"},
    "QwenImageTransformer2DModel",
    HEADS
    | {"patch_size": 2, "in_channels": 8, "out_channels": 2, "num_layers": 2, "joint_attention_dim": 32}
    | {"axes_dims_rope": (4, 6, 6)},
    lambda: {
        "hidden_states": normal(B, 16, 8),
        "encoder_hidden_states": text(),
        "encoder_hidden_states_mask": torch.ones(B, 7, dtype=torch.bool),
        "timestep": torch.tensor([0.3, 0.5]),
    },
    img_shapes=[[(1, 4, 4)]] * B,
)
diffusion(
    "d_wan",
    {
        "family": "Wan",
        "norm": "nn.RMSNorm",
        "axis": "full_hidden (rms across heads)",
        "mask": "bidirectional self + cross (cross: norm, no RoPE)",
    },
    "WanTransformer3DModel",
    HEADS
    | {"in_channels": 4, "out_channels": 4, "text_dim": 32, "freq_dim": 32, "ffn_dim": 96, "num_layers": 2}
    | {"rope_max_seq_len": 32},
    lambda: {"hidden_states": normal(B, 4, 2, 8, 8), "timestep": torch.tensor([3, 5]), "encoder_hidden_states": text()},
)
diffusion(
    "d_ltx",
    {"family": "LTX", "norm": "nn.RMSNorm", "axis": "full_hidden", "extras": ["attn2: no rope, key mask"]},
    "LTXVideoTransformer3DModel",
    HEADS | {"in_channels": 8, "out_channels": 8, "cross_attention_dim": 64, "num_layers": 2, "caption_channels": 32},
    lambda: {
        "hidden_states": normal(B, 32, 8),
        "encoder_hidden_states": text(),
        "timestep": torch.tensor([3.0, 5.0]),
        "encoder_attention_mask": torch.ones(B, 7),
    },
    num_frames=2,
    height=4,
    width=4,
)
diffusion(
    "d_cogview4",
    {"family": "CogView4", "norm": "layernorm(no affine)", "rope": "half (use_real_unbind_dim=-2) on image tokens only"},
    "CogView4Transformer2DModel",
    HEADS
    | {"patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2, "text_embed_dim": 32, "time_embed_dim": 8}
    | {"condition_dim": 4, "pos_embed_max_size": 8, "sample_size": 8, "rope_axes_dim": (8, 8)},
    lambda: {
        "hidden_states": normal(B, 4, 8, 8),
        "encoder_hidden_states": text(16),
        "timestep": torch.tensor([3, 5]),
        "original_size": torch.tensor([[8, 8]] * B),
        "target_size": torch.tensor([[8, 8]] * B),
        "crop_coords": torch.tensor([[0, 0]] * B),
    },
)
diffusion(
    "d_hunyuanvideo",
    {"family": "HunyuanVideo", "norm": "rms", "rope": "interleaved on image part only, before concat"},
    "HunyuanVideoTransformer3DModel",
    HEADS
    | {"in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 1}
    | {"patch_size_t": 1, "text_embed_dim": 32, "pooled_projection_dim": 32, "rope_axes_dim": (4, 6, 6)},
    lambda: {
        "hidden_states": normal(B, 4, 1, 4, 4),
        "timestep": torch.tensor([3, 5]),
        "encoder_hidden_states": text(),
        "encoder_attention_mask": torch.ones(B, 7, dtype=torch.bool),
        "pooled_projections": normal(B, 32),
        "guidance": torch.tensor([1.0, 1.0]),
    },
)
