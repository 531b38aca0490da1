"""Text decoders of transformers with RMSNorm before the rotary embedding, over each head or the whole projection."""

from __future__ import annotations

from tests.zoo.entries import Entries
from tests.zoo.hugging_face import MOE, TXT_NOHD, decoder

ZOO: Entries = {}

# ------------------------------------------------------------------ 1. text decoders, RMSNorm per head, before RoPE
R = {"norm": "rms"}
decoder(ZOO, "qwen3", "qwen3", "Qwen3Config", "Qwen3ForCausalLM", R)
decoder(
    ZOO,
    "qwen3_sliding",
    "qwen3",
    "Qwen3Config",
    "Qwen3ForCausalLM",
    dict(R, mask="causal+sliding"),
    use_sliding_window=True,
    sliding_window=4,
    max_window_layers=1,
)
decoder(ZOO, "qwen3_mha", "qwen3", "Qwen3Config", "Qwen3ForCausalLM", dict(R, gqa=False), num_key_value_heads=4)
decoder(ZOO, "qwen3_moe", "qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", R, **MOE)
decoder(ZOO, "apertus", "apertus", "ApertusConfig", "ApertusForCausalLM", R)
decoder(
    ZOO,
    "exaone4",
    "exaone4",
    "Exaone4Config",
    "Exaone4ForCausalLM",
    dict(R, mask="causal+sliding", extras=["nope_on_global_layers"]),
    sliding_window=4,
    sliding_window_pattern=2,
)
decoder(
    ZOO,
    "lfm2",
    "lfm2",
    "Lfm2Config",
    "Lfm2ForCausalLM",
    dict(R, eps=1e-5, extras=["names:q_layernorm"]),
    base=TXT_NOHD,
    cache="hybrid",
    layer_types=["full_attention", "conv"],
    block_auto_adjust_ff_dim=False,
)
decoder(
    ZOO,
    "lfm2_moe",
    "lfm2_moe",
    "Lfm2MoeConfig",
    "Lfm2MoeForCausalLM",
    dict(R, extras=["names:q_layernorm"]),
    base=TXT_NOHD,
    cache="hybrid",
    layer_types=["full_attention", "conv"],
    num_dense_layers=1,
    **MOE,
)
decoder(
    ZOO,
    "glm4_moe_qknorm",
    "glm4_moe",
    "Glm4MoeConfig",
    "Glm4MoeForCausalLM",
    dict(R, rope="half-partial(0.5)", flag="use_qk_norm=True"),
    use_qk_norm=True,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
decoder(
    ZOO,
    "beam",
    "beam",
    "BeamConfig",
    "BeamForCausalLM",
    {"norm": "rms_w_fp32", "mask": "causal+sliding", "extras": ["gate_sigmoid_elem", "pos_dependent_q_scale"]},
    sliding_window=4,
    layer_types=["sliding_attention", "full_attention"],
    n_group=1,
    topk_group=1,
    mlp_layer_types=["dense", "sparse"],
    **MOE,
)
decoder(
    ZOO,
    "flint",
    "flint",
    "FlintConfig",
    "FlintForCausalLM",
    {"norm": "rms_w_fp32", "mask": "causal+sliding", "extras": ["sinks", "nope_on_global_layers"]},
    sliding_window=4,
    layer_types=["sliding_attention", "full_attention"],
    **MOE,
)
decoder(
    ZOO,
    "doge",
    "doge",
    "DogeConfig",
    "DogeForCausalLM",
    dict(R, mask="dynamic_data_dependent", extras=["per_head_additive_mask"]),
    num_experts=4,
)
decoder(
    ZOO, "qwen3_vl_text", "qwen3_vl", "Qwen3VLTextConfig", "Qwen3VLTextModel", dict(R, rope="half m-rope(interleaved sections)")
)
decoder(
    ZOO,
    "qwen3_omni_thinker_text",
    "qwen3_omni_moe",
    "Qwen3OmniMoeTextConfig",
    "Qwen3OmniMoeThinkerTextModel",
    dict(R, rope="half m-rope"),
    **MOE,
)
decoder(
    ZOO,
    "molmo2_text_qwen3",
    "molmo2",
    "Molmo2TextConfig",
    "Molmo2TextModel",
    dict(R, flag="qk_norm_type=qwen3"),
    qk_norm_type="qwen3",
)

# ------------------------------------------------------------------ 2. full-hidden-dim RMSNorm (before head split)
FH = {"axis": "full_hidden"}
decoder(ZOO, "olmo2", "olmo2", "Olmo2Config", "Olmo2ForCausalLM", dict(FH, norm="rms_w_fp32"), base=TXT_NOHD)
decoder(
    ZOO,
    "olmo3",
    "olmo3",
    "Olmo3Config",
    "Olmo3ForCausalLM",
    dict(FH, norm="rms_w_fp32", mask="causal+sliding"),
    base=TXT_NOHD,
    sliding_window=4,
    layer_types=["sliding_attention", "full_attention"],
)
decoder(
    ZOO,
    "olmo_hybrid",
    "olmo_hybrid",
    "OlmoHybridConfig",
    "OlmoHybridForCausalLM",
    dict(FH, norm="rms_w_fp32"),
    base=TXT_NOHD,
    cache="hybrid",
    layer_types=["full_attention", "linear_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)
decoder(ZOO, "olmoe", "olmoe", "OlmoeConfig", "OlmoeForCausalLM", dict(FH, norm="rms", eps=1e-5), base=TXT_NOHD, **MOE)
decoder(
    ZOO,
    "olmoe_clip",
    "olmoe",
    "OlmoeConfig",
    "OlmoeForCausalLM",
    dict(FH, norm="rms", eps=1e-5, extras=["clip_qkv_after_norm"]),
    base=TXT_NOHD,
    clip_qkv=1.0,
    **MOE,
)
