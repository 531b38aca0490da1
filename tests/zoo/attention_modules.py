"""Attention modules of transformers alone: what surrounds them needs ragged inputs, caches or involved conditioning."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from tests.zoo.entries import VOCAB, B, Entries, S, normal, randomised
from tests.zoo.hugging_face import TXT, ent, model_class, with_attention

ZOO: Entries = {}


class AttnOnly(nn.Module):
    """One attention module of transformers: `call(attention, **inputs)`, the first output."""

    def __init__(self, attn, call):
        super().__init__()
        self.attn = attn
        self.call = call

    def forward(self, **inputs):
        output = self.call(self.attn, **inputs)
        return output[0] if isinstance(output, (tuple, list)) else output


def attn_ent(entries, name, tags, make):
    ent(entries, name, tags | {"level": "attention module only"}, make)


def half_angles(length, head_dim):
    """Angles (1, length, head_dim) of the rotary embedding whose halves belong together."""
    angles = torch.arange(length)[:, None] * (1.0 / 10000 ** (torch.arange(0, head_dim, 2) / head_dim))
    return torch.cat((angles, angles), -1)[None]


def _mllama(attention):
    cfg = with_attention(
        model_class("mllama", "MllamaTextConfig")(
            vocab_size=VOCAB,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=96,
            cross_attention_layers=[1],
            pad_token_id=0,
        ),
        attention,
    )

    m = randomised(model_class("mllama", "MllamaTextCrossAttention")(cfg, layer_idx=1))
    return (
        AttnOnly(
            m, lambda a, hidden_states, cross_attention_states: a(hidden_states, cross_attention_states=cross_attention_states)
        ),
        {"hidden_states": normal(B, S, 64), "cross_attention_states": normal(B, 9, 64, seed=3)},
        {"hidden_states": {0: "batch", 1: "seq"}, "cross_attention_states": {0: "batch", 1: "kv"}},
    )


attn_ent(ZOO, "mllama_cross", {"family": "mllama", "norm": "rms", "order": "no_rope", "mask": "cross", "gqa": True}, _mllama)


def _blt(attention):
    settings = model_class("blt", "BltGlobalTransformerConfig")
    cfg = with_attention(
        settings(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96),
        attention,
    )
    kind = model_class("blt", "BltCrossAttention")
    m = randomised(kind(cfg, layer_idx=0, hidden_size=64))
    return (
        AttnOnly(
            m, lambda a, hidden_states, cross_attention_states: a(hidden_states, cross_attention_states=cross_attention_states)
        ),
        {"hidden_states": normal(B, S, 64), "cross_attention_states": normal(B, 9, 64, seed=3)},
        {"hidden_states": {0: "batch", 1: "seq"}},
    )


attn_ent(
    ZOO,
    "blt_cross_NOT_qknorm",
    {
        "family": "blt",
        "norm": "rms BEFORE projection (input norm, named q_norm/k_norm)",
        "order": "no_rope",
        "mask": "cross",
        "extras": ["negative control: must NOT match"],
    },
    _blt,
)


def _simple_vis(mod, cfgc, ac, kw, hd, **ck):
    def f(attention):
        cfg = with_attention(model_class(mod, cfgc)(**kw), attention)
        m = randomised(model_class(mod, ac)(cfg, **ck))
        n = 12
        cos, sin = torch.cos(normal(n, hd, seed=2)), torch.sin(normal(n, hd, seed=2))
        cu = torch.tensor([0, n], dtype=torch.int32)
        return (
            AttnOnly(m, lambda a, hidden_states, cos, sin: a(hidden_states, cu_seqlens=cu, position_embeddings=(cos, sin))),
            {"hidden_states": normal(n, kw["hidden_size"]), "cos": cos, "sin": sin},
            {},
        )

    return f


attn_ent(
    ZOO,
    "glm_ocr_vision_attn",
    {"family": "glm_ocr", "norm": "rms", "rope": "half 2-D vision (fp32)", "extras": ["packed varlen (cu_seqlens)"]},
    _simple_vis(
        "glm_ocr",
        "GlmOcrVisionConfig",
        "GlmOcrVisionAttention",
        {"hidden_size": 64, "num_heads": 4, "depth": 2, "attention_bias": True},
        16,
    ),
)
attn_ent(
    ZOO,
    "glm5_next_vision_attn",
    {"family": "glm5_next", "norm": "rms", "rope": "half 2-D vision (fp32)", "extras": ["packed varlen (cu_seqlens)"]},
    _simple_vis(
        "glm5_next",
        "Glm5NextVisionConfig",
        "Glm5NextVisionAttention",
        {"hidden_size": 64, "num_heads": 4, "depth": 2, "attention_bias": True},
        16,
    ),
)


def _dsv32_indexer(attention):
    indexer = model_class("deepseek_v32", "DeepseekV32Indexer")
    settings = model_class("deepseek_v32", "DeepseekV32Config")
    cfg = with_attention(
        settings(
            vocab_size=VOCAB,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            intermediate_size=96,
            index_n_heads=2,
            index_head_dim=32,
            index_topk=4,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=16,
            moe_intermediate_size=32,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
        ),
        attention,
    )
    m = randomised(indexer(cfg, 0))
    cos, sin = torch.cos(normal(1, S, 16, seed=2)), torch.sin(normal(1, S, 16, seed=2))
    mask = torch.full((S, S), float("-inf")).triu(1)[None]
    return (
        AttnOnly(m, lambda a, hidden_states, q_resid, cos, sin: a(hidden_states, q_resid, (cos, sin), mask, None).float()),
        {"hidden_states": normal(1, S, 64), "q_resid": normal(1, S, 16, seed=4), "cos": cos, "sin": sin},
        {},
    )


attn_ent(
    ZOO,
    "deepseek_v32_indexer_NOT_attention",
    {
        "family": "deepseek_v32",
        "norm": "layernorm on k only",
        "rope": "half-partial",
        "extras": ["negative control: relu scores + topk, no softmax@V"],
    },
    _dsv32_indexer,
)


def _attn_generic(mod, cfgc, ac, kw, hd):
    def f(attention):
        cfg = with_attention(model_class(mod, cfgc)(**kw), attention)
        kind = model_class(mod, ac)
        sig = inspect.signature(kind.__init__).parameters
        m = randomised(kind(cfg, **({"layer_idx": 0} if "layer_idx" in sig else {})))
        ang = half_angles(S, hd)

        def call(a, hidden_states, cos, sin):
            return a(hidden_states, position_embeddings=(cos, sin), attention_mask=None)

        return (
            AttnOnly(m, call),
            {"hidden_states": normal(B, S, 64), "cos": ang.cos(), "sin": ang.sin()},
            {"hidden_states": {0: "batch"}},
        )

    return f


attn_ent(
    ZOO,
    "qwen3_omni_code_predictor_attn",
    {"family": "qwen3_omni_moe", "norm": "rms", "rope": "half", "mask": "causal (none passed at module level)", "gqa": True},
    _attn_generic(
        "qwen3_omni_moe", "Qwen3OmniMoeTalkerCodePredictorConfig", "Qwen3OmniMoeTalkerCodePredictorAttention", dict(TXT), 32
    ),
)
attn_ent(
    ZOO,
    "nemotron_transcribe_attn",
    {"family": "nemotron3_5_transcribe", "norm": "layernorm", "rope": "half-partial", "extras": ["ln bias, eps 1e-5"]},
    _attn_generic(
        "nemotron3_5_transcribe",
        "Nemotron3_5TranscribeAsrAudioConfig",
        "Nemotron3_5TranscribeAttention",
        {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2, "intermediate_size": 96},
        16,
    ),
)
attn_ent(
    ZOO,
    "lfm3_vl_vision_attn",
    {"family": "lfm3_vl", "norm": "rms", "rope": "half 2-D vision (fp32)", "extras": ["packed varlen (cu_seqlens)"]},
    _simple_vis(
        "lfm3_vl",
        "Lfm3VlVisionConfig",
        "Lfm3VlVisionAttention",
        {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 96},
        16,
        layer_idx=0,
    ),
)


def _mga(attention):
    cfg = with_attention(model_class("muse_glimmer_assistant", "MuseGlimmerAssistantConfig")(**TXT), attention)
    m = randomised(model_class("muse_glimmer_assistant", "MuseGlimmerAssistantAttention")(cfg, layer_idx=0))
    n = S + 5
    ang = half_angles(n, 32)
    return (
        AttnOnly(
            m, lambda a, hidden_states, context_hidden_states, cos, sin: a(hidden_states, context_hidden_states, (cos, sin))
        ),
        {
            "hidden_states": normal(B, S, 64),
            "context_hidden_states": normal(B, 5, 64, seed=3),
            "cos": ang.cos(),
            "sin": ang.sin(),
        },
        {"hidden_states": {0: "batch"}, "context_hidden_states": {0: "batch"}},
    )


attn_ent(
    ZOO,
    "muse_glimmer_assistant_attn",
    {
        "family": "muse_glimmer_assistant",
        "norm": "rms",
        "rope": "half; q takes the LAST q_len rows of cos/sin",
        "mask": "bidirectional over context ++ window (kv_len > q_len)",
        "gqa": True,
    },
    _mga,
)


def _t5g2_merged(attention):
    cfg = with_attention(
        model_class("t5gemma2", "T5Gemma2DecoderConfig")(
            **dict(TXT, query_pre_attn_scalar=48, sliding_window=4, layer_types=["sliding_attention", "full_attention"])
        ),
        attention,
    )
    m = randomised(model_class("t5gemma2", "T5Gemma2MergedAttention")(cfg, layer_idx=1))
    ang = half_angles(S, 32)
    mask = torch.cat([torch.full((S, S), float("-inf")).triu(1), torch.zeros(S, 9)], 1)[None, None]
    return (
        AttnOnly(
            m,
            lambda a, hidden_states, encoder_hidden_states, cos, sin, merged_mask: a(
                hidden_states,
                position_embeddings=(cos, sin),
                merged_attention_mask=merged_mask,
                cache=None,
                encoder_hidden_states=encoder_hidden_states,
            ),
        ),
        {
            "hidden_states": normal(B, S, 64),
            "encoder_hidden_states": normal(B, 9, 64, seed=3),
            "cos": ang.cos(),
            "sin": ang.sin(),
            "merged_mask": mask,
        },
        {"hidden_states": {0: "batch"}, "encoder_hidden_states": {0: "batch"}},
    )


attn_ent(
    ZOO,
    "t5gemma2_merged_attn",
    {
        "family": "t5gemma2",
        "norm": "rms_1p (same k_norm on self and cross keys)",
        "rope": "half on self keys only, none on cross keys",
        "scale": "query_pre_attn_scalar**-.5",
        "mask": "causal self ++ cross concatenated",
        "gqa": True,
    },
    _t5g2_merged,
)
