"""`examples/diffusion.py`: it says "the same pictures" where they are, and only there; trained in full, shapes are recognised."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch

import qknorm_onnx as qk


@pytest.fixture(scope="module")
def side_by_side(diffusion):
    """A network with random weights (its gates are open, its gains differ), its file, and a session of that."""
    torch.manual_seed(5)
    model = diffusion.small_dit.SmallDiT(classes=8, depth=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modulation" in name:
                parameter.normal_(std=0.3)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.uniform_(0.5, 3)
    model.eval()
    program = diffusion.diffusion.exported(model)
    return SimpleNamespace(model=model, program=program, session=qk.create_session(program))


def other_network(side_by_side, change):
    """Weights that `change` has changed, in a copy."""
    other = copy.deepcopy(side_by_side.model)
    with torch.no_grad():
        change(other)
    return other


def without_norm_of_keys(model):
    model.blocks[1].attention.k_norm = torch.nn.Identity()


def with_the_gain_of_queries_for_keys(model):
    model.blocks[0].attention.k_norm.weight.copy_(model.blocks[0].attention.q_norm.weight)


def test_each_attention_is_one_node_with_norm_and_rotary(side_by_side):
    nodes = [node.op_type for node in side_by_side.program.model.graph]
    assert nodes.count("QKNormAttention") == 2
    assert "Softmax" not in nodes
    assert all("rms eps 1e-06, then rotary" in str(fused) for fused in side_by_side.program.report.fused)


def test_pictures_of_every_size_are_the_same_and_saved(diffusion, side_by_side, tmp_path, capsys):
    assert diffusion.diffusion.show_pictures(side_by_side.model, side_by_side.session, diffusion.diffusion.QUICK, tmp_path)
    assert "the same pictures" in capsys.readouterr().out
    from PIL import Image

    for height, width in ((16, 16), (24, 20)):
        levels = np.asarray(Image.open(tmp_path / f"pictures-{height}x{width}.png"))[::4, ::4].astype(int)
        assert levels.shape == (2 * (height + 2) + 2, 8 * (width + 2))
        above, below = levels[: height + 2], levels[height + 4 :]
        assert np.abs(above - below).max() <= 1  # what is rounded to a grey level may fall on either side
        assert len(np.unique(above)) > 50


@pytest.mark.parametrize("change", [without_norm_of_keys, with_the_gain_of_queries_for_keys])
def test_another_network_draws_other_pictures(diffusion, side_by_side, tmp_path, capsys, change):
    other = other_network(side_by_side, change)
    assert not diffusion.diffusion.show_pictures(other, side_by_side.session, diffusion.diffusion.QUICK, tmp_path)
    assert "DIFFERENT" in capsys.readouterr().out


def test_the_judge_names_shapes_and_nothing_in_noise(diffusion):
    judge = diffusion.drawn_shapes.Judge.make()
    generator = torch.Generator().manual_seed(7)
    pictures, labels = diffusion.drawn_shapes.random_pictures(200, generator)
    noise = torch.randn(pictures.shape, generator=generator)
    seen, distance = judge.shapes_in(pictures + 0.3 * noise)
    assert torch.equal(seen, labels)
    seen, far = judge.shapes_in(noise)
    assert float((seen == labels).float().mean()) < 0.5
    assert float(far.min()) > 2 * float(distance.max())


def test_the_whole_road_in_short(diffusion, tmp_path, capsys):
    assert diffusion.diffusion.main(["--quick", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "float32: passed" in out
    assert "all compute the same" in out
    assert len(re.findall(r"^\d+ x \d+ +(?:PyTorch|torch\.onnx|qknorm-onnx): ", out, flags=re.MULTILINE)) == 6
    assert "QKNormAttention" in operators(tmp_path / "model.onnx")
    assert "QKNormAttention" not in operators(tmp_path / "plain.onnx")


def operators(path):
    return {node.op_type for node in onnx.load(path, load_external_data=False).graph.node}


@pytest.mark.slow
def test_trained_in_full_its_shapes_are_recognised(repo_root, tmp_path):
    command = [sys.executable, str(repo_root / "examples" / "diffusion.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    (share,) = re.findall(r"(\d+)% are recognised", done.stdout)
    assert int(share) >= 90
