"""`docs/diffusion.md`: its code runs from top to bottom; what it says of other pipelines is so."""

from __future__ import annotations

import re

import pytest
import torch

import qknorm_onnx as qk

BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
SAME = 1e-4  # of white; a grey level of a PNG is 4e-3


@pytest.fixture(scope="module")
def page(repo_root, tmp_path_factory):
    """The names that the page's code leaves behind, after all of it ran in an empty folder; it holds its own assertions."""
    pytest.importorskip("diffusers")
    text = (repo_root / "docs" / "diffusion.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("page"))
        for block in BLOCK.findall(text):
            exec(compile(block, "docs/diffusion.md", "exec"), names)
    return names


def test_the_page_runs_and_both_pipelines_draw_the_same(page):
    assert len(page["program"].report.fused) == 2
    assert page["by_torch"].std() > 0.1
    assert page["difference"] < 1e-4
    assert page["half_difference"] < 0.01


def test_a_file_that_is_off_by_a_percent_draws_other_pictures(page, monkeypatch):
    """The comparison of the page can fail."""
    stand_in = page["pipeline"].transformer
    monkeypatch.setattr(page["pipeline"], "transformer", stand_in)  # put back afterwards

    class Off(page["OnnxTransformer"]):
        def __call__(self, **inputs):
            return (stand_in(**inputs)[0] * 1.01,)

    page["pipeline"].transformer = Off(stand_in.session, page["transformer"])
    assert (page["pictures"](page["pipeline"]) - page["by_torch"]).abs().max() > 1e-3


def randomised(module, seed=3):
    """Random norm gains, and no weight that begins as zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name and parameter.ndim == 1 and name.endswith("weight"):
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
            elif not parameter.any():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return module.eval()


def stable_diffusion_3(page):
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    heads = {"num_attention_heads": 4, "attention_head_dim": 16, "qk_norm": "rms_norm", "dual_attention_layers": (0,)}
    sizes = {"sample_size": 32, "pos_embed_max_size": 32, "in_channels": 4, "out_channels": 4, "num_layers": 2}
    text = {"joint_attention_dim": 32, "caption_projection_dim": 64, "pooled_projection_dim": 32}
    encoders = {f"{kind}{number}": None for kind in ("text_encoder", "tokenizer") for number in ("", "_2", "_3")}
    transformer = randomised(SD3Transformer2DModel(**heads, **sizes, **text))
    return StableDiffusion3Pipeline(transformer, FlowMatchEulerDiscreteScheduler(), page["vae"], **encoders)


def wan(page):
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

    heads = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2, "ffn_dim": 64, "rope_max_seq_len": 32}
    transformer = randomised(WanTransformer3DModel(**heads, in_channels=4, out_channels=4, text_dim=32, freq_dim=16))
    latents = {"z_dim": 4, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    vae = AutoencoderKLWan(base_dim=8, dim_mult=[1] * 4, num_res_blocks=1, temperal_downsample=[False, True, True], **latents)
    return WanPipeline(None, None, vae.eval(), FlowMatchEulerDiscreteScheduler(shift=3.0), transformer=transformer)


def sizes_from_2(*names):
    return [torch.export.Dim(name, min=2, max=64) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "first_spatial_axis", "spatial", "prompts", "fused"),
    [
        (stable_diffusion_3, 2, ("height", "width"), {"guidance_scale": 4.0}, 3),
        (wan, 3, ("height", "width"), {"guidance_scale": 4.0, "num_frames": 5}, 4),
    ],
)
def test_other_pipelines_with_the_same_stand_in(page, monkeypatch, build, first_spatial_axis, spatial, prompts, fused):
    generator = torch.Generator().manual_seed(1)
    embeds = {name: torch.randn(2, 7, 32, generator=generator) for name in ("prompt_embeds", "negative_prompt_embeds")}
    if build is stable_diffusion_3:
        embeds |= {name.replace("prompt", "pooled_prompt"): value[:, 0] for name, value in embeds.items()}
    monkeypatch.setitem(page, "prompts", embeds | prompts)
    torch.manual_seed(0)
    pipeline = build(page)
    by_torch, wide_by_torch = page["pictures"](pipeline), page["pictures"](pipeline, height=32, width=80)
    call = page["recorded_call"](pipeline)
    batch = {0: "batch"}
    axes = {"hidden_states": batch | dict(enumerate(sizes_from_2(*spatial), start=first_spatial_axis))}
    axes |= {"encoder_hidden_states": {0: "batch", 1: "text_tokens"}, "timestep": batch, "pooled_projections": batch}
    program = qk.export(pipeline.transformer, kwargs=call, dynamic_shapes={name: axes.get(name) for name in call})
    assert len(program.report.fused) == fused
    pipeline.transformer = page["OnnxTransformer"](qk.create_session(program), pipeline.transformer)
    assert by_torch.std() > 100 * SAME  # the picture is not blank: a wrong transformer would show
    assert (page["pictures"](pipeline) - by_torch).abs().max() < SAME
    assert (page["pictures"](pipeline, height=32, width=80) - wide_by_torch).abs().max() < SAME
