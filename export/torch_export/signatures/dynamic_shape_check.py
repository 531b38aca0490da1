"""After an export: every axis that was asked to be dynamic was honoured, or is refused by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import torch

from qknorm_onnx.errors import ExportError
from qknorm_onnx.torch_export.signatures.dynamic_shapes import DynamicAxis, resized
from qknorm_onnx.torch_export.signatures.signature_wrapper import ExampleCall, ExplicitSignature

_TORCH_PLACE: Final = re.compile(r"(?:inputs|L)\['tensors'\]\[(\d+)\]\.(?:shape|size\(\))\[(\d+)\]")


def check_honoured(axes: Sequence[DynamicAxis], program: torch.export.ExportedProgram, wrapper: ExplicitSignature) -> None:
    """Raises ExportError for an axis that the exported program fixed, tied to others, or narrowed so that it matters.

    A branch on a size (`if sequence > 1`) narrows an axis even where both ways compute the same. So where the lower bound is
    too high, module and exported program are compared at the smallest size that was asked for.
    """
    call = wrapper.call
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    inputs = [placeholders[name] for name in program.graph_signature.user_inputs if isinstance(name, str)]
    shapes = {name: node.meta["val"].shape for name, node in zip(call.tensors, inputs, strict=True)}
    for axis in axes:
        size = shapes[axis.tensor][axis.axis]
        if axis.may_be_static:
            continue
        if isinstance(size, int):
            raise ExportError(_refusal(axis, f"the module fixes it at {size}"))
        _check_bounds(axis, size, program, axes, wrapper)


def _check_bounds(
    axis: DynamicAxis,
    size: torch.SymInt,
    program: torch.export.ExportedProgram,
    axes: Sequence[DynamicAxis],
    wrapper: ExplicitSignature,
) -> None:
    expression = size.node.expr
    if not expression.is_symbol:
        if not axis.is_expression:
            raise ExportError(_refusal(axis, f"the module takes only sizes of the form {expression}"))
        return
    bounds = program.range_constraints.get(expression)
    if bounds is None:
        return
    lowest, highest = _bound(bounds.lower, 0), _bound(bounds.upper, None)
    asked_highest = getattr(axis.dim, "max", None)
    if lowest is not None and lowest > axis.lower_bound and not _same_at_smallest(axis, axes, program, wrapper):
        raise ExportError(
            _refusal(
                axis,
                f"the module takes another path below size {lowest}, which the graph would not have; "
                f"accept that with torch.export.Dim({axis.name or 'size'!r}, min={lowest})",
            )
        )
    if highest is not None and not (isinstance(asked_highest, int) and asked_highest <= highest):
        raise ExportError(
            _refusal(
                axis,
                f"the module takes another path above size {highest}, which the graph would not have; "
                f"accept that with torch.export.Dim({axis.name or 'size'!r}, max={highest})",
            )
        )


def _same_at_smallest(
    axis: DynamicAxis, axes: Sequence[DynamicAxis], program: torch.export.ExportedProgram, wrapper: ExplicitSignature
) -> bool:
    """Whether the exported program computes what the module does at the smallest size of `axis`: half of the digits agree."""
    call, _ = resized(wrapper.call, axes, {axis.key: axis.lower_bound})
    tensors = list(call.tensors.values())
    try:
        with torch.no_grad():
            expected = wrapper(*tensors)
            found = program.module(check_guards=False)(*tensors)
    except Exception:  # whatever torch raises at a size that one of the two does not take
        return False
    return all(_agree(a, b) for a, b in zip(expected, found, strict=True))


def _agree(expected: torch.Tensor, found: torch.Tensor) -> bool:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(expected, found)
    bound = float(expected.abs().max()) if expected.numel() else 0.0
    return torch.allclose(expected, found, rtol=0, atol=torch.finfo(expected.dtype).eps ** 0.5 * bound, equal_nan=True)


def _bound(value: Any, default: int | None) -> int | None:
    """A sympy bound as an int; the default where it is infinite."""
    return int(value) if getattr(value, "is_Integer", False) else default


def _refusal(axis: DynamicAxis, reason: str) -> str:
    return f"{axis} cannot be dynamic: {reason}. Change the module, or leave the axis out of dynamic_shapes"


def refused_by_torch(error: BaseException, axes: Sequence[DynamicAxis], call: ExampleCall) -> str | None:
    """The refusal for what torch says about dynamic shapes in `error` or its causes; None if it says nothing about them."""
    names = list(call.tensors)
    current: BaseException | None = error
    while current is not None:
        for line in str(current).splitlines():
            place = _TORCH_PLACE.search(line)
            if place and names and int(place.group(1)) < len(names):
                tensor, number = names[int(place.group(1))], int(place.group(2))
                axis = next((a for a in axes if (a.tensor, a.axis) == (tensor, number)), None)
                if axis is not None:
                    said = _TORCH_PLACE.sub(lambda m: f"{names[int(m.group(1))]}.shape[{m.group(2)}]", line.strip(" -"))
                    return _refusal(axis, f"torch says: {said}")
        current = current.__cause__ or current.__context__
    return None
