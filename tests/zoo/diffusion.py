"""Image transformers of diffusers with tiny configurations, as `tests.zoo.ZOO` has them; those of videos lie in `videos.py`.

They need diffusers (requirements/dev.txt), imported when an entry is built: it takes a second.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.entries import B, Entries, entry, normal, randomised

ZOO: Entries = {}
TAGS = {
    "lib": "diffusers",
    "norm": "rms",
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


def without_zeros(module: nn.Module) -> nn.Module:
    """Gates and last layers begin as zeros, with which no attention has any influence: random numbers instead."""
    generator = torch.Generator().manual_seed(21)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point() and not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return module


def diffusion(name: str, tags: dict[str, Any], model: str, settings: dict[str, Any], inputs, *, axes=None, zoo=ZOO, **fixed: Any):
    """Registers class `model` of diffusers; `inputs()` are its tensors, `fixed` its other arguments, `axes` the dynamic ones."""

    @entry(zoo, name, TAGS | tags)
    def make(attention):
        import diffusers

        module = randomised(without_zeros(getattr(diffusers, model)(**settings)))
        return FirstOutput(module, {"return_dict": False} | fixed), inputs(), axes or {}


def text(length: int = 7, width: int = 32) -> torch.Tensor:
    return normal(B, length, width, seed=12)


def grid(height: int = 4, width: int = 3, *, axes: int = 3) -> torch.Tensor:
    """Positions (height * width, axes) of an image, rows and columns last."""
    ids = torch.zeros(height, width, axes)
    ids[..., -2] += torch.arange(height)[:, None]
    ids[..., -1] += torch.arange(width)[None]
    return ids.reshape(height * width, axes)


def flux(name: str, model: str, tags: dict[str, Any], settings: dict[str, Any], more=dict, *, axes: int = 3) -> None:
    """The family of Flux: text and image as sequences with positions of `axes` numbers."""
    diffusion(
        name,
        tags,
        model,
        HEADS | {"in_channels": 8, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 32} | settings,
        lambda: (
            {
                "hidden_states": normal(B, 12, 8),
                "encoder_hidden_states": text(),
                "timestep": torch.tensor([0.3, 0.5]),
                "img_ids": grid(axes=axes),
                "txt_ids": torch.zeros(7, axes),
            }
            | more()
        ),
    )


def pooled() -> dict[str, torch.Tensor]:
    return {"pooled_projections": normal(B, 32)}


flux("d_flux", "FluxTransformer2DModel", {"family": "Flux"}, {"pooled_projection_dim": 32, "axes_dims_rope": (4, 6, 6)}, pooled)
flux(
    "d_flux2",
    "Flux2Transformer2DModel",
    {"family": "Flux 2"},
    {"axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 32},
    lambda: {"guidance": torch.tensor([1.0, 2.0])},
    axes=4,
)
flux(
    "d_chroma",
    "ChromaTransformer2DModel",
    {"family": "Chroma"},
    {"axes_dims_rope": (4, 6, 6), "approximator_num_channels": 8, "approximator_hidden_dim": 32, "approximator_layers": 1},
)
flux("d_bria", "BriaTransformer2DModel", {"family": "Bria"}, {"axes_dims_rope": [4, 6, 6], "pooled_projection_dim": None})
flux(
    "d_longcat_image",
    "LongCatImageTransformer2DModel",
    {"family": "LongCat-Image"},
    {"pooled_projection_dim": 32, "axes_dims_rope": [4, 6, 6]},
)
flux("d_ovis_image", "OvisImageTransformer2DModel", {"family": "Ovis-Image"}, {"axes_dims_rope": (4, 6, 6), "out_channels": 8})

diffusion(
    "d_sd3",
    {"family": "SD 3.5", "rope": "none"},
    "SD3Transformer2DModel",
    HEADS
    | {"sample_size": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 32}
    | {"caption_projection_dim": 64, "pooled_projection_dim": 32, "pos_embed_max_size": 8, "qk_norm": "rms_norm"}
    | {"dual_attention_layers": (0,)},
    lambda: {"hidden_states": normal(B, 4, 8, 6), "encoder_hidden_states": text(), "timestep": torch.tensor([3, 5])} | pooled(),
)
diffusion(
    "d_auraflow",
    {"family": "AuraFlow", "norm": "layernorm (fp32)", "rope": "none"},
    "AuraFlowTransformer2DModel",
    HEADS
    | {"sample_size": 8, "num_mmdit_layers": 1, "num_single_dit_layers": 1, "joint_attention_dim": 32}
    | {"caption_projection_dim": 64, "pos_embed_max_size": 16},
    lambda: {"hidden_states": normal(B, 4, 8, 8), "encoder_hidden_states": text(), "timestep": torch.tensor([0.3, 0.5])},
)
diffusion(
    "d_sana",
    {"family": "Sana", "axis": "full_hidden", "rope": "none", "extras": ["self attention is linear"]},
    "SanaTransformer2DModel",
    HEADS
    | {"in_channels": 4, "out_channels": 4, "num_layers": 2, "num_cross_attention_heads": 4, "cross_attention_head_dim": 16}
    | {"cross_attention_dim": 64, "caption_channels": 32, "sample_size": 8, "qk_norm": "rms_norm_across_heads"},
    lambda: {"hidden_states": normal(B, 4, 8, 8), "encoder_hidden_states": text(), "timestep": torch.tensor([3, 5])},
)
diffusion(
    "d_qwenimage",
    {"family": "Qwen-Image", "rope": "complex interleaved"},
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
    "d_lumina2",
    {"family": "Lumina 2", "rope": "complex interleaved", "gqa": True},
    "Lumina2Transformer2DModel",
    {"sample_size": 8, "in_channels": 4, "hidden_size": 64, "num_layers": 1, "num_refiner_layers": 1, "num_attention_heads": 4}
    | {"num_kv_heads": 2, "multiple_of": 16, "axes_dim_rope": (4, 6, 6), "axes_lens": (32, 16, 16), "cap_feat_dim": 32},
    lambda: {
        "hidden_states": normal(B, 4, 8, 6),
        "encoder_hidden_states": text(),
        "timestep": torch.tensor([0.3, 0.5]),
        "encoder_attention_mask": torch.ones(B, 7, dtype=torch.bool),
    },
)


def lumina_next_inputs():
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

    return {
        "hidden_states": normal(B, 4, 8, 8),
        "encoder_hidden_states": text(),
        "timestep": torch.tensor([0.3, 0.5]),
        "encoder_mask": torch.ones(B, 7, dtype=torch.bool),
        "image_rotary_emb": torch.view_as_real(get_2d_rotary_pos_embed_lumina(16, 8, 8)),
    }


class RealTable(FirstOutput):
    """A model that is given its complex rotary table as real numbers, since ONNX has no complex inputs."""

    def forward(self, **inputs):
        return super().forward(**inputs | {"image_rotary_emb": torch.view_as_complex(inputs["image_rotary_emb"])})


@entry(
    ZOO,
    "d_lumina_next",
    TAGS | {"family": "Lumina-Next", "norm": "layernorm", "axis": "full_hidden", "rope": "complex interleaved", "gqa": True},
)
def lumina_next(attention):
    import diffusers

    module = diffusers.LuminaNextDiT2DModel(
        sample_size=8, hidden_size=64, num_layers=2, num_attention_heads=4, num_kv_heads=2, multiple_of=16, cross_attention_dim=32
    )
    return (
        RealTable(randomised(without_zeros(module)), {"return_dict": False, "cross_attention_kwargs": {}}),
        lumina_next_inputs(),
        {},
    )


SIZES = {"original_size": torch.tensor([[8, 8]] * B), "target_size": torch.tensor([[8, 8]] * B), "crop_coords": torch.zeros(B, 2)}
diffusion(
    "d_cogview4",
    {"family": "CogView4", "norm": "layernorm(no affine)", "rope": "half (use_real_unbind_dim=-2) on image tokens only"},
    "CogView4Transformer2DModel",
    HEADS
    | {"patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2, "text_embed_dim": 32, "time_embed_dim": 8}
    | {"condition_dim": 4, "pos_embed_max_size": 8, "sample_size": 8, "rope_axes_dim": (8, 8)},
    lambda: {"hidden_states": normal(B, 4, 8, 6), "encoder_hidden_states": text(16), "timestep": torch.tensor([3, 5])} | SIZES,
)
diffusion(
    "d_cogview3plus",
    {"family": "CogView3 Plus", "norm": "layernorm(no affine)", "rope": "none"},
    "CogView3PlusTransformer2DModel",
    HEADS
    | {"patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2, "text_embed_dim": 32, "time_embed_dim": 8}
    | {"condition_dim": 4, "pos_embed_max_size": 8, "sample_size": 8},
    lambda: {"hidden_states": normal(B, 4, 8, 8), "encoder_hidden_states": text(16), "timestep": torch.tensor([3, 5])} | SIZES,
)
diffusion(
    "d_glm_image",
    {"family": "GLM-Image", "norm": "layernorm(no affine)", "rope": "half on image tokens only"},
    "GlmImageTransformer2DModel",
    HEADS
    | {"patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2, "text_embed_dim": 32, "time_embed_dim": 8}
    | {"condition_dim": 4, "prior_vq_quantizer_codebook_size": 32},
    lambda: {
        "hidden_states": normal(B, 4, 8, 6),
        "encoder_hidden_states": text(),
        "prior_token_id": torch.arange(B * 12).reshape(B, 12),
        "prior_token_drop": torch.zeros(B, 12, dtype=torch.bool),
        "timestep": torch.tensor([3, 5]),
        "target_size": SIZES["target_size"],
        "crop_coords": SIZES["crop_coords"],
    },
)
diffusion(
    "d_zimage",
    {"family": "Z-Image", "rope": "complex interleaved"},
    "ZImageTransformer2DModel",
    {"in_channels": 4, "dim": 64, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 4, "n_kv_heads": 4, "cap_feat_dim": 32}
    | {"axes_dims": [4, 6, 6], "axes_lens": [64, 16, 16]},
    lambda: {
        "x": [normal(4, 1, 8, 6), normal(4, 1, 8, 6, seed=3)],
        "t": torch.tensor([0.3, 0.5]),
        "cap_feats": [normal(7, 32), normal(5, 32)],
    },
)
diffusion(
    "d_hidream",
    {"family": "HiDream", "axis": "full_hidden", "rope": "interleaved (2 x 2 matrices)"},
    "HiDreamImageTransformer2DModel",
    HEADS
    | {
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 1,
        "num_single_layers": 1,
        "caption_channels": [32, 32],
    }
    | {"text_emb_dim": 32, "axes_dims_rope": (4, 6, 6), "max_resolution": (8, 8), "llama_layers": [0, 1]}
    | {"force_inference_output": True},
    lambda: {
        "hidden_states": normal(B, 4, 8, 8),
        "timesteps": torch.tensor([3, 5]),
        "encoder_hidden_states_t5": text(),
        "encoder_hidden_states_llama3": normal(2, B, 5, 32),
        "pooled_embeds": normal(B, 32),
    },
)
diffusion(
    "d_prx",
    {"family": "PRX", "extras": ["keys of the text with a norm of their own, no rotary"]},
    "PRXTransformer2DModel",
    {"in_channels": 4, "context_in_dim": 32, "hidden_size": 64, "num_heads": 4, "depth": 2, "axes_dim": [8, 8]},
    lambda: {"hidden_states": normal(B, 4, 8, 6), "timestep": torch.tensor([0.3, 0.5]), "encoder_hidden_states": text()},
)
diffusion(
    "d_hunyuandit",
    {"family": "HunyuanDiT", "norm": "layernorm", "rope": "none here"},
    "HunyuanDiT2DModel",
    HEADS
    | {"in_channels": 4, "patch_size": 2, "sample_size": 8, "hidden_size": 64, "num_layers": 2, "cross_attention_dim": 32}
    | {"cross_attention_dim_t5": 32, "pooled_projection_dim": 32, "text_len": 7, "text_len_t5": 5}
    | {"use_style_cond_and_image_meta_size": False},
    lambda: {
        "hidden_states": normal(B, 4, 8, 8),
        "timestep": torch.tensor([3.0, 5.0]),
        "encoder_hidden_states": text(),
        "text_embedding_mask": torch.ones(B, 7, dtype=torch.bool),
        "encoder_hidden_states_t5": text(5),
        "text_embedding_mask_t5": torch.ones(B, 5, dtype=torch.bool),
        "image_rotary_emb": [normal(16, 16), normal(16, 16, seed=5)],
    },
)
diffusion(
    "d_ernie_image",
    {"family": "ERNIE-Image"},
    "ErnieImageTransformer2DModel",
    {"hidden_size": 64, "num_attention_heads": 4, "num_layers": 2, "ffn_hidden_size": 96, "in_channels": 4, "out_channels": 4}
    | {"text_in_dim": 32, "rope_axes_dim": (4, 6, 6)},
    lambda: {
        "hidden_states": normal(B, 4, 4, 3),
        "timestep": torch.tensor([3.0, 5.0]),
        "text_bth": text(),
        "text_lens": torch.tensor([7, 5]),
    },
)
diffusion(
    "d_krea2",
    {"family": "Krea 2", "norm": "rms (1 + w)", "gqa": True},
    "Krea2Transformer2DModel",
    HEADS
    | {"in_channels": 4, "num_layers": 2, "num_key_value_heads": 2, "intermediate_size": 96, "timestep_embed_dim": 32}
    | {"text_hidden_dim": 32, "num_text_layers": 2, "text_num_attention_heads": 2, "text_num_key_value_heads": 2}
    | {"text_intermediate_size": 48, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1, "axes_dims_rope": (4, 6, 6)},
    lambda: {
        "hidden_states": normal(B, 12, 4),
        "encoder_hidden_states": normal(B, 7, 2, 32),
        "timestep": torch.tensor([0.3, 0.5]),
        "position_ids": torch.cat([torch.zeros(7, 3), grid()]),
    },
)
diffusion(
    "d_hunyuanimage",
    {"family": "HunyuanImage 2.1", "rope": "interleaved on image part only, before concat"},
    "HunyuanImageTransformer2DModel",
    HEADS
    | {"in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1}
    | {"text_embed_dim": 32, "rope_axes_dim": (8, 8)},
    lambda: {
        "hidden_states": normal(B, 4, 4, 3),
        "timestep": torch.tensor([3.0, 5.0]),
        "encoder_hidden_states": text(),
        "encoder_attention_mask": torch.ones(B, 7, dtype=torch.bool),
    },
)
diffusion(
    "d_acestep",
    {"family": "ACE-Step", "rope": "half", "gqa": True, "mask": "sliding window, cross"},
    "AceStepTransformer1DModel",
    {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"head_dim": 16, "in_channels": 12, "audio_acoustic_hidden_dim": 4, "sliding_window": 4},
    lambda: {
        "hidden_states": normal(B, 14, 4),
        "timestep": torch.tensor([0.3, 0.5]),
        "timestep_r": torch.tensor([0.1, 0.2]),
        "encoder_hidden_states": text(7, 64),
        "context_latents": normal(B, 14, 8, seed=4),
    },
)
