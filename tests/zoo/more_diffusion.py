"""Further transformers of diffusers with tiny configurations: relatives of those in `diffusion.py` and `videos.py`."""

from __future__ import annotations

import torch

from tests.zoo.diffusion import HEADS, diffusion, grid, text
from tests.zoo.entries import B, Entries, normal
from tests.zoo.videos import WAN, WAN_TAGS, latents, timestep

ZOO: Entries = {}


def fraction() -> torch.Tensor:
    return torch.tensor([0.3, 0.5])


diffusion(
    "d_ltx2",
    {"family": "LTX-2", "axis": "full_hidden", "extras": ["video and audio, cross attention between them"]},
    "LTX2VideoTransformer3DModel",
    HEADS
    | {"in_channels": 8, "out_channels": 8, "cross_attention_dim": 64, "num_layers": 1, "caption_channels": 32}
    | {"audio_in_channels": 8, "audio_out_channels": 8, "audio_num_attention_heads": 4, "audio_attention_head_dim": 8}
    | {"audio_cross_attention_dim": 32},
    lambda: {
        "hidden_states": normal(B, 24, 8),
        "audio_hidden_states": normal(B, 5, 8, seed=3),
        "encoder_hidden_states": text(),
        "audio_encoder_hidden_states": text(6),
        "timestep": timestep(real=True),
    },
    zoo=ZOO,
    num_frames=2,
    height=4,
    width=3,
    audio_num_frames=5,
)
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
    "d_anyflow",
    WAN_TAGS | {"family": "AnyFlow"},
    "AnyFlowTransformer3DModel",
    WAN,
    lambda: {
        "hidden_states": normal(B, 2, 4, 8, 6),
        "timestep": torch.tensor([[3.0, 3.0], [5.0, 5.0]]),
        "r_timestep": torch.tensor([[1.0, 1.0], [2.0, 2.0]]),
        "encoder_hidden_states": text(),
    },
    zoo=ZOO,
)
diffusion(
    "d_chronoedit",
    WAN_TAGS | {"family": "ChronoEdit", "extras": ["a second cross attention with normalised image keys"]},
    "ChronoEditTransformer3DModel",
    WAN | {"image_dim": 32, "added_kv_proj_dim": 64, "rope_temporal_skip_len": 8},
    lambda: {
        "hidden_states": latents(),
        "timestep": timestep(),
        "encoder_hidden_states": text(512),
        "encoder_hidden_states_image": normal(B, 5, 32, seed=8),
    },
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
    "d_bria_fibo2",
    {"family": "Bria FIBO 2", "rope": "complex interleaved"},
    "BriaFibo2Transformer2DModel",
    {"in_channels": 4, "patch_size": 2, "dim": 64, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 4, "cap_feat_dim": 32}
    | {"injection_layer_ids": (1,), "perceiver_num_layers": 1, "min_num_gist_tokens": 4, "max_num_gist_tokens": 8, "gist_step": 2}
    | {"gist_min_text_len": 4, "gist_max_text_len": 16, "axes_dims": (4, 6, 6), "axes_lens": (64, 16, 16)},
    lambda: {"hidden_states": normal(B, 4, 8, 6), "timestep": fraction(), "encoder_hidden_states": normal(B, 2, 7, 32)},
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
    "d_helios",
    WAN_TAGS | {"family": "Helios"},
    "HeliosTransformer3DModel",
    {key: value for key, value in WAN.items() if key != "rope_max_seq_len"} | {"rope_dim": (4, 6, 6)},
    lambda: {
        "hidden_states": latents(),
        "timestep": timestep(),
        "encoder_hidden_states": text(),
        "indices_hidden_states": torch.arange(2)[None].expand(B, -1).contiguous(),
        "indices_latents_history_short": torch.arange(2)[None].expand(B, -1).contiguous(),
        "latents_history_short": latents(),
    },
    zoo=ZOO,
)
diffusion(
    "d_ideogram4",
    {"family": "Ideogram 4", "rope": "half m-rope", "mask": "segments"},
    "Ideogram4Transformer2DModel",
    HEADS
    | {"in_channels": 8, "num_layers": 2, "intermediate_size": 96, "adaln_dim": 16, "llm_features_dim": 32}
    | {"mrope_section": (3, 3, 2)},
    lambda: {
        "hidden_states": normal(B, 14, 8),
        "timestep": fraction(),
        "encoder_hidden_states": text(14),
        "position_ids": torch.arange(14)[None, :, None].expand(B, -1, 3).contiguous(),
        "segment_ids": (torch.arange(14) >= 9).long()[None].expand(B, -1).contiguous(),
        "indicator": torch.tensor([3] * 7 + [2] * 7)[None].expand(B, -1).contiguous(),
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
    "d_kandinsky6",
    {"family": "Kandinsky 6"},
    "Kandinsky6Transformer3DModel",
    {
        "in_visual_dim": 4,
        "out_visual_dim": 4,
        "in_text_dim": 32,
        "in_text_dim2": 32,
        "time_dim": 32,
        "model_dim": 64,
        "ff_dim": 96,
    }
    | {"num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (4, 6, 6), "visual_cond": False, "in_audio_dim": 4}
    | {"out_audio_dim": 4},
    lambda: {
        "hidden_states": normal(B, 2, 8, 6, 4),
        "encoder_hidden_states": text(),
        "timestep": timestep(real=True),
        "pooled_projections": normal(B, 32),
        "audio_hidden_states": normal(B, 5, 4, seed=4),
    },
    zoo=ZOO,
)
diffusion(
    "d_longcat_audio",
    {"family": "LongCat-Audio DiT", "rope": "half"},
    "LongCatAudioDiTTransformer",
    {"dit_dim": 64, "dit_depth": 2, "dit_heads": 4, "dit_text_dim": 32, "latent_dim": 8},
    lambda: {
        "hidden_states": normal(B, 12, 8),
        "encoder_hidden_states": text(),
        "encoder_attention_mask": torch.ones(B, 7, dtype=torch.bool),
        "timestep": fraction(),
        "attention_mask": torch.ones(B, 12, dtype=torch.bool),
        "latent_cond": normal(B, 12, 8, seed=5),
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
diffusion(
    "d_nucleus_image",
    {"family": "Nucleus-Image", "rope": "complex interleaved", "gqa": True},
    "NucleusMoEImageTransformer2DModel",
    HEADS
    | {"in_channels": 8, "out_channels": 2, "num_layers": 2, "num_key_value_heads": 2, "joint_attention_dim": 32}
    | {"axes_dims_rope": (4, 6, 6), "moe_enabled": False},
    lambda: {
        "hidden_states": normal(B, 16, 8),
        "encoder_hidden_states": text(),
        "encoder_hidden_states_mask": torch.ones(B, 7, dtype=torch.bool),
        "timestep": fraction(),
    },
    zoo=ZOO,
    img_shapes=[(1, 4, 4)],
)
diffusion(
    "d_stable_audio3",
    {"family": "Stable Audio 3", "rope": "half, partial", "extras": ["differential attention"]},
    "StableAudio3DiTModel",
    {"io_channels": 8, "embed_dim": 64, "depth": 2, "num_heads": 4, "cond_token_dim": 32, "global_cond_dim": 32}
    | {"local_add_cond_dim": 5, "timestep_features_dim": 32, "num_memory_tokens": 4},
    lambda: {
        "hidden_states": normal(B, 8, 12),
        "timestep": fraction(),
        "encoder_hidden_states": text(),
        "global_hidden_states": normal(B, 32),
    },
    zoo=ZOO,
)
