"""What the file's attention means beside what the module's does: a difference that no input needs to show."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import onnx_ir as ir

from qknorm_onnx.errors import InputError, first_line
from qknorm_onnx.graph.spec_comparison import SpecComparison, SpecDifference, compare_specs
from qknorm_onnx.inspection import inspect_model
from qknorm_onnx.runtime.runner import model_float_type
from qknorm_onnx.spec.signature import Dtype
from qknorm_onnx.validation.measures.error_budget import unit
from qknorm_onnx.validation.report.parity_row import ParityRow

if TYPE_CHECKING:
    import torch

_TYPES: Final[Mapping[ir.DataType, Dtype]] = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
    ir.DataType.DOUBLE: "float64",
}
_HOW_TYPES_ROUND: Final = "norm_weight_order"  # a file that was converted from a wide one does not show it
_CAUSAL: Final = "is_causal"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecCheck:
    """The attentions of a file beside their modules, by name.

    agreeing: those that mean the same. differing: what differs, in words. `notes` say what could not be compared, and where an
    attention that is no node of ours, but would be read as one, means something else: reading it was not proven.
    attention: what each attention of the file computes, in words, by its name.
    """

    agreeing: tuple[str, ...] = ()
    differing: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    attention: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(model: ir.Model, module: torch.nn.Module) -> SpecCheck:
        """Canonical nodes, and what marks of earlier lowerings say, beside what the readers say of `module`."""
        from qknorm_onnx.torch_export.spec_from_module import read_module

        try:
            found = inspect_model(model)
        except InputError as error:
            return SpecCheck(notes=(f"the specs of module and file were not compared: {first_line(error)}",))
        read = read_module(module)
        dtype = _TYPES[model_float_type(model)]
        present, recognised = (compare_specs(read.specs, report, dtype=dtype) for report in (found.present, found.recognised))
        same_type = dtype == _type_of(module)
        differing = {name: ", ".join(lines) for name, lines in _by_name(present.differences, same_type=same_type).items()}
        named = {difference.name for difference in present.differences}
        return SpecCheck(
            agreeing=(*present.agreeing, *sorted(named - set(differing))),
            differing=differing,
            notes=(*read.failures, *_uncompared(present, recognised), *_unproven(recognised, same_type=same_type)),
            attention={item.name: item.line for report in (found.present, found.recognised) for item in report.fused},
        )

    def rows(self, dtype: Dtype, how: str) -> Iterator[ParityRow]:
        """The verdict on each attention that could be compared; `error` is 1 where the two specs differ."""
        for name in (*self.agreeing, *self.differing):
            difference = self.differing.get(name, "")
            yield ParityRow(
                dtype=dtype,
                how=how,
                case="specs",
                output=name,
                verdict="failed" if difference else "passed",
                error=float(bool(difference)),
                torch_error=0.0,
                budget=unit(dtype),
                reason=difference,
                purpose="an epsilon, a scale or a window that no input shows",
            )


def _type_of(module: torch.nn.Module) -> str:
    parameter = next((parameter for parameter in module.parameters() if parameter.is_floating_point()), None)
    return "float32" if parameter is None else str(parameter.dtype).removeprefix("torch.")


def _by_name(differences: Sequence[SpecDifference], *, same_type: bool) -> dict[str, list[str]]:
    lines: dict[str, list[str]] = {}
    for found in differences:
        # A module may leave it to its mask that it is causal; a file that is so wrongly shows it with any two tokens.
        in_mask = found.attribute == _CAUSAL and not found.module
        if not in_mask and (same_type or found.attribute != _HOW_TYPES_ROUND):
            lines.setdefault(found.name, []).append(found.line)
    return lines


def _uncompared(*comparisons: SpecComparison) -> Iterator[str]:
    names = [name for comparison in comparisons for name in comparison.uncompared]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"no reader knows the module of attention {names[0]}{more}: what it means was compared by numbers only"


def _unproven(recognised: SpecComparison, *, same_type: bool) -> Iterator[str]:
    for name, lines in _by_name(recognised.differences, same_type=same_type).items():
        yield f"{name} was read as attention with another meaning than its module's, unproven: {', '.join(lines)}"
