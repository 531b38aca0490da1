"""One run of a finished export beside its module: proofs look at our own rewrites, this looks at everything."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qknorm_onnx.errors import ExportError, InputError
from qknorm_onnx.graph.model_file import weight_bytes
from qknorm_onnx.pipeline import Program
from qknorm_onnx.runtime.runner import CannotRunError, has_onnxruntime, model_float_type
from qknorm_onnx.spec.signature import Dtype
from qknorm_onnx.validation.candidate import Candidate, candidate_in, rounded_inputs
from qknorm_onnx.validation.cases.case import Case
from qknorm_onnx.validation.cases.inputs import GraphInput, match_inputs
from qknorm_onnx.validation.cases.made import make_cases
from qknorm_onnx.validation.measures.error_budget import unit
from qknorm_onnx.validation.measures.metrics import finite, relative_error
from qknorm_onnx.validation.type_run import places_by_name
from qknorm_onnx.validation.validate import validate

if TYPE_CHECKING:
    import torch

    from qknorm_onnx.validation.torch_side import ModuleCall

Tensor = npt.NDArray[Any]

MOST_WEIGHT_BYTES: Final = 2 << 30
UNITS: Final = 64  # of the type, of an output's largest value: nearer than that needs no further look
# The first that the module takes: another batch than the example's shows sizes that were built in.
_WANTED: Final = ("batch 3", "batch 1", "longer", "example")
_DTYPES: Final[Mapping[ir.DataType, Dtype]] = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """A module's outputs on one case."""

    case: Case
    names: tuple[str, ...]
    values: list[Tensor]


def check_export(
    program: Program,
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    always: bool,
    translate: Callable[[], ir.Model],
) -> tuple[str, ...]:
    """Run `program` and `module` on one small case, and return notes; where nothing was run, one says why.

    An output that is off by more than `UNITS` units of its type is judged by the full budget, as `validate` does.

    Args:
        program: the finished export.
        module: what was exported; it runs in evaluation mode, its buffers are put back.
        args: example arguments.
        kwargs: example keyword arguments.
        always: also where the weights are larger than 2 GiB.
        translate: makes the graph as PyTorch translated it, before our rewrites, to see whose fault a fault is.

    Raises:
        ExportError: the model computes something else than the module, or does not run where the module does.
    """
    model, dtype = program.model, _DTYPES.get(model_float_type(program.model))
    if weight_bytes(model) > MOST_WEIGHT_BYTES and not always:
        return ("the finished model was not run beside its module: its weights take more than 2 GiB (check=True does it)",)
    if dtype is None or not has_onnxruntime():
        reason = "onnxruntime is missing" if dtype is not None else "its type is none of float32, float16, bfloat16"
        return (f"the finished model was not run beside its module: {reason}",)
    from qknorm_onnx.validation.torch_side import call_of

    call = call_of(module, tuple(args), kwargs)
    try:
        candidate = candidate_in(model, dtype)
        inputs = match_inputs(model, call.examples())
    except InputError as error:
        return (f"the finished model was not run beside its module: {error}",)
    run = _first_run(call, inputs, dtype)
    if run is None or _is_near(candidate, run, dtype):
        return ()
    return _judged(program, module, tuple(args), kwargs, case=run.case, dtype=dtype, translate=translate)


def _first_run(call: ModuleCall, inputs: Sequence[GraphInput], dtype: Dtype) -> _Run | None:
    """The module on the first wanted case that it takes; None where it takes not even its example."""
    from qknorm_onnx.validation.torch_side import one_run

    made = {case.name: case for case in make_cases(inputs, seeds=0) if case.name in _WANTED}
    places = {item.name: call.tensor_places[item.leaf] for item in inputs}
    for name in _WANTED:
        case = made.get(name)
        if case is None:
            continue
        try:
            with _as_it_was(call.module):
                names, values = one_run(call, {places[key]: array for key, array in rounded_inputs(case.inputs, dtype).items()})
        except Exception:
            continue  # the module itself refuses such sizes
        return _Run(case=dataclasses.replace(case, required=True), names=names, values=values)
    return None


@contextmanager
def _as_it_was(module: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode inside; modes and buffers are put back, as a module may write to its own cache."""
    import torch

    modes = [(part, part.training) for part in module.modules()]
    kept = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
        with torch.no_grad():
            for buffer, before in kept:
                if buffer.shape == before.shape:
                    buffer.copy_(before)


def _is_near(candidate: Candidate, run: _Run, dtype: Dtype) -> bool:
    """Whether every output is what the module gives, up to a few units of the type."""
    try:
        given = candidate.run(rounded_inputs(run.case.inputs, dtype))
    except CannotRunError:
        return False
    if len(given) != len(run.values):
        return False
    places = places_by_name(candidate.runner.output_names, run.names)
    return all(_one_is_near(value, run.values[place], dtype) for value, place in zip(given, places, strict=True))


def _one_is_near(given: Tensor, wanted: Tensor, dtype: Dtype) -> bool:
    if given.shape != wanted.shape:
        return False
    if not np.issubdtype(wanted.dtype, np.floating):
        return bool(np.array_equal(given, wanted))
    where = finite(wanted)
    if not where.any():
        return True
    return relative_error(given, wanted, where) <= UNITS * unit(dtype)


def _judged(
    program: Program,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    *,
    case: Case,
    dtype: Dtype,
    translate: Callable[[], ir.Model],
) -> tuple[str, ...]:
    report = validate(program, module, args, kwargs, dtypes=(dtype,), cases=[case], locate=1)
    bad = [row for row in report.failures if row.case == case.name]
    if not bad:
        return ()
    if _is_random(module, args, kwargs):
        return ("the finished model was not checked: its module gives other results at each call",)
    translated = validate(translate(), module, args, kwargs, dtypes=(dtype,), cases=[case], locate=0)
    theirs = any(row.case == case.name for row in translated.failures)
    whose = "PyTorch's translation is at fault" if theirs else "a rewrite of this package is at fault, please report it"
    row = bad[0]
    cause = f"; {row.fault.text}" if row.fault is not None else ""
    raise ExportError(
        f"the export does not compute what {type(module).__name__} computes: case {row.case}, output {row.output}: "
        f"{row.why}{cause}; {whose}. With check=False it is returned as it is"
    )


def _is_random(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> bool:
    """Whether two runs on the example differ."""
    from qknorm_onnx.validation.torch_side import call_of, one_run

    call = call_of(module, args, kwargs)
    with _as_it_was(module):
        (_, first), (_, second) = (one_run(call, {}) for _ in range(2))
    return any(
        not np.array_equal(a, b, equal_nan=np.issubdtype(a.dtype, np.floating)) for a, b in zip(first, second, strict=True)
    )
