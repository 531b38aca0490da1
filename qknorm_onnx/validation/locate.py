"""Where a model goes wrong: the first operator whose result is not what the same graph gives in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qknorm_onnx.runtime.runner import CannotRunError, make_runner
from qknorm_onnx.runtime.value_types import FLOAT_TYPES
from qknorm_onnx.spec.signature import DOMAIN
from qknorm_onnx.validation.candidate import Candidate
from qknorm_onnx.validation.metrics import finite, relative_error

Tensor = npt.NDArray[Any]
FaultKind = Literal["meaning", "not finite", "rounding", "not found"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """`meaning`: the graph computes something else than the module, also in float64. `not finite`, `rounding`: at `node`.

    `good_attention` names the canonical attention nodes whose results are finite and exact enough.
    """

    kind: FaultKind
    text: str
    node: str = ""
    good_attention: tuple[str, ...] = ()


def locate_fault(
    candidate: Candidate, inputs: Mapping[str, Tensor], truth: Sequence[Tensor], *, allowed: float, torch_not_finite: bool
) -> Fault:
    """What is wrong with `candidate` on one case whose outputs should be `truth`, within `allowed`."""
    try:
        watched = _with_all_values(candidate.model)
        exact = make_runner(watched, arithmetic="float64").run(inputs)
        given = make_runner(watched, arithmetic=candidate.arithmetic).run(inputs)
    except CannotRunError as error:
        return Fault(kind="not found", text=f"the values inside the graph could not be read: {error}")
    meaning = _meaning(candidate, exact, truth, allowed)
    if meaning:
        return Fault(kind="meaning", text=meaning)
    return _first_fault(candidate.model, exact, given, allowed, torch_not_finite)


def _with_all_values(model: ir.Model) -> ir.Model:
    """A copy in which every float result of the main graph's operators is an output."""
    watched = model.clone()
    known = set(watched.graph.outputs)
    for node in watched.graph:
        for output in node.outputs:
            if output.dtype in FLOAT_TYPES and output not in known and output.name:
                watched.graph.outputs.append(output)
    return watched


def _meaning(candidate: Candidate, exact: Mapping[str, Tensor], truth: Sequence[Tensor], allowed: float) -> str:
    for name, wanted in zip(candidate.runner.output_names, truth, strict=True):
        value = exact[name]
        if value.shape != wanted.shape:
            return f"output {name} has shape {value.shape} instead of {wanted.shape}"
        error = relative_error(value, wanted, finite(wanted) & finite(value))
        if error > allowed:
            return f"the graph computes something else than the module: in float64 output {name} is off by {error:.2g}"
    return ""


def _first_fault(
    model: ir.Model, exact: Mapping[str, Tensor], given: Mapping[str, Tensor], allowed: float, torch_not_finite: bool
) -> Fault:
    good: list[str] = []
    first: tuple[FaultKind, ir.Node, str] | None = None
    for node in model.graph:
        for output in node.outputs:
            name = str(output.name)
            if name not in exact or name not in given:
                continue
            truth, value = exact[name], given[name]
            # NaN may come from the file's own constants (an epsilon that became 0), and then is there in float64 as well.
            lost = int(((finite(truth) & ~finite(value)) | np.isnan(value.astype(np.float64))).sum())
            error = relative_error(value, truth, finite(truth) & finite(value))
            if lost and (first is None or first[0] == "rounding"):
                first = ("not finite", node, f"{lost} of {truth.size} values are not finite; {_largest(truth)}")
            elif error > allowed and first is None:
                first = ("rounding", node, f"its result is off by {error:.2g}")
            if node.domain == DOMAIN and not lost and not error > allowed:
                good.append(str(node.name))
    if first is None:
        return Fault(
            kind="not found", text="no single operator exceeds the budget: the errors add up", good_attention=tuple(good)
        )
    kind, node, what = first
    text = f"{node.op_type} {node.name}: {what}"
    if torch_not_finite:
        text += "; eager PyTorch is not finite in this type either"
    return Fault(kind=kind, text=text, node=str(node.name), good_attention=tuple(good))


def _largest(truth: Tensor) -> str:
    values = np.abs(truth[np.isfinite(truth)])
    return f"the largest true one is {values.max():.3g}" if values.size else "no true one is"
