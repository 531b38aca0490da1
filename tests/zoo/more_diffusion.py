"""Further transformers of diffusers with tiny configurations: relatives of those in `diffusion.py` and `videos.py`."""

from __future__ import annotations

import torch

from tests.zoo.diffusion import HEADS, diffusion, grid, text
from tests.zoo.entries import B, Entries, normal
from tests.zoo.videos import latents, timestep

ZOO: Entries = {}


def fraction() -> torch.Tensor:
    return torch.tensor([0.3, 0.5])


diffusion(
    "d_consisid",
    {"family": "ConsisID", "norm": "layernorm", "rope": "interleaved on video tokens only"},
    "ConsisIDTransformer3DModel",
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
diffusion(
    "d_dreamlite",
    {"family": "DreamLite", "norm": "layernorm", "rope": "none"},
    "DreamLiteTransformer2DModel",
    HEADS
    | {
        "in_channels": 64,
        "num_layers": 2,
        "norm_num_groups": 4,
        "cross_attention_dim": 32,
        "qk_norm": "layer_norm",
        "use_linear_projection": True,
    },
    lambda: {"hidden_states": normal(B, 64, 4, 3), "encoder_hidden_states": text()},
    zoo=ZOO,
)
diffusion(
    "d_bria_fibo",
    {"family": "Bria FIBO"},
    "BriaFiboTransformer2DModel",
    HEADS
    | {"in_channels": 8, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 64, "axes_dims_rope": [4, 6, 6]}
    | {"text_encoder_dim": 32},
    lambda: {
        "hidden_states": normal(B, 12, 8),
        "encoder_hidden_states": text(7, 64),
        "text_encoder_layers": [text(), text(7)],
        "timestep": fraction(),
        "img_ids": grid(),
        "txt_ids": torch.zeros(7, 3),
    },
    zoo=ZOO,
)
diffusion(
    "d_flux3",
    {"family": "Flux 3"},
    "Flux3Transformer2DModel",
    HEADS
    | {"in_channels": 8, "cond_in_channels": 8, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 32}
    | {"timestep_channels": 32, "axes_dims_rope": (4, 4, 4, 4)},
    lambda: {
        "hidden_states": normal(B, 12, 8),
        "encoder_hidden_states": text(),
        "timestep": fraction(),
        "img_ids": grid(axes=4),
        "txt_ids": torch.zeros(7, 4),
        "image_cond_hidden_states": normal(B, 6, 8, seed=9),
        "image_cond_ids": grid(2, 3, axes=4) + 1,
    },
    zoo=ZOO,
)
diffusion(
    "d_joyimage",
    {"family": "JoyImage Edit"},
    "JoyImageEditTransformer3DModel",
    {"in_channels": 4, "hidden_size": 64, "num_attention_heads": 4, "text_dim": 32, "num_layers": 2, "rope_dim_list": [4, 6, 6]},
    lambda: {"hidden_states": latents(), "timestep": timestep(), "encoder_hidden_states": text()},
    zoo=ZOO,
)
diffusion(
    "d_kandinsky5",
    {"family": "Kandinsky 5"},
    "Kandinsky5Transformer3DModel",
    {"in_text_dim": 32, "in_text_dim2": 32, "time_dim": 32, "model_dim": 64, "ff_dim": 96, "num_text_blocks": 1}
    | {"num_visual_blocks": 2, "axes_dims": (4, 6, 6)},
    lambda: {
        "hidden_states": normal(B, 2, 8, 6, 4),
        "encoder_hidden_states": text(),
        "timestep": timestep(real=True),
        "pooled_projections": normal(B, 32),
        "visual_rope_pos": [torch.arange(2), torch.arange(4), torch.arange(3)],
        "text_rope_pos": torch.arange(7),
    },
    zoo=ZOO,
)
diffusion(
    "d_minimax_h3",
    {"family": "MiniMax H3"},
    "MiniMaxH3Transformer3DModel",
    HEADS
    | {"hidden_size": 64, "num_layers": 2, "num_refiner_layers": 1, "ffn_dim": 96, "in_channels": 4, "audio_in_channels": 4}
    | {"text_dim": 32, "freq_dim": 32, "time_embed_hidden_dim": 64, "time_embed_dim": 32, "rope_freq_dim": 2},
    lambda: {
        "hidden_states": normal(B, 8, 16),
        "audio_hidden_states": normal(B, 3, 4, seed=4),
        "encoder_hidden_states": text(),
        "timestep": fraction(),
        "timestep_indices": torch.tensor([0] * 7 + [1] * 11),
        "token_tags": torch.tensor([1] * 7 + [0] * 8 + [2] * 3),
        "position_ids": torch.arange(18)[:, None].expand(-1, 3).contiguous(),
        "video_indices": torch.arange(7, 15),
        "audio_indices": torch.arange(15, 18),
        "text_indices": torch.arange(7),
    },
    zoo=ZOO,
)
diffusion(
    "d_motif_video",
    {"family": "Motif Video", "rope": "interleaved on image part only, before concat"},
    "MotifVideoTransformer3DModel",
    HEADS
    | {
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_decoder_layers": 1,
        "text_embed_dim": 32,
    }
    | {"rope_axes_dim": (4, 6, 6), "enable_text_cross_attention_dual": True, "enable_text_cross_attention_single": True},
    lambda: {
        "hidden_states": latents(),
        "timestep": timestep(),
        "encoder_hidden_states": text(),
        "encoder_attention_mask": torch.ones(B, 7, dtype=torch.bool),
    },
    zoo=ZOO,
)
