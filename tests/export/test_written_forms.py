"""Forms of attention as people write them, through both exporters of torch: one attention each, fused, right at other sizes."""

from __future__ import annotations

import io
import warnings

import numpy as np
import onnx
import pytest
import torch

import qknorm_onnx as qk
from tests.export.written_forms import KINDS, SIZE, WIDTH, Written, module_of
from tests.foreign.foreign_models import run

AXES = {"x": {0: "batch", 1: "seq"}, "cos": {0: "seq"}, "sin": {0: "seq"}}
# (kind, form) -> what the refusal says of forms that are not read.
DECLINED = {
    ("groups", "chunks"): "Concat stands between its ReduceL2",
    ("groups", "stacked chunks"): "Reshape stands between its ReduceL2",
    ("copies", "cat of values"): "Reshape stands between its R",  # ReduceMean, or from opset 23 on RMSNormalization
    (
        "copies",
        "broadcast by a product with ones",
    ): "Reshape stands between its R",  # ReduceMean, or from opset 23 on RMSNormalization
}
WRITTEN = [(kind, name) for kind, forms in KINDS.items() for name in forms]
FAST = [
    ("copies", "unbind"),
    ("copies", "chunk"),
    ("copies", "stack"),
    ("turn", "halves, rolled"),
    ("turn", "halves, rows flipped"),
]
# The older exporter has no rms_norm and no complex numbers, and repeats by a tensor wrongly.
NOT_IN_TORCHSCRIPT = {
    *(("norm", name) for name in KINDS["norm"] if name.startswith("F.rms_norm")),
    ("groups", "F.rms_norm"),
    ("copies", "repeat_interleave of a tensor"),
    ("turn", "complex"),
    ("one head", "complex"),
}


# Kept with a note: the nodes in front of the groups, taken alone, cannot be run at the sizes of a proof.
UNPROVEN = {("groups", "normalize"), ("groups", "rms with gain"), ("groups", "layer_norm")}


def inputs(batch: int, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, length, WIDTH, generator=generator)
    angles = 6 * torch.rand(length, SIZE // 2, generator=generator)
    return {"x": x, "cos": angles.cos().repeat(1, 2), "sin": angles.sin().repeat(1, 2)}


def torchscript(module: Written, opset: int) -> onnx.ModelProto:
    example, buffer = inputs(2, 5), io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, tuple(example.values()), buffer, dynamo=False, opset_version=opset,
            input_names=list(example), output_names=["y"], dynamic_axes=AXES,
        )  # fmt: skip
    return onnx.load_from_string(buffer.getvalue())


def assert_read(program: qk.Program, kind: str, name: str, *, proven: bool = True) -> None:
    report = program.report
    if (kind, name) in DECLINED:
        assert not report.fused and len(report.declined) == 1, report
        assert DECLINED[kind, name] in report.declined[0].reason, report.declined[0].reason
    else:
        assert len(report.fused) == 1 and not (report.declined or report.refused or report.plain), report
        assert not proven or not report.fused[0].note, report.fused[0].note
    others = inputs(3, 9)
    with torch.no_grad():
        expected = module_of(kind, name)(**others).numpy()
    np.testing.assert_allclose(run(program.to_proto(), others), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "name"), FAST)
def test_a_written_form(kind: str, name: str) -> None:
    assert_read(qk.export(module_of(kind, name), kwargs=inputs(2, 5), dynamic_shapes=AXES, opset=20), kind, name)


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, 20, 23])
@pytest.mark.parametrize(("kind", "name"), WRITTEN)
def test_exported(kind: str, name: str, opset: int) -> None:
    assert_read(qk.export(module_of(kind, name), kwargs=inputs(2, 5), dynamic_shapes=AXES, opset=opset), kind, name)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [form for form in WRITTEN if form not in NOT_IN_TORCHSCRIPT])
def test_written_by_the_older_exporter(kind: str, name: str) -> None:
    program = qk.fuse(torchscript(module_of(kind, name), 17))
    assert_read(program, kind, name, proven=(kind, name) not in UNPROVEN)
