"""What attention a model file has, without changing it."""

from __future__ import annotations

import dataclasses
import itertools
import logging

import onnx_ir as ir

from qknorm_onnx.graph.canonical.lowered_mark import read_mark
from qknorm_onnx.graph.canonical.qk_norm_node import is_attention_node
from qknorm_onnx.graph.fusion_report import Declined, FusionReport
from qknorm_onnx.graph.model_file import ModelSource, label_of, load_model
from qknorm_onnx.graph.onnxruntime_release import needs_of
from qknorm_onnx.graph.passes.fuse import FuseQKNormPass
from qknorm_onnx.graph.passes.prepare import PreparePass
from qknorm_onnx.graph.passes.raise_opset import raise_to_floor
from qknorm_onnx.graph.soundness.guard import one_line
from qknorm_onnx.graph.walk.readings import ROOMS, Reading


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
    prepare = PreparePass()
    prepare(model)
    fuse_pass = FuseQKNormPass(None, keeps=lambda _mark: True)
    fuse_pass(model)
    notes = (*([raised] if raised else []), *prepare.kept, *fuse_pass.report.notes)
    report = dataclasses.replace(fuse_pass.report, notes=notes)
    present = tuple(item for item in report.fused if item.name in done)
    recognised = tuple(item for item in report.fused if item.name not in done)
    return Inspection(dataclasses.replace(report, fused=present, needs=needs), FusionReport(fused=recognised))


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What the recognisers were asked on the way to one refusal, in order."""

    declined: Declined
    readings: tuple[Reading, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        """One line for each node that was read, and for those that were not, where each reader gave up and what it found there.

        Nodes that only move axes, and that nobody looked into, are left out, except the last one.
        """
        found: list[str] = []
        groups = [list(group) for _, group in itertools.groupby(self.readings, key=lambda reading: reading.asked)]
        for group in groups:
            read = [reading for reading in group if reading.outcome != "no"]
            stops = dict.fromkeys(f"  {reading.reader}: {reading.stopped}" for reading in group if reading.stopped)
            if read and read[-1].outcome == "declined":
                found += [f"{group[0].asked}: declined by {read[-1].reader}", *stops]
            elif read:
                found.append(f"{group[0].asked}: read by {read[-1].reader}")
            elif stops or group is groups[-1]:
                asked = ", ".join(dict.fromkeys(reading.reader for reading in group))
                found += [f"{group[0].asked}: not read", *stops, f"  asked: {asked}"]
        return tuple(found)


def explain_model(source: ModelSource) -> tuple[Inspection, tuple[Explanation, ...]]:
    """`inspect_model`, and for each declined attention how far each recogniser came: as the loggers of the rooms say it."""
    logger, listener = logging.getLogger(ROOMS), _Listener()
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.DEBUG)
    try:
        inspection = inspect_model(source)
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
    return inspection, tuple(listener.found)


class _Listener(logging.Handler):
    """Gathers readings, from the first one of a node to the refusal that they lead to."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[Explanation] = []
        self._readings: list[Reading] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep what a record carries; nothing is printed."""
        reading, declined = getattr(record, "reading", None), getattr(record, "declined", None)
        if hasattr(record, "begins"):
            self._readings = []
        if isinstance(reading, Reading):
            self._readings.append(reading)
        if isinstance(declined, Declined):
            self.found.append(Explanation(declined, tuple(self._readings)))
            self._readings = []
