"""`validate`: a model against its PyTorch module, in one or several types, on many inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qknorm_onnx.errors import InputError
from qknorm_onnx.graph.model_file import ModelSource
from qknorm_onnx.runtime.runner import loaded_model
from qknorm_onnx.runtime.session import HasModel
from qknorm_onnx.spec.signature import Dtype
from qknorm_onnx.validation.candidate import NUMPY_TYPES
from qknorm_onnx.validation.cases.case import Case
from qknorm_onnx.validation.cases.domain import windows_of
from qknorm_onnx.validation.cases.inputs import match_inputs
from qknorm_onnx.validation.cases.made import make_cases
from qknorm_onnx.validation.cases.untried import untried
from qknorm_onnx.validation.parity_report import ParityReport, ParityRow
from qknorm_onnx.validation.shared_weights import SharedWeights
from qknorm_onnx.validation.spec_check import SpecCheck
from qknorm_onnx.validation.type_run import TypeRun

if TYPE_CHECKING:
    import torch

    from qknorm_onnx.validation.torch_side import TorchSide

__all__ = ["ParityReport", "validate"]

Progress = Callable[[str], None]


def validate(
    program_or_path: HasModel | ModelSource,
    module: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dtypes: Sequence[Dtype] = ("float32",),
    cases: Iterable[Case] | None = None,
    seeds: int = 1,
    progress: Progress | None = None,
) -> ParityReport:
    """Judge a model against float64, with PyTorch's own error in the same type as the budget.

    For each type: weights and inputs are rounded to it; the truth is the module in float64 on them; PyTorch's own error is
    eager `module.to(dtype)` on the CPU; the candidate may be off by twice that plus four units of the type. Where it is off by
    more, PyTorch's own error is the largest of several runs, in which the module adds its sums in other orders: one run alone
    may be lucky. An error that none of them comes near to is a failure. Beside the numbers, the spec of each attention in the
    file is compared with the one that is read off its module, where a reader knows it.

    Args:
        program_or_path: `qk.Program`, path, `onnx.ModelProto` or `onnx_ir.Model`.
        module: the module that it was exported from, with its weights.
        args: example arguments, as for the export.
        kwargs: example keyword arguments.
        dtypes: "float32", "float16", "bfloat16". A float32 file is converted for the others; a file in float16 or bfloat16 is
            judged in its own type. bfloat16 is emulated on the CPU, and the report says so.
        cases: instead of the ones made from the example (its batch and lengths varied, adversarial values).
        seeds: number of further cases with random values at the example's size.
        progress: called with a line of text before each case.

    Returns:
        One row per type, case and output. `passed` needs evidence: a comparison of nothing is a failure.

    Raises:
        InputError: torch is missing, `dtypes` names an unknown type, or the graph's inputs do not match the arguments.
    """
    _require_dtypes(dtypes)
    torch_side = _import_torch_side()
    model = loaded_model(program_or_path)
    call = torch_side.call_of(module, args, kwargs)
    inputs = match_inputs(model, call.examples())
    sides: dict[Dtype, TorchSide] = {dtypes[0]: torch_side.TorchSide(call, inputs, dtypes[0])}
    shared = SharedWeights.of(model, module, sides[dtypes[0]].observed())
    domain = shared.domain(inputs, call.tensor_places, windows=windows_of(module, model))
    chosen = tuple(cases) if cases is not None else tuple(make_cases(inputs, domain=domain, seeds=seeds))
    if not chosen:
        raise InputError("cases is empty: there is nothing to judge")
    rows: list[ParityRow] = []
    specs = SpecCheck.of(model, module)
    notes: dict[str, None] = dict.fromkeys((*untried(inputs, chosen, domain=domain), *shared.untried(), *specs.notes))
    for dtype in dtypes:
        side = sides.pop(dtype, None) or torch_side.TorchSide(call, inputs, dtype)
        run = TypeRun(dtype=dtype, side=side, shared=shared, specs=specs, vocabularies=_vocabularies(module), notes=notes)
        rows += run.rows(model, chosen, progress or _silent)
    return ParityReport(dtypes=tuple(dtypes), rows=tuple(rows), notes=tuple(notes))


def _silent(text: str) -> None:
    """Progress that nobody watches."""
    del text


def _vocabularies(module: torch.nn.Module) -> frozenset[int]:
    import torch

    return frozenset(part.num_embeddings for part in module.modules() if isinstance(part, torch.nn.Embedding))


def _require_dtypes(dtypes: Sequence[Dtype]) -> None:
    if isinstance(dtypes, str) or not dtypes:
        raise InputError(f"dtypes is {dtypes!r}; give a tuple such as ('float32', 'float16')")
    for dtype in dtypes:
        if dtype not in NUMPY_TYPES:
            raise InputError(f"unknown type {dtype!r}; choose among {', '.join(NUMPY_TYPES)}")


def _import_torch_side() -> Any:
    try:
        import torch as _  # noqa: F401

        from qknorm_onnx.validation import torch_side
    except ImportError as error:
        raise InputError("validating needs torch; run: pip install 'qknorm-onnx[torch]'") from error
    return torch_side
