"""What the cases of a validation do not try, in sentences for the report: a pass says nothing about it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import onnx_ir as ir

from qknorm_onnx.validation.cases import Case
from qknorm_onnx.validation.inputs import GraphInput

if TYPE_CHECKING:
    import torch

_WINDOW: Final = re.compile(r"window(_size)?$")  # sliding_window, attention_window_size; not max_window_layers


def untried(inputs: Sequence[GraphInput], cases: Sequence[Case], *, module: torch.nn.Module, model: ir.Model) -> Iterator[str]:
    """Inputs whose values are the example's in every case, and windows that are wider than every sequence tried."""
    fixed = [i.name for i in inputs if i.kind in ("number", "positions") and i.example.size]
    if fixed:
        names = ", ".join(fixed)
        yield f"as in the example in every case: {names}; a model that has these values built in may pass: try other examples too"
    longest = _longest(inputs, cases)
    wider = sorted({window for window in (*_windows_of_module(module), *_windows_of_model(model)) if window >= longest > 0})
    if wider:
        sizes = ", ".join(str(window) for window in wider)
        yield f"sequences of up to {longest} were tried, fewer than a window of {sizes} holds: to judge it give a longer example"


def _longest(inputs: Sequence[GraphInput], cases: Sequence[Case]) -> int:
    """The largest size of a dimension that may vary; 0 where none does."""
    free = [(i.name, axis) for i in inputs for axis, dim in enumerate(i.dims) if not isinstance(dim, int)]
    return max((case.inputs[name].shape[axis] for case in cases for name, axis in free if name in case.inputs), default=0)


def _windows_of_module(module: torch.nn.Module) -> Iterator[int]:
    for part in module.modules():
        for holder in (part, getattr(part, "config", None)):
            for name, value in getattr(holder, "__dict__", {}).items():
                if _WINDOW.search(name) and isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    yield value


def _windows_of_model(model: ir.Model) -> Iterator[int]:
    for node in model.graph.all_nodes():
        for name in ("left_window_size", "local_window_size"):
            attribute = node.attributes.get(name)
            if attribute is not None and attribute.as_int() > 0:
                yield attribute.as_int()
