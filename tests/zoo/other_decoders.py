"""Text decoders of transformers with other norms: gains of 1 + w, after the rotary embedding, without weights, LayerNorm."""

from __future__ import annotations

from tests.zoo.entries import VOCAB, Entries
from tests.zoo.hugging_face import MOE, TXT, TXT_NOHD, decoder

ZOO: Entries = {}

# ------------------------------------------------------------------ 3. zero-centred (1+w) RMSNorm
G = {"norm": "rms_1p"}
decoder(
    ZOO,
    "gemma3_text",
    "gemma3",
    "Gemma3TextConfig",
    "Gemma3ForCausalLM",
    dict(G, scale="query_pre_attn_scalar**-.5", mask="causal+sliding"),
    query_pre_attn_scalar=48,
    sliding_window=4,
    layer_types=["sliding_attention", "full_attention"],
)
decoder(
    ZOO,
    "minimax_m3_text",
    "minimax_m3_vl",
    "MiniMaxM3VLTextConfig",
    "MiniMaxM3VLForCausalLM",
    dict(G, rope="half-partial", extras=["sparse_block_indexer_qknorm"]),
    cache=False,
    **MOE,
)
GD = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
decoder(
    ZOO,
    "qwen3_next_full",
    "qwen3_next",
    "Qwen3NextConfig",
    "Qwen3NextForCausalLM",
    dict(G, rope="half-partial(.25)", extras=["gate_sigmoid_elem"]),
    cache="hybrid",
    layer_types=["full_attention", "full_attention"],
    shared_expert_intermediate_size=32,
    **MOE,
    **GD,
)
decoder(
    ZOO,
    "qwen3_5_text",
    "qwen3_5",
    "Qwen3_5TextConfig",
    "Qwen3_5ForCausalLM",
    dict(G, rope="half-partial m-rope", extras=["gate_sigmoid_elem"]),
    cache="hybrid",
    layer_types=["full_attention", "full_attention"],
    **GD,
)
decoder(
    ZOO,
    "qwen4_exp_text",
    "qwen4_exp",
    "Qwen4ExpTextConfig",
    "Qwen4ExpForCausalLM",
    dict(G, rope="half-partial m-rope", extras=["gate_sigmoid_elem", "sparse_indexer"]),
    cache=False,
    layer_types=["full_attention", "full_attention"],
    shared_expert_intermediate_size=32,
    hc_count=2,
    hc_lowrank=8,
    ple_layer_ids=[],
    ple_embed_dim=16,
    ngram_vocab_size_base=64,
    make_ngram_vocab_size_divisible_by=8,
    split_ngram_parts=2,
    heads_per_ngram=2,
    indexer_n_heads=2,
    indexer_kv_heads=1,
    indexer_head_dim=32,
    indexer_budget=8,
    indexer_compress_ratio=2,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    **GD,
)

# ------------------------------------------------------------------ 4. Gemma3n/4 : fp32 weight, scale 1.0, also V-norm
V = {"norm": "rms_w_fp32", "scale": "1.0", "mask": "causal+sliding", "extras": ["v_norm_unweighted"]}
decoder(
    ZOO,
    "gemma3n_text",
    "gemma3n",
    "Gemma3nTextConfig",
    "Gemma3nForCausalLM",
    dict(V, extras=["v_norm_unweighted", "kv_sharing"]),
    cache=False,
    num_kv_shared_layers=0,
    vocab_size_per_layer_input=VOCAB,
    hidden_size_per_layer_input=16,
    laurel_rank=8,
    sliding_window=4,
    layer_types=["sliding_attention", "full_attention"],
    intermediate_size=[96, 96],
    activation_sparsity_pattern=[0.0, 0.0],
)
decoder(
    ZOO,
    "gemma4_text",
    "gemma4",
    "Gemma4TextConfig",
    "Gemma4ForCausalLM",
    V,
    vocab_size_per_layer_input=VOCAB,
    hidden_size_per_layer_input=16,
    sliding_window=4,
    layer_types=["sliding_attention", "full_attention"],
)
decoder(
    ZOO,
    "gemma4_text_k_eq_v",
    "gemma4",
    "Gemma4TextConfig",
    "Gemma4ForCausalLM",
    dict(V, extras=["v_norm_unweighted", "V is un-normed K projection"]),
    vocab_size_per_layer_input=VOCAB,
    hidden_size_per_layer_input=16,
    sliding_window=4,
    layer_types=["sliding_attention", "full_attention"],
    attention_k_eq_v=True,
    num_global_key_value_heads=1,
)

# ------------------------------------------------------------------ 5. norm AFTER RoPE
A = {"order": "after_rope"}
decoder(ZOO, "hunyuan_v1_dense", "hunyuan_v1_dense", "HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM", dict(A, norm="rms"))
decoder(
    ZOO,
    "llama4_text",
    "llama4",
    "Llama4TextConfig",
    "Llama4ForCausalLM",
    dict(
        A,
        norm="rms_unweighted",
        rope="complex-interleaved",
        mask="causal+chunked",
        extras=["nope_layers without norm", "attn_temperature_tuning"],
    ),
    attention_chunk_size=8,
    num_local_experts=2,
    num_experts_per_tok=1,
    intermediate_size_mlp=96,
    no_rope_layers=[1, 0],
    interleave_moe_layer_step=2,
)

# ------------------------------------------------------------------ 6. unweighted RMS / L2 in-model variants
U = {"norm": "rms_unweighted"}
decoder(
    ZOO,
    "muse_glimmer_text",
    "muse_glimmer",
    "MuseGlimmerTextConfig",
    "MuseGlimmerTextModel",
    dict(U, scale="qk_scale_factor/sqrt(d)", mask="causal+sliding", extras=["gate_sigmoid_elem"]),
    sliding_window=4,
    layer_types=["sliding_attention", "full_attention"],
)
decoder(
    ZOO,
    "dory_ngpt",
    "dory",
    "DoryConfig",
    "DoryForCausalLM",
    {
        "norm": "l2",
        "scale": "per-(head,dim) sqk^2 on q, 1/sqrt(d)",
        "mask": "causal+sliding",
        "extras": ["gate_sigmoid_elem(scaled)", "attn_sub_norm L2", "nGPT-like", "weight tied across recurrent loops"],
    },
    cache=False,
    sliding_window=4,
    num_hidden_layers=3,
    n_input_layers=1,
    n_output_layers=1,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
)
decoder(
    ZOO,
    "zaya",
    "zaya",
    "ZayaConfig",
    "ZayaForCausalLM",
    {
        "norm": "l2_clampmin",
        "scale": "sqrt(d)*temp[kv_head] on k, 1/sqrt(d)",
        "rope": "half-partial",
        "extras": ["conv on qk before norm (CCA)"],
    },
    cache="hybrid",
    router_hidden_size=32,
    num_experts=4,
    num_experts_per_tok=1,
    moe_intermediate_size=32,
    base={k: v for k, v in TXT.items() if k != "intermediate_size"},
)
decoder(
    ZOO,
    "deepseek_v4",
    "deepseek_v4",
    "DeepseekV4Config",
    "DeepseekV4ForCausalLM",
    {
        "norm": "q: rms_unweighted, kv: rms_w_fp32",
        "rope": "interleaved tail partial",
        "extras": ["sinks", "k==v (MQA)", "inverse RoPE on output"],
    },
    cache=False,
    layer_types=["sliding_attention", "sliding_attention"],
    head_dim=32,
    q_lora_rank=32,
    o_groups=2,
    o_lora_rank=16,
    qk_rope_head_dim=16,
    num_key_value_heads=1,
    sliding_window=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
)

# ------------------------------------------------------------------ 7. LayerNorm variants
L = {"norm": "layernorm"}
decoder(
    ZOO,
    "phi_qk",
    "phi",
    "PhiConfig",
    "PhiForCausalLM",
    dict(L, rope="half-partial(.5)", flag="qk_layernorm=True", extras=["ln bias"]),
    base=TXT_NOHD,
    qk_layernorm=True,
    hidden_size=128,
)
decoder(
    ZOO,
    "stablelm_qk",
    "stablelm",
    "StableLmConfig",
    "StableLmForCausalLM",
    dict(
        L,
        axis="head_dim, weight per head",
        rope="half-partial(.25)",
        flag="qk_layernorm=True",
        extras=["one nn.LayerNorm per head: Split+Concat in graph"],
    ),
    base=TXT_NOHD,
    qk_layernorm=True,
    hidden_size=128,
)
decoder(
    ZOO,
    "cohere_qk",
    "cohere",
    "CohereConfig",
    "CohereForCausalLM",
    dict(L, axis="head_dim, weight (heads,head_dim)", rope="interleaved", flag="use_qk_norm=True", extras=["no bias", "fp32"]),
    base=TXT_NOHD,
    use_qk_norm=True,
    hidden_size=128,
)


decoder(
    ZOO,
    "inkling_text",
    "inkling",
    "InklingTextConfig",
    "InklingForCausalLM",
    {
        "norm": "rms",
        "order": "no_rope",
        "rope": "none (learned relative logits added as position_bias)",
        "scale": "1/d (NOT 1/sqrt(d))",
        "mask": "causal+sliding+position_bias",
        "extras": ["short conv on k before norm"],
    },
    cache="hybrid",
    layer_types=["hybrid_sliding", "hybrid"],
    swa_num_attention_heads=4,
    swa_num_key_value_heads=2,
    swa_head_dim=32,
    sliding_window_size=4,
    d_rel=8,
    rel_extent=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    moe_intermediate_size=32,
    mlp_layer_types=["dense", "dense"],
)
