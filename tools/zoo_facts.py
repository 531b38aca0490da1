"""What is known of the zoo's entries without looking at any graph: read from the models' code, not from a recogniser."""

from __future__ import annotations

import dataclasses
from typing import Final


@dataclasses.dataclass(frozen=True)
class Facts:
    """Softmax attentions of one entry: `fusable` ones normalise q or k, `plain` ones do not, `look_alikes` only seem to.

    `reason` is a word of the sentence with which each look-alike is declined. `unread` of the fusable ones are declined too.
    """

    fusable: int = 2
    unread: int = 0
    look_alikes: int = 0
    plain: int = 0
    reason: str = ""


LOOK_ALIKES: Final = {
    "blt_cross_NOT_qknorm": Facts(fusable=0, plain=1),
    "deepseek_v32_indexer_NOT_attention": Facts(fusable=0),
    "h_batchnorm_eval": Facts(fusable=0, look_alikes=2, reason="BatchNormalization"),
    "h_dynamic_tanh": Facts(fusable=0, look_alikes=2, reason="Tanh"),
    "olmoe_clip": Facts(fusable=0, look_alikes=2, reason="clipped"),
}
_LINEAR_TOO: Final = Facts(look_alikes=2, reason="linear attention")
_ONE: Final = Facts(fusable=1)
_OTHERS: Final = {
    "d_acestep": Facts(fusable=4),
    "d_cosmos": Facts(fusable=4),
    "d_dreamlite": Facts(fusable=4),
    "d_flux3": Facts(fusable=4),
    "d_hunyuandit": Facts(fusable=4, plain=1),
    "d_hunyuanimage": Facts(plain=1),
    "d_hunyuanvideo": Facts(plain=1),
    # In float32 too it rounds queries and keys to bfloat16 behind the rotary embedding.
    "d_kandinsky5": Facts(fusable=2, look_alikes=3, reason="rounded"),
    "d_krea2": Facts(fusable=4),
    "d_ltx": Facts(fusable=4),
    "d_lumina2": Facts(fusable=3),
    "d_lumina_next": Facts(fusable=4),
    "d_mochi": Facts(fusable=4, plain=1),
    "d_minimax_h3": Facts(fusable=3),
    "d_motif_video": Facts(fusable=3),
    "d_sana": _LINEAR_TOO,
    "d_sana_video": _LINEAR_TOO,
    "d_sd3": Facts(fusable=3),
    "d_skyreels": Facts(fusable=4),
    "d_wan": Facts(fusable=4),
    "d_wan_i2v": Facts(fusable=6),
    "d_wan_vace": Facts(fusable=8),
    "d_zimage": Facts(fusable=3),
    "dory_ngpt": Facts(fusable=4),
    "glm5_next_vision_attn": _ONE,
    "glm_ocr_vision_attn": _ONE,
    "h_joint_mmdit": _ONE,
    "lfm2": _ONE,
    "lfm2_moe": _ONE,
    "lfm3_vl_vision_attn": _ONE,
    "llama4_text": Facts(fusable=1, plain=1),
    "mllama_cross": _ONE,
    "muse_glimmer_assistant_attn": _ONE,
    "nemotron_transcribe_attn": _ONE,
    "olmo_hybrid": _ONE,
    "qwen3_omni_code_predictor_attn": _ONE,
    "swinv2": Facts(fusable=4),
    "t5gemma2_merged_attn": _ONE,
}
# torch cannot export them: a sparse indexer branches on data, and the tokens of each text are counted in Python.
NOT_EXPORTED: Final = frozenset({"qwen4_exp_text", "d_lumina2"})

_TIES: Final = "the output are indices of the best keys, and equal scores (zeros of a relu, masked ones) have no order"
_ROUTER: Final = (
    "single tokens: where the router finds two experts equal within 1%, rounding to the narrow type chooses the other one; in "
    "PyTorch it does so for other tokens"
)
_ANGLES: Final = (
    "the conversion to the narrow type rounds the angles of the timestep's sinusoids, and the frequencies and rotary tables that "
    "are constants of the graph; PyTorch computes them in float32"
)
# (entry, column of docs/coverage.md) -> why it fails there and stays so.
KNOWN_FAILURES: Final = {
    ("deepseek_v32_indexer_NOT_attention", "fp32"): _TIES,
    ("deepseek_v32_indexer_NOT_attention", "fp16"): _TIES,
    ("deepseek_v32_indexer_NOT_attention", "bf16 emulated"): _TIES,
    ("zaya", "fp16"): _ROUTER,
    ("d_flux2", "fp16"): _ANGLES,
    ("d_krea2", "bf16 emulated"): _ANGLES,
    ("d_prx", "fp16"): _ANGLES,
    ("d_prx", "bf16 emulated"): _ANGLES,
    ("d_zimage", "bf16 emulated"): _ANGLES,
    **{
        (entry, "bf16 emulated"): _ROUTER
        for entry in (
            "lfm2_moe",
            "glm4_moe_qknorm",
            "beam",
            "qwen3_omni_thinker_text",
            "minimax_m3_text",
            "qwen3_next_full",
        )
    },
}


def facts(entry: str) -> Facts:
    """The facts of an entry; most have two layers of attention."""
    return (LOOK_ALIKES | _OTHERS).get(entry, Facts())


def named_entries() -> frozenset[str]:
    """Every entry that is named here."""
    return frozenset(LOOK_ALIKES) | frozenset(_OTHERS) | NOT_EXPORTED
