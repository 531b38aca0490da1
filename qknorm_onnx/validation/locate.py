"""Where a model goes wrong: the first part of the module that it does not compute, or the first operator that rounds too much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qknorm_onnx.runtime.runner import CannotRunError, make_runner
from qknorm_onnx.spec.signature import DOMAIN
from qknorm_onnx.validation.candidate import Candidate
from qknorm_onnx.validation.inside.inner_values import InnerValue, inner_values
from qknorm_onnx.validation.inside.module_results import FirstDifference, first_difference
from qknorm_onnx.validation.measures.metrics import finite, relative_error
from qknorm_onnx.validation.report.fault import Fault, FaultKind
from qknorm_onnx.validation.shared_weights import FileWeights

if TYPE_CHECKING:
    from qknorm_onnx.validation.torch_side import TorchSide

Tensor = npt.NDArray[Any]


def locate_fault(
    candidate: Candidate,
    side: TorchSide,
    inputs: Mapping[str, Tensor],
    truth: Sequence[Tensor],
    *,
    allowed: float,
    torch_not_finite: bool,
) -> Fault:
    """What is wrong with `candidate` on one case whose outputs should be `truth`, within `allowed`."""
    try:
        exact = make_runner(candidate.model, arithmetic="float64").run(inputs)
        meaning = _meaning(candidate, exact, truth, allowed)
        values = list(inner_values(candidate.model, inputs, arithmetic=candidate.arithmetic))
    except CannotRunError as error:
        return Fault(kind="not found", text=f"the values inside the graph could not be read: {error}")
    if meaning:
        return _fault_of_meaning(candidate, side, inputs, values, meaning)
    return _first_fault(values, allowed, torch_not_finite)


def _meaning(candidate: Candidate, exact: Mapping[str, Tensor], truth: Sequence[Tensor], allowed: float) -> str:
    for name, wanted in zip(candidate.runner.output_names, truth, strict=True):
        value = exact[name]
        if value.shape != wanted.shape:
            return f"output {name} has shape {value.shape} instead of {wanted.shape}"
        error = relative_error(value, wanted, finite(wanted) & finite(value))
        if error > allowed:
            return f"the graph computes something else than the module: in float64 output {name} is off by {error:.2g}"
    return ""


def _fault_of_meaning(
    candidate: Candidate, side: TorchSide, inputs: Mapping[str, Tensor], values: Sequence[InnerValue], meaning: str
) -> Fault:
    """The first part of the module that the graph computes otherwise, the attention there, and weights that the file lacks."""
    try:
        results = side.results_of_parts(inputs)
    except Exception:
        return Fault(kind="meaning", text=meaning)  # the case itself ran, its hooks did not: what is known is said
    difference = first_difference(results, [value.exact for value in values])
    if difference is None:
        return Fault(kind="meaning", text=meaning)
    lacking = list(_lacking_weights(candidate.model, side, difference))
    parts = [
        meaning,
        f"right up to the result of {difference.last_right}, off from that of {difference.first_wrong} on",
        f"no weight of the file is {' or '.join(lacking)}" if lacking else "",
    ]
    node = _attention_at(candidate.model, difference)
    return Fault(kind="meaning", text="; ".join(part for part in parts if part), node=node, part=difference.first_wrong)


def _lacking_weights(model: ir.Model, side: TorchSide, difference: FirstDifference) -> Iterator[str]:
    """Parameters of the suspects that are nowhere in the file, though their twins of other layers are."""
    weights = FileWeights(model)
    parameters = {name: value for name, value in side.parameters().items() if value.size > 1}
    own = [name for name in parameters if name.rpartition(".")[0] in difference.suspects]
    for name in own:
        others = [value for other, value in parameters.items() if other != name and difference.are_twins(other, name)]
        if not weights.equal(parameters[name]) and any(weights.equal(other) for other in others):
            yield name


def _attention_at(model: ir.Model, difference: FirstDifference) -> str:
    """The canonical attention node that is named after the part that goes wrong, or after one around it."""
    names = [str(node.name) for node in model.graph if node.domain == DOMAIN]
    around = [name for name in names if any(part == name or part.startswith(f"{name}.") for part in difference.suspects)]
    return around[0] if around else ""


def _first_fault(values: Sequence[InnerValue], allowed: float, torch_not_finite: bool) -> Fault:
    """The first value that is not finite where it should be, or else the first one that is off by more than `allowed`."""
    good: dict[str, None] = {}
    first: tuple[FaultKind, InnerValue, str] | None = None
    for value in values:
        if value.lost and (first is None or first[0] == "rounding"):
            first = ("not finite", value, f"{value.lost} of {value.size} values are not finite; {_largest(value)}")
        elif value.error > allowed and first is None:
            first = ("rounding", value, f"its result is off by {value.error:.2g}")
        if value.node.domain == DOMAIN and not value.lost and not value.error > allowed:
            good[str(value.node.name)] = None
    if first is None:
        return Fault(
            kind="not found", text="no single operator exceeds the budget: the errors add up", good_attention=tuple(good)
        )
    kind, value, what = first
    text = f"{value.node.op_type} {value.node.name}: {what}"
    if torch_not_finite:
        text += "; eager PyTorch is not finite in this type either"
    return Fault(kind=kind, text=text, node=str(value.node.name), good_attention=tuple(good))


def _largest(value: InnerValue) -> str:
    return f"the largest true one is {value.largest:.3g}" if np.isfinite(value.smallest) else "no true one is"
