"""What attention a model file has, without changing it."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from qknorm_onnx.graph.canonical.lowered_mark import read_mark
from qknorm_onnx.graph.canonical.qk_norm_node import is_attention_node
from qknorm_onnx.graph.model_file import ModelSource, label_of, load_model
from qknorm_onnx.graph.onnxruntime_release import needs_of
from qknorm_onnx.graph.passes.fuse import FuseQKNormPass
from qknorm_onnx.graph.passes.prepare import PreparePass
from qknorm_onnx.graph.passes.raise_opset import raise_to_floor
from qknorm_onnx.graph.report import FusionReport
from qknorm_onnx.graph.soundness.guard import one_line


@dataclasses.dataclass(frozen=True)
class Inspection:
    """`present`: attention that is one node already or was lowered from one, declined, or plain.

    `recognised`: what `fuse` would make one node.
    """

    present: FusionReport
    recognised: FusionReport


def inspect_model(source: ModelSource) -> Inspection:
    """Recognise the attention of `source` (as `pipeline.fuse` takes it) without proving or writing anything.

    Raises:
        InputError: `source` is no sound ONNX model.
    """
    model = load_model(source)
    with one_line(label_of(source)):
        return _inspect(model)


def _inspect(model: ir.Model) -> Inspection:
    nodes = list(model.graph.all_nodes())
    needs = needs_of(model).line
    done = {node.name for node in nodes if is_attention_node(node)}
    done |= {mark.name for mark in map(read_mark, nodes) if mark is not None}
    raised = raise_to_floor(model)
    PreparePass()(model)
    fuse_pass = FuseQKNormPass(None, keeps=lambda _mark: True)
    fuse_pass(model)
    report = dataclasses.replace(fuse_pass.report, notes=(*([raised] if raised else []), *fuse_pass.report.notes))
    present = tuple(item for item in report.fused if item.name in done)
    recognised = tuple(item for item in report.fused if item.name not in done)
    return Inspection(dataclasses.replace(report, fused=present, needs=needs), FusionReport(fused=recognised))
