"""Encoders of transformers for images, several kinds of input, and time series."""

from __future__ import annotations

import torch

from tests.zoo.entries import VOCAB, B, Entries, normal, token_ids
from tests.zoo.hugging_face import Wrap, ent, instance, model_class, with_attention

ZOO: Entries = {}


def model_of(family, config, model, settings, inputs, axes, out=None):
    """`make` of a model of transformers with these inputs; `out` names the output where it has several."""

    def make(attention):
        made = with_attention(model_class(family, config)(**settings), attention)
        return Wrap(instance(model_class(family, model), made, attention), out=out), inputs(), axes

    return make


def images():
    return {"pixel_values": normal(B, 3, 32, 32)}


VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE_AXES = {"pixel_values": {0: "batch"}}
ent(
    ZOO,
    "internvl_vision",
    {"family": "internvl", "norm": "rms", "axis": "full_hidden", "order": "no_rope", "flag": "use_qk_norm=True"},
    model_of(
        "internvl",
        "InternVLVisionConfig",
        "InternVLVisionModel",
        dict(VISION, image_size=[32, 32], patch_size=[8, 8], use_qk_norm=True),
        images,
        IMAGE_AXES,
    ),
)
ent(
    ZOO,
    "janus_vision_1head",
    {
        "family": "janus",
        "norm": "layernorm",
        "axis": "LayerNorm(embed_dim) applied AFTER head split: only runs when num_heads==1 (upstream bug)",
        "order": "no_rope",
        "flag": "use_qk_norm=True",
    },
    model_of(
        "janus",
        "JanusVisionConfig",
        "JanusVisionModel",
        dict(VISION, num_attention_heads=1, image_size=32, patch_size=8, use_qk_norm=True, projection_dim=64),
        images,
        IMAGE_AXES,
    ),
)
ent(
    ZOO,
    "swinv2",
    {
        "family": "swinv2",
        "norm": "l2",
        "order": "no_rope",
        "scale": "exp(min(logit_scale,log 100)) per head",
        "mask": "window + relative-position bias (+shift mask added twice)",
        "extras": ["bias = 16*sigmoid(MLP)"],
    },
    model_of(
        "swinv2",
        "Swinv2Config",
        "Swinv2Model",
        {"image_size": 32, "patch_size": 4, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        images,
        IMAGE_AXES,
        out="last_hidden_state",
    ),
)
ent(
    ZOO,
    "gemma4_vision",
    {
        "family": "gemma4",
        "norm": "rms_w_fp32",
        "rope": "half 2-D multidimensional",
        "scale": "1.0",
        "extras": ["v_norm_unweighted"],
    },
    model_of(
        "gemma4",
        "Gemma4VisionConfig",
        "Gemma4VisionEncoder",
        dict(VISION, head_dim=16, num_key_value_heads=4, patch_size=4, position_embedding_size=64),
        lambda: {
            "inputs_embeds": normal(B, 16, 64),
            "attention_mask": torch.ones(B, 16, dtype=torch.bool),
            "pixel_position_ids": torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), -1)
            .reshape(1, 16, 2)
            .repeat(B, 1, 1),
        },
        {
            "inputs_embeds": {0: "batch", 1: "patches"},
            "attention_mask": {0: "batch", 1: "patches"},
            "pixel_position_ids": {0: "batch", 1: "patches"},
        },
        out="last_hidden_state",
    ),
)
ent(
    ZOO,
    "neomme",
    {
        "family": "neomme",
        "norm": "rms_unweighted",
        "rope": "half-partial",
        "mask": "bidirectional+sliding",
        "extras": ["exclusive self attention on output"],
    },
    model_of(
        "neomme",
        "NeoMMEConfig",
        "NeoMMEModel",
        {
            "vocab_size": VOCAB,
            "embedding_rank": 16,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 256,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 4,
            "patch_size": 8,
            "embedding_dim": 32,
        },
        lambda: {"input_ids": token_ids()},
        {"input_ids": {0: "batch", 1: "seq"}},
    ),
)
ent(
    ZOO,
    "timesfm2_5",
    {
        "family": "timesfm2_5",
        "norm": "rms",
        "order": "after_rope",
        "rope": "half",
        "scale": "softplus(learned per-dim)*1.4427/sqrt(d) on q",
        "mask": "causal",
        "extras": ["per-dim query scale"],
    },
    model_of(
        "timesfm2_5",
        "TimesFm2_5Config",
        "TimesFm2_5Model",
        dict(
            VISION,
            head_dim=16,
            num_key_value_heads=4,
            patch_length=8,
            context_length=64,
            horizon_length=16,
            quantiles=[0.1, 0.5, 0.9],
        ),
        lambda: {"past_values": normal(B, 64), "past_values_padding": torch.zeros(B, 64)},
        {"past_values": {0: "batch"}, "past_values_padding": {0: "batch"}},
        out="last_hidden_state",
    ),
)
