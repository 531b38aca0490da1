"""Video transformers of diffusers with tiny configurations, as `tests.zoo.ZOO` has them."""

from __future__ import annotations

import torch

from tests.zoo.diffusion import HEADS, diffusion, text
from tests.zoo.entries import B, Entries, normal

ZOO: Entries = {}
WAN = (
    HEADS
    | {"in_channels": 4, "out_channels": 4, "text_dim": 32, "freq_dim": 32, "ffn_dim": 96, "num_layers": 2}
    | {"rope_max_seq_len": 32}
)
WAN_TAGS = {"axis": "full_hidden (rms across heads)", "mask": "bidirectional self + cross (cross: norm, no RoPE)"}


def latents(*, frames: int = 2, height: int = 8, width: int = 6) -> torch.Tensor:
    return normal(B, 4, frames, height, width)


def timestep(*, real: bool = False) -> torch.Tensor:
    return torch.tensor([3.0, 5.0] if real else [3, 5])


diffusion(
    "d_wan",
    WAN_TAGS | {"family": "Wan"},
    "WanTransformer3DModel",
    WAN,
    lambda: {"hidden_states": latents(), "timestep": timestep(), "encoder_hidden_states": text()},
    zoo=ZOO,
)
diffusion(
    "d_wan_i2v",
    WAN_TAGS | {"family": "Wan I2V", "extras": ["a second cross attention with normalised image keys"]},
    "WanTransformer3DModel",
    WAN | {"image_dim": 32, "added_kv_proj_dim": 64},
    lambda: {
        "hidden_states": latents(),
        "timestep": timestep(),
        "encoder_hidden_states": text(512),  # a length that the attention has in its code
        "encoder_hidden_states_image": normal(B, 5, 32, seed=8),
    },
    zoo=ZOO,
)
diffusion(
    "d_wan_vace",
    WAN_TAGS | {"family": "Wan VACE"},
    "WanVACETransformer3DModel",
    WAN | {"vace_layers": [0, 1], "vace_in_channels": 4},
    lambda: {
        "hidden_states": latents(),
        "timestep": timestep(),
        "encoder_hidden_states": text(),
        "control_hidden_states": latents(),
    },
    zoo=ZOO,
)
diffusion(
    "d_skyreels",
    WAN_TAGS | {"family": "SkyReels V2"},
    "SkyReelsV2Transformer3DModel",
    WAN,
    lambda: {"hidden_states": latents(), "timestep": timestep(), "encoder_hidden_states": text()},
    zoo=ZOO,
)
diffusion(
    "d_ltx",
    {"family": "LTX", "axis": "full_hidden", "extras": ["attn2: no rope, key mask"]},
    "LTXVideoTransformer3DModel",
    HEADS | {"in_channels": 8, "out_channels": 8, "cross_attention_dim": 64, "num_layers": 2, "caption_channels": 32},
    lambda: {
        "hidden_states": normal(B, 24, 8),
        "encoder_hidden_states": text(),
        "timestep": timestep(real=True),
        "encoder_attention_mask": torch.ones(B, 7),
    },
    zoo=ZOO,
    num_frames=2,
    height=4,
    width=3,
)
diffusion(
    "d_cogvideox",
    {"family": "CogVideoX", "norm": "layernorm", "rope": "none (sincos)"},
    "CogVideoXTransformer3DModel",
    HEADS
    | {"in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 32, "num_layers": 2, "sample_width": 6}
    | {"sample_height": 8, "sample_frames": 5, "max_text_seq_length": 7},
    lambda: {"hidden_states": normal(B, 2, 4, 8, 6), "encoder_hidden_states": text(), "timestep": timestep()},
    zoo=ZOO,
)
diffusion(
    "d_cogvideox_rotary",
    {"family": "CogVideoX 1.5", "norm": "layernorm", "rope": "interleaved on video tokens only"},
    "CogVideoXTransformer3DModel",
    HEADS
    | {"in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 32, "num_layers": 2, "sample_width": 6}
    | {"sample_height": 8, "sample_frames": 5, "max_text_seq_length": 7, "use_rotary_positional_embeddings": True},
    lambda: {
        "hidden_states": normal(B, 2, 4, 8, 6),
        "encoder_hidden_states": text(),
        "timestep": timestep(),
        "image_rotary_emb": [normal(24, 16), normal(24, 16, seed=5)],
    },
    zoo=ZOO,
)
HUNYUAN = HEADS | {"in_channels": 4, "out_channels": 4, "num_layers": 1, "num_refiner_layers": 1, "text_embed_dim": 32}
diffusion(
    "d_hunyuanvideo",
    {"family": "HunyuanVideo", "rope": "interleaved on image part only, before concat"},
    "HunyuanVideoTransformer3DModel",
    HUNYUAN
    | {"num_single_layers": 1, "patch_size": 1, "patch_size_t": 1, "pooled_projection_dim": 32, "rope_axes_dim": (4, 6, 6)},
    lambda: {
        "hidden_states": latents(frames=1, height=4, width=3),
        "timestep": timestep(),
        "encoder_hidden_states": text(),
        "encoder_attention_mask": torch.ones(B, 7, dtype=torch.bool),
        "pooled_projections": normal(B, 32),
        "guidance": torch.tensor([1.0, 1.0]),
    },
    zoo=ZOO,
)
diffusion(
    "d_mochi",
    {"family": "Mochi", "rope": "interleaved, learned, per head", "extras": ["valid tokens gathered per sample"]},
    "MochiTransformer3DModel",
    HEADS
    | {"in_channels": 4, "num_layers": 2, "pooled_projection_dim": 32, "text_embed_dim": 32, "time_embed_dim": 8}
    | {"max_sequence_length": 7},
    lambda: {
        "hidden_states": latents(),
        "encoder_hidden_states": text(),
        "timestep": timestep(),
        "encoder_attention_mask": torch.ones(B, 7, dtype=torch.bool),
    },
    zoo=ZOO,
)
diffusion(
    "d_cosmos",
    {"family": "Cosmos", "rope": "half"},
    "CosmosTransformer3DModel",
    HEADS
    | {"in_channels": 4, "out_channels": 4, "num_layers": 2, "text_embed_dim": 32, "adaln_lora_dim": 8, "max_size": (4, 16, 16)}
    | {"extra_pos_embed_type": None, "concat_padding_mask": False},
    lambda: {
        "hidden_states": normal(B, 4, 2, 8, 6),
        "timestep": timestep(),
        "encoder_hidden_states": text(),
    },
    zoo=ZOO,
    fps=16,
)
diffusion(
    "d_easyanimate",
    {"family": "EasyAnimate", "norm": "layernorm", "rope": "interleaved on video tokens only"},
    "EasyAnimateTransformer3DModel",
    HEADS
    | {"in_channels": 4, "out_channels": 4, "patch_size": 2, "sample_width": 6, "sample_height": 8, "num_layers": 2}
    | {"mmdit_layers": 2, "time_embed_dim": 8, "text_embed_dim": 32},
    lambda: {"hidden_states": latents(), "timestep": timestep(), "encoder_hidden_states": text()},
    zoo=ZOO,
)
diffusion(
    "d_sana_video",
    {"family": "Sana Video", "axis": "full_hidden", "rope": "none in cross attention", "extras": ["self attention is linear"]},
    "SanaVideoTransformer3DModel",
    HEADS
    | {"in_channels": 4, "out_channels": 4, "num_layers": 2, "num_cross_attention_heads": 4, "cross_attention_head_dim": 16}
    | {"cross_attention_dim": 64, "caption_channels": 32, "sample_size": 8, "rope_max_seq_len": 32},
    lambda: {"hidden_states": latents(), "encoder_hidden_states": text(), "timestep": timestep()},
    zoo=ZOO,
)
