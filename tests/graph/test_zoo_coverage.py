"""Every entry of the zoo: what is QK-Norm attention becomes one proven node each, look-alikes stay, and each miss says why."""

from __future__ import annotations

import dataclasses

import pytest

from tests.graph.zoo_export import assert_parity, exported, fused


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How many attentions are fused, declined and plain, and a word of the reason of each refusal."""

    fused: int = 2
    declined: int = 0
    plain: int = 0
    reason: str = ""


LOOKALIKES = {
    "blt_cross_NOT_qknorm": Outcome(fused=0, plain=1),
    "deepseek_v32_indexer_NOT_attention": Outcome(fused=0),
    "h_batchnorm_eval": Outcome(fused=0, declined=2, reason="BatchNormalization"),
    "h_dynamic_tanh": Outcome(fused=0, declined=2, reason="Tanh"),
    "olmoe_clip": Outcome(fused=0, declined=2, reason="clipped"),
}
ONE = Outcome(fused=1)
OUTCOMES = {
    "dory_ngpt": Outcome(fused=4),
    "glm5_next_vision_attn": ONE,
    "glm_ocr_vision_attn": ONE,
    "h_joint_mmdit": ONE,
    "lfm2": ONE,
    "lfm2_moe": ONE,
    "lfm3_vl_vision_attn": ONE,
    "llama4_text": Outcome(fused=1, plain=1),
    "mllama_cross": ONE,
    "muse_glimmer_assistant_attn": ONE,
    "nemotron_transcribe_attn": ONE,
    "olmo_hybrid": ONE,
    "qwen3_omni_code_predictor_attn": ONE,
    "swinv2": Outcome(fused=4),
    "t5gemma2_merged_attn": ONE,
    **LOOKALIKES,
}
# torch cannot export it: its sparse indexer branches on data.
NOT_EXPORTED = {"qwen4_exp_text"}
# Exported by test_fuse_exported, or twins of entries that are.
QUICK = {
    *LOOKALIKES,
    "deepseek_v4",
    "h_diff_attention_qknorm",
    "h_groupnorm",
    "h_joint_mmdit",
    "h_rms_fullhidden_gqa",
    "stablelm_qk",
    "swinv2",
    "t5gemma2_merged_attn",
    "zaya",
} - {"olmoe_clip"}


def check(zoo, name, attention, opset):
    expected = OUTCOMES.get(name, Outcome())
    source = exported(zoo, name, attention=attention, opset=opset)
    model, report = fused(source.model)
    assert [item.note for item in report.fused] == [""] * expected.fused, report
    assert (len(report.declined), len(report.refused), len(report.plain)) == (expected.declined, 0, expected.plain), report
    assert all(expected.reason in item.reason and item.node for item in report.declined)
    kinds = [node.op_type for node in model.graph]
    assert kinds.count("QKNormAttention") == expected.fused
    assert "RotaryEmbedding" not in kinds or expected.declined or expected.plain
    if expected.fused:
        for sizes in ({"batch": 3, "seq": 13, "kv": 5, "txt": 4, "patches": 9}, {"batch": 1, "seq": 3, "kv": 2}):
            assert_parity(model, source, sizes=sizes)


@pytest.mark.parametrize("entry", sorted(QUICK))
def test_quick_entries(zoo, entry):
    check(zoo, entry, "sdpa", 20)


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "opset"), [("sdpa", 20), ("eager", 20), ("sdpa", 23), ("sdpa", 25)])
def test_every_entry(zoo, attention, opset, subtests):
    for name in zoo.ZOO:
        if name not in NOT_EXPORTED:
            with subtests.test(name):
                check(zoo, name, attention, opset)


def test_the_lists_name_entries_of_the_zoo(zoo):
    assert set(OUTCOMES) | NOT_EXPORTED | QUICK <= set(zoo.ZOO)
