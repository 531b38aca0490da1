"""What the softmax of each attention gets on one case, by the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qknorm_onnx.graph.canonical.qk_norm_node import is_attention_node, read_attention_node
from qknorm_onnx.runtime.runner import make_runner
from qknorm_onnx.spec.reference import attention_scores
from qknorm_onnx.spec.signature import ATTENTION_INPUTS

Tensor = npt.NDArray[Any]


def logit_ranges(model: ir.Model, inputs: Mapping[str, Tensor]) -> Iterator[tuple[str, float, float]]:
    """Name, lowest and highest visible logit of each canonical attention of the main graph; the model runs once for each.

    Raises:
        CannotRunError: with an attention's inputs as outputs, the model does not run.
    """
    for place, node in enumerate(model.graph):
        if is_attention_node(node):
            lowest, highest = _range_of(model, place, inputs)
            if math.isfinite(lowest):
                yield str(node.name), lowest, highest


def _range_of(model: ir.Model, place: int, inputs: Mapping[str, Tensor]) -> tuple[float, float]:
    watched = model.clone()
    node = watched.graph[place]
    wanted = dict.fromkeys(value for value in node.inputs if value is not None and value.producer() is not None)
    watched.graph.outputs.extend(value for value in wanted if not value.is_graph_output())
    values = {**inputs, **make_runner(watched, arithmetic="float64").run(inputs)}
    spec, _ = read_attention_node(node)
    given = {
        item.name: _array(value, values) for item, value in zip(ATTENTION_INPUTS, node.inputs, strict=False) if value is not None
    }
    scores = attention_scores(spec, given)
    seen = scores.logits[np.broadcast_to(scores.visible, scores.logits.shape) & np.isfinite(scores.logits)]
    return float(seen.min(initial=math.inf)), float(seen.max(initial=-math.inf))


def _array(value: ir.Value, values: Mapping[str, Tensor]) -> Tensor:
    return value.const_value.numpy() if value.const_value is not None else values[str(value.name)]
