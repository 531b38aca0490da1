"""Which faults no case of a validation can show, in sentences for the report: a pass says nothing about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qknorm_onnx.validation.cases.case import Case
from qknorm_onnx.validation.cases.domain import Domain
from qknorm_onnx.validation.cases.inputs import GraphInput
from qknorm_onnx.validation.cases.padding import is_attention_mask, is_padding_mask
from qknorm_onnx.validation.cases.resized import symbols_of


def untried(inputs: Sequence[GraphInput], cases: Sequence[Case], *, domain: Domain) -> Iterator[str]:
    """One sentence for each kind of fault that no case is for."""
    inputs = domain.refined(inputs)
    yield from _sizes(inputs)
    if not any(is_padding_mask(i) or is_attention_mask(i) or i.kind in ("bool", "flags") for i in inputs):
        yield "no attention mask among the inputs: padding untried"
    if not any(i.is_called_past for i in inputs):
        yield "no cache among the inputs: an empty past and decoding untried"
    yield from _integers(inputs, domain)
    if not any(case.weights for case in cases):
        tried = "tried by inputs only" if any(case.name == "small values" for case in cases) else "untried"
        yield f"the projections of q and k were not found in both module and file: norms near their epsilon {tried}"
    yield from _windows(inputs, cases, domain)


def _sizes(inputs: Sequence[GraphInput]) -> Iterator[str]:
    symbols = symbols_of(inputs)
    if not symbols.batches:
        yield "the batch is fixed: other batches untried"
    if not symbols.lengths and not symbols.pasts:
        yield "every length is fixed: other lengths untried"


def _integers(inputs: Sequence[GraphInput], domain: Domain) -> Iterator[str]:
    if not any(i.kind == "positions" for i in inputs):
        yield "no positions among the inputs: other positions untried"
    numbers = [i.name for i in inputs if i.kind == "number" and i.example.size]
    if numbers:
        names = ", ".join(numbers)
        yield f"as in the example in every case: {names}; a model that has these values built in may pass: try other examples too"
    for graph_input in inputs:
        if graph_input.kind == "tokens" and not domain.rows.get(graph_input.name):
            low, high = graph_input.example.min(), graph_input.example.max()
            yield f"{graph_input.name} was not seen to pick rows of a table: values outside the example's {low} to {high} untried"


def _windows(inputs: Sequence[GraphInput], cases: Sequence[Case], domain: Domain) -> Iterator[str]:
    longest = _longest(inputs, cases)
    wider = [window for window in domain.windows if window >= longest > 0]
    if wider:
        sizes = ", ".join(str(window) for window in wider)
        yield f"sequences of up to {longest} were tried, not longer than a window of {sizes}: to judge it give a longer example"


def _longest(inputs: Sequence[GraphInput], cases: Sequence[Case]) -> int:
    """The largest size of a dimension that may vary, cached tokens and new ones together; 0 where none does."""
    free = [(i.name, axis) for i in inputs for axis, dim in enumerate(i.dims) if not isinstance(dim, int)]
    return max((case.inputs[name].shape[axis] for case in cases for name, axis in free if name in case.inputs), default=0)
